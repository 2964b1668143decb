"""However text is cut into tokens and pieces, what comes out is the text, up to the stop."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors

from serve.inputs.text import Encoder, StopFilter, TextCodec, TextStream, WordCache
from tests.examples import examples
from tests.fixtures.tiny_bundles import bpe_tokenizer
from tests.fixtures.tiny_folders import classify_bundle

BUNDLE = classify_bundle()
CODEC = TextCodec(BUNDLE)
TOKENS = st.integers(1, BUNDLE.manifest.text_tokenizer.vocab_size - 1)
FEW = st.text(alphabet="ab\n", max_size=30)


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def complete_first(text: str, stops: list[str]) -> int | None:
    """Where the stop begins that is complete first; an earlier start wins among equals."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(ends)[1] if ends else None


@settings(deadline=None)
@given(
    text=FEW,
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=4),
    places=st.lists(st.integers(0, 100)),
)
def test_no_stop_gets_out_whatever_the_pieces(
    text: str, stops: list[str], places: list[int]
) -> None:
    stop_filter, out, stopped = StopFilter(stops), "", False
    for piece in cut(text, places):
        given_out, stopped = stop_filter.push(piece)
        out += given_out
        if stopped:
            break
    if not stopped:
        out += stop_filter.flush()
    at = complete_first(text, stops)
    assert stopped == (at is not None)
    assert out == (text if at is None else text[:at])


@settings(deadline=None)
@given(tokens=st.lists(TOKENS, max_size=40))
def test_pieces_join_to_the_text_of_any_tokens(tokens: list[int]) -> None:
    stream = TextStream(CODEC)
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.flush() == CODEC.decode(tokens)


def _lower() -> Tokenizer:
    tokenizer = bpe_tokenizer()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("<br />", " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


@pytest.mark.parametrize("tokenizer", [bpe_tokenizer(), _lower()], ids=["plain", "lowercase"])
@settings(max_examples=examples(30))
@given(
    words=st.lists(
        st.one_of(
            st.sampled_from(
                ["Good", "film.", "<br /><br />", "  ", "\n\n", "don't", "…", "影片。"]
            ),
            st.text(min_size=1, max_size=20),
        ),
        min_size=1,
        max_size=12,
    ),
    head=st.integers(0, 20),
    tail=st.integers(0, 20),
    glue=st.sampled_from([" ", "\n", ", "]),
)
def test_the_ends_of_a_long_text_are_those_of_the_whole(
    tokenizer: Tokenizer, words: list[str], head: int, tail: int, glue: str
) -> None:
    piece = glue.join(words) + glue
    text = piece * (4000 // len(piece) + 1)
    ends = Encoder(tokenizer).ends(text, head, tail)
    whole = tokenizer.encode(text).ids
    if ends is not None:
        assert ends == (whole[:head], whole[len(whole) - tail :])
        assert len(whole) > head + tail


def _gpt2() -> Tokenizer:
    """Without a space before, with another order of rewriting, and a marker of ends."""
    tokenizer = bpe_tokenizer()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Sequence([normalizers.Replace("O", "<br />")]), normalizers.Replace("ab", "")]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.encode_special_tokens = True
    return tokenizer


PLAIN = [_special(tokenizer) for tokenizer in (bpe_tokenizer(), _lower(), _gpt2())]
# Every ASCII character, and what the expression and the normalizers look for.
ASCII = st.lists(
    st.one_of(
        st.characters(max_codepoint=127),
        st.sampled_from(
            ["'s", "'LL", "'re", "<br />", "<pad>", "  ", "\n\n", "\x1c", "Good", "42"]
        ),
    ),
    min_size=1,
    max_size=30,
).map("".join)


@pytest.mark.parametrize("tokenizer", PLAIN, ids=["plain", "lowercase", "gpt2"])
@settings(max_examples=examples(200), deadline=None)
@given(texts=st.lists(ASCII, min_size=1, max_size=4))
def test_words_that_are_remembered_give_the_tokens_of_the_library(
    tokenizer: Tokenizer, texts: list[str]
) -> None:
    words = WordCache.of(tokenizer)
    assert words is not None
    for text in (*texts, *texts):
        found = words.encode(text)
        if found is None:
            assert tokenizer.normalizer.normalize_str(text) == ""
        else:
            assert found == tokenizer.encode(text).ids


@settings(deadline=None)
@given(text=st.text(min_size=1, max_size=40))
def test_any_text_goes_through_tokens_and_back(text: str) -> None:
    tokens = CODEC.encode_input(text, truncate=True)
    if not tokens.truncated:
        assert CODEC.decode(tokens.tokens) == text
    stream = TextStream(CODEC)
    for token in tokens.tokens:
        piece = stream.push(token)
        assert not piece.endswith("\ufffd") or "\ufffd" in text
