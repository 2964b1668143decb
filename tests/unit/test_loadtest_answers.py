"""Which answers the load test accepts, and how it times a stream."""

import json

import pytest

from loadtest.answers import AnswerError, TokenStream, check_classification, describe_refusal


def token(index: int, steps: int = 4) -> bytes:
    return f"data: {json.dumps({'index': index, 'text': 'a', 'steps': steps})}\n\n".encode()


def done(steps: int = 4) -> bytes:
    return f'event: done\ndata: {{"budget": {{"steps": {steps}}}}}\n\n'.encode()


def read(stream: bytes, steps: int = 4) -> TokenStream:
    """Feed a whole stream, one line a second."""
    reader = TokenStream(steps)
    for second, line in enumerate(stream.splitlines(keepends=True)):
        reader.feed(line, float(second))
    reader.finish()
    return reader


def test_tokens_are_counted_and_timed() -> None:
    reader = read(token(0) + b": keep-alive\n\n" + token(1) + done())
    assert reader.tokens == 2
    assert reader.first_token_s == 1.0
    assert reader.last_token_s == 5.0


def test_line_ends_and_several_data_lines_follow_the_standard() -> None:
    reader = read(b'data: {"index": 0,\r\ndata: "steps": 4}\r\n\r\n' + done())
    assert reader.tokens == 1


def test_a_stream_without_tokens_is_right_if_it_ends() -> None:
    assert read(done()).first_token_s is None


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (token(0), "broke off after 1 tokens"),
        (b"", "broke off after 0 tokens"),
        (token(0) + done().rstrip(b"\n"), "broke off"),
        (token(0) + done(8), "asked for 4 steps, the answer says 8"),
        (token(0, steps=1) + done(), "asked for 4 steps, a token had 1"),
        (token(1) + done(), "token 0 arrived as number 1"),
        (done() + token(0), "went on after its terminal event"),
        (done() + done(), "went on after its terminal event"),
        (b'event: done\ndata: {"usage": {}}\n\n', "the answer says None"),
        (b'event: error\ndata: {"error": {"code": "lapsed"}}\n\n', "lapsed"),
        (b"event: pause\ndata: {}\n\n", "unknown event 'pause'"),
        (b"data: not json\n\n", "not JSON"),
        (b"data: [1]\n\n", "not a JSON object"),
    ],
)
def test_a_wrong_stream_is_an_error(stream: bytes, says: str) -> None:
    with pytest.raises(AnswerError, match=says):
        read(stream)


def test_a_classification_must_say_the_steps_that_were_asked() -> None:
    result = {"label": "good", "budget": {"steps": 4}}
    check_classification(json.dumps({"results": [result]}).encode(), 4)
    shared = {"results": [{"label": "good"}], "budget": {"steps": 4}}
    check_classification(json.dumps(shared).encode(), 4)


@pytest.mark.parametrize(
    "answer",
    [
        {"results": [{"label": "good", "budget": {"steps": 2}}]},
        {"results": [{"label": "good", "budget": {}}]},
        {"results": [{"label": "good"}]},
        {"results": [{"budget": {"steps": 4}}]},
        {"results": []},
        {"results": [None]},
        {},
        [],
    ],
)
def test_a_wrong_classification_is_an_error(answer: object) -> None:
    with pytest.raises(AnswerError):
        check_classification(json.dumps(answer).encode(), 4)


def test_a_refusal_is_told_in_the_words_of_the_server() -> None:
    body = b'{"error": {"code": "queue_full", "message": "try later"}}'
    assert describe_refusal(429, body) == "HTTP 429 queue_full: try later"
    assert describe_refusal(502, b"<html>") == "HTTP 502"
