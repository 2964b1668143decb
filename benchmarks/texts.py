"""What is asked of the models: realistic texts of a wanted number of tokens, prompts, test sets.

Plain ASCII letters and punctuation, so that a model of characters knows them all.
"""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from serve.bundle import Bundle, Manifest
from serve.inputs.text import TextCodec

PROMPT = "What news, my lord? "

PARAGRAPHS = (
    "The film begins slowly, with a train that crosses a wide and empty plain, and for half an "
    "hour it seems that nothing will ever happen. Then the brother comes home, and everything "
    "that was said over dinner turns out to have been a lie. I have rarely seen a plot that is "
    "so carefully laid, and the two leads play it without a single false note.",
    "Shares fell for a third day on Thursday after the maker of computer chips warned that "
    "orders from its largest customers would be lower than expected. Analysts said that the "
    "company had built too much, too soon, and that prices would need a year to recover. The "
    "central bank, which meets next week, is expected to leave interest rates where they are.",
    "With four minutes left the visitors were a goal behind and a man short, and most of the "
    "crowd had begun to sing. What followed will be told for years: two corners, two headers, "
    "and a goalkeeper who stood in the mud with his hands on his knees. The coach said only "
    "that his team had never stopped running, and that the final was still far away.",
    "Engineers have switched on a telescope that will look for water in the air of small "
    "planets around nearby stars. The instrument, which took eleven years to build, splits the "
    "light of a star into thousands of colours and watches which of them fade when a planet "
    "passes in front of it. First results are expected before the end of the summer.",
)


def window_of(manifest: Manifest) -> int:
    """The most tokens of a text that the model is given."""
    kept = manifest.text_input.truncation
    return kept.head + kept.tail if kept is not None else manifest.text_input.max_tokens


def answer_tokens(bundle: Bundle, wanted: int) -> int:
    """So many tokens, or as many as the window of the model holds behind the prompt."""
    prompt = TextCodec(bundle).encode_prompt(PROMPT)
    return min(wanted, bundle.manifest.text_input.max_tokens - len(prompt))


def text_of(codec: TextCodec, tokens: int) -> str:
    """The first words of the paragraphs, again and again, that encode to that many tokens or
    just over; `tokens` is at most the window of the model."""
    words = " ".join(PARAGRAPHS).split(" ")

    def encoded_tokens(count: int) -> int:
        text = " ".join(itertools.islice(itertools.cycle(words), count))
        return len(codec.encode_input(text, truncate=True).tokens)

    # A word takes at least one token, so that many words are always enough.
    count = bisect_left(range(1, tokens + 1), tokens, key=encoded_tokens) + 1
    return " ".join(itertools.islice(itertools.cycle(words), count))


# Texts with their right labels: those of a bundle's official test set, or a few without labels.


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A text, and its label if it is known."""

    text: str
    label: str | None


def labelled_texts(bundle: Bundle, data: str | None) -> list[LabelledText]:
    """The test set in the folder, as the bundle's recipe reads it; else made-up texts."""
    if data is None:
        sentences = [part.strip() for text in PARAGRAPHS for part in text.split(". ")]
        return [
            LabelledText(f"{first}. {second}", None) for first in sentences for second in sentences
        ]
    # Here, so that the quick form needs nothing but the server's own packages.
    from train.data.tables import read_table
    from train.recipe import recipe_from

    kept = cast(dict[str, Any], bundle.manifest.provenance["recipe"])
    recipe = recipe_from({**kept, "data": {**kept["data"], "path": data}}, "provenance.recipe")
    names = dict(zip(recipe.data.values, recipe.data.labels, strict=True))
    rows = read_table(recipe.data, recipe.data.test)
    return [LabelledText(text, names[value]) for text, value in rows]


# Texts with the right label of each position that is asked for: a tagger's held-out data.


@dataclass(frozen=True, slots=True)
class TaggedText:
    """A text, and the label of each of its tokens; None where none is asked for."""

    text: str
    labels: tuple[str | None, ...]

    def right(self, given: Sequence[str]) -> tuple[int, bool]:
        """How many labels are right, and whether all are."""
        pairs = zip(given, self.labels, strict=True)
        found = [one == label for one, label in pairs if label is not None]
        return sum(found), all(found)


def tagged_texts(bundle: Bundle, data: str = "") -> list[TaggedText]:
    """The held-out rows of a tagger whose tokens are characters or words, in the data given."""
    from export.quality import dataset_of
    from train.data.batch import IGNORED

    kind, pad_id = bundle.manifest.text_tokenizer.kind, bundle.manifest.text_tokenizer.pad_id
    if kind not in ("chars", "words"):
        raise SystemExit(f"{bundle.folder} has tokens of {kind}, not a label for each")
    dataset = dataset_of(bundle, data)
    tokenizer, labels = dataset.tokenizer, dataset.labels
    assert tokenizer is not None and labels is not None
    found = []
    for batch in dataset.held_out(256):
        for tokens, targets in zip(batch.inputs[0].tolist(), batch.targets.tolist(), strict=True):
            words = [str(tokenizer.id_to_token(token)) for token in tokens if token != pad_id]
            text = ("" if kind == "chars" else " ").join(words)
            known = (labels[one] if one != IGNORED else None for one in targets[: len(words)])
            found.append(TaggedText(text, tuple(known)))
    return found


def check_same_data(bundle: Bundle, others: Sequence[Bundle]) -> None:
    """SystemExit if one of the others was trained on other data."""

    def data_of(one: Bundle) -> dict[str, Any]:
        recipe = cast(dict[str, Any], one.manifest.provenance["recipe"])
        return {**recipe["data"], "path": ""}

    for other in others:
        if data_of(other) != data_of(bundle):
            raise SystemExit(f"{other.folder} was trained on other data than {bundle.folder}")
