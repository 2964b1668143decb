"""Words whose tokens are remembered: for which tokenizers and texts, and how many."""

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from serve.inputs import text as module
from serve.inputs.text import Encoder, WordCache
from tests.fixtures.tiny_bundles import bpe_tokenizer


def tokenizer() -> Tokenizer:
    made = bpe_tokenizer()
    made.encode_special_tokens = True
    return made


def _asks_for_markers(made: Tokenizer) -> None:
    made.encode_special_tokens = False


def _adds_a_word(made: Tokenizer) -> None:
    made.add_tokens([AddedToken("film", special=False)])


def _ends_with_a_marker(made: Tokenizer) -> None:
    made.post_processor = processors.TemplateProcessing("$A <pad>", special_tokens=[("<pad>", 0)])


CHANGES: list[Callable[[Tokenizer], object]] = [
    _asks_for_markers,
    _adds_a_word,
    _ends_with_a_marker,
    lambda made: setattr(made, "normalizer", normalizers.NFC()),
    lambda made: setattr(made, "normalizer", normalizers.Replace("a", "ä")),
    lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.ByteLevel(use_regex=False)),
    lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Whitespace()),
    lambda made: setattr(made, "model", models.WordLevel({"a": 0}, unk_token="a")),
    lambda made: setattr(made.model, "dropout", 0.5),
    lambda made: made.enable_truncation(4),
    lambda made: made.enable_padding(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_known_is_left_to_the_library(change: Callable[[Tokenizer], object]) -> None:
    made = tokenizer()
    assert WordCache.of(made) is not None
    change(made)
    assert WordCache.of(made) is None


@pytest.mark.parametrize(
    "text", ["a film that stays", "caf\N{LATIN SMALL LETTER E WITH ACUTE}", "x" * 999]
)
def test_plain_or_not_the_tokens_are_those_of_the_library(text: str) -> None:
    made = tokenizer()
    assert Encoder(made).encode(text) == made.encode(text).ids


def test_so_many_words_are_remembered_and_none_that_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MOST_WORDS", 3)
    made = tokenizer()
    words = WordCache(made, (), False)
    text = "one two three four five " + "x" * 40
    for _ in range(2):
        assert words.encode(text) == made.encode(text).ids
        assert 0 < len(words._known) <= 3
