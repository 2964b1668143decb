"""Whatever the text: words and characters are where the answer says, each once, in order."""

from hypothesis import given
from hypothesis import strategies as st

from serve.inputs.text import TextCodec
from tests.fixtures.tiny_families import PUZZLE
from tests.fixtures.tiny_folders import tag_bundle, words_tag_bundle

WORDS, CHARACTERS = TextCodec(words_tag_bundle()), TextCodec(tag_bundle())
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)


@given(texts | st.text("ab \t\né東", min_size=1, max_size=60))
def test_words_are_those_between_spaces(text: str) -> None:
    encoded = WORDS.encode_positions(text, truncate=True)
    assert encoded.tokens == WORDS.encode_input(text, truncate=True).tokens
    assert len(encoded.spans) == len(encoded.tokens)
    words = [(start, end) for start, end in encoded.spans if start < end]
    assert words == sorted(set(words))
    found = [text[start:end] for start, end in words]
    if not encoded.truncated:
        assert found == text.split()
    for (start, end), word in zip(words, found, strict=True):
        assert word == word.strip() and (start == 0 or text[start - 1].isspace())
        if not encoded.truncated:
            assert end == len(text) or text[end].isspace()


@given(st.text(PUZZLE, min_size=1, max_size=60))
def test_every_kept_character_has_its_place(text: str) -> None:
    encoded = CHARACTERS.encode_positions(text, truncate=True)
    spec = CHARACTERS.encode_input(text, truncate=True)
    assert (encoded.tokens, encoded.truncated) == (spec.tokens, spec.truncated)
    assert [1 + PUZZLE.index(text[start]) for start, _ in encoded.spans] == encoded.tokens
    assert all(end == start + 1 for start, end in encoded.spans)
    if encoded.truncated:
        starts = [start for start, _ in encoded.spans]
        assert starts == [*range(20), *range(len(text) - 4, len(text))]
