"""Texts with their right labels: those of a bundle's official test set, or a few without labels.

Knows bundles and their data; nothing of what is done with them.
"""

from dataclasses import dataclass
from typing import Any, cast

from benchmarks.texts import PARAGRAPHS
from serve.bundle import Bundle


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
