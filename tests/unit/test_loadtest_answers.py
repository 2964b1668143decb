"""Which answers the load test accepts, and how it times a stream."""

import json
import random
import statistics

import pytest

from loadtest.arrivals import ThinkTime, parse_think_time, rest_s
from loadtest.client import (
    AnswerError,
    Facts,
    TokenStream,
    describe_refusal,
    read_classification,
    read_completion,
    read_generation,
    read_wait,
)
from loadtest.mix import Operation
from loadtest.outcomes import Outcome
from loadtest.target import Ask

CLASSIFY = Operation("classify", "judge", Ask(4))


def token(index: int, steps: int = 4) -> bytes:
    return f"data: {json.dumps({'index': index, 'text': 'a', 'steps': steps})}\n\n".encode()


def done(steps: int = 4) -> bytes:
    return f'event: done\ndata: {{"budget": {{"steps": {steps}}}}}\n\n'.encode()


def chunk(**fields: object) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def read(stream: bytes, openai: bool = False) -> Facts:
    """Feed a whole stream, one line a second."""
    facts = Facts()
    reader = TokenStream(Ask(4), facts, openai)
    for second, line in enumerate(stream.splitlines(keepends=True)):
        reader.feed(line, float(second))
    reader.finish()
    return facts


def test_tokens_are_counted_and_timed() -> None:
    facts = read(token(0) + b": keep-alive\n\n" + token(1) + done())
    assert facts.tokens == 2
    assert facts.token_moments_s == [1.0, 5.0]
    assert facts.steps == 4


def test_line_ends_and_several_data_lines_follow_the_standard() -> None:
    facts = read(b'data: {"index": 0,\r\ndata: "steps": 4}\r\n\r\n' + done())
    assert facts.tokens == 1


def test_a_stream_without_tokens_is_right_if_it_ends() -> None:
    assert read(done()).token_moments_s == []


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (token(0), "broke off after 1 tokens"),
        (b"", "broke off after 0 tokens"),
        (token(0) + done().rstrip(b"\n"), "broke off"),
        (token(0) + done(8), "asked for steps=4, the answer says 8 steps"),
        (token(0, steps=1) + done(), "asked for 4 steps, a token had 1"),
        (token(1) + done(), "token 0 arrived as number 1"),
        (done() + token(0), "went on after its terminal event"),
        (done() + done(), "went on after its terminal event"),
        (b'event: done\ndata: {"usage": {}}\n\n', "the answer says None steps"),
        (b'event: error\ndata: {"error": {"code": "lapsed"}}\n\n', "lapsed"),
        (
            b'event: error\ndata: {"error": {"code": "lapsed", "message": "late", "n": 1}}\n\n',
            "with an error: lapsed: late$",
        ),
        (b"event: pause\ndata: {}\n\n", "unknown event 'pause'"),
        (b"data: not json\n\n", "not JSON"),
        (b"data: [1]\n\n", "not a JSON object"),
    ],
)
def test_a_wrong_stream_is_an_error(stream: bytes, says: str) -> None:
    with pytest.raises(AnswerError, match=says):
        read(stream)


def test_a_stream_of_openai_ends_with_its_own_mark_and_names_its_budget() -> None:
    text = chunk(choices=[{"text": "a", "finish_reason": None}])
    last = chunk(choices=[{"text": "", "finish_reason": "stop"}], stepdial={"budget": {"steps": 4}})
    facts = read(text + text + last + b"data: [DONE]\n\n", openai=True)
    assert (facts.tokens, facts.steps) == (2, 4)
    opening = chunk(choices=[{"delta": {"role": "assistant", "content": ""}}])
    said = chunk(choices=[{"delta": {"content": "a"}, "finish_reason": None}])
    nothing = chunk(choices=[{"delta": {"content": ""}, "finish_reason": None}])  # half a character
    over = chunk(
        choices=[{"delta": {}, "finish_reason": "stop"}], stepdial={"budget": {"steps": 4}}
    )
    chat = read(opening + said + nothing + over + b"data: [DONE]\n\n", openai=True)
    assert (chat.tokens, chat.steps) == (2, 4)
    with pytest.raises(AnswerError, match="broke off"):
        read(text + last, openai=True)
    with pytest.raises(AnswerError, match="says None steps"):
        read(text + b"data: [DONE]\n\n", openai=True)
    with pytest.raises(AnswerError, match="lapsed"):
        read(text + chunk(error={"code": "lapsed"}), openai=True)


def test_a_classification_must_say_the_steps_that_were_asked() -> None:
    facts = Facts()
    budget = {"steps": 4, "reason": "exact", "expected": {"metric": "accuracy", "value": 0.9}}
    result = {"label": "good", "budget": budget}
    read_classification(json.dumps({"results": [result]}).encode(), Ask(4), facts)
    assert (facts.label, facts.steps, facts.reason) == ("good", 4, "exact")
    assert (facts.metric, facts.expected) == ("accuracy", 0.9)
    shared = {"results": [{"label": "good"}], "budget": {"steps": 4}}
    read_classification(json.dumps(shared).encode(), Ask(4), Facts())


def test_whole_texts_say_what_they_took() -> None:
    usage, told = {"prompt_tokens": 3, "completion_tokens": 2}, {"budget": {"steps": 4}}
    for reader, answer in (
        (read_generation, {"usage": usage, "text": "ab", **told}),
        (read_completion, {"usage": usage, "choices": [{"text": "ab"}], "stepdial": told}),
        (
            read_completion,
            {"usage": usage, "choices": [{"message": {"content": "ab"}}], "stepdial": told},
        ),
    ):
        facts = Facts()
        reader(json.dumps(answer).encode(), Ask(4), facts)
        assert (facts.prompt_tokens, facts.tokens, facts.steps) == (3, 2, 4)
        with pytest.raises(AnswerError):
            reader(json.dumps(told).encode(), Ask(4), Facts())


@pytest.mark.parametrize(
    ("ask", "steps", "right"),
    [
        (Ask(), 3, True),
        (Ask(), None, False),
        (Ask(effort="low"), 1, True),
        (Ask(max_steps=4), 8, False),
        (Ask(min_steps=4), 2, False),
        (Ask(min_steps=4, max_disagreement=0.1), 2, True),
        (Ask(deadline_ms=9.0, min_steps=2, max_steps=4), 4, True),
    ],
)
def test_other_budgets_bound_what_an_answer_may_say(
    ask: Ask, steps: int | None, right: bool
) -> None:
    assert (ask.objection(steps) is None) == right


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
        read_classification(json.dumps(answer).encode(), Ask(4), Facts())


def test_a_refusal_is_told_in_the_words_of_the_server() -> None:
    body = b'{"error": {"code": "queue_full", "message": "try later"}}'
    assert describe_refusal(429, body) == "HTTP 429 queue_full: try later"
    assert describe_refusal(502, b"<html>") == "HTTP 502"


@pytest.mark.parametrize(
    ("in_ms", "in_s", "wait_s"),
    [
        ("250", "1", 0.25),
        (None, "3", 3.0),
        (None, "Wed, 21 Oct 2015 07:28:00 GMT", None),
        ("-5", None, None),
        ("inf", "nan", None),
        (None, ["1", "2"], None),
        (None, None, None),
    ],
)
def test_when_to_come_back_is_read_from_either_header(
    in_ms: object, in_s: object, wait_s: float | None
) -> None:
    assert read_wait(in_ms, in_s) == wait_s


@pytest.mark.parametrize(
    ("outcome", "seconds"),
    [
        (Outcome(CLASSIFY, 0.0, 5.0, status=200), 0.0),
        (Outcome(CLASSIFY, 0.0, 5.0, "full", status=429, retry_after_s=3.0), 3.0),
        (Outcome(CLASSIFY, 0.0, 5.0, "full", status=429, retry_after_s=99.0), 4.0),
        (Outcome(CLASSIFY, 0.0, 5.0, "full", status=429), 0.0),
        (Outcome(CLASSIFY, 0.0, 5.0, "broken", status=500), 0.0),
        (Outcome(CLASSIFY, 0.0, 200.0, "nobody there"), 0.8),
        (Outcome(CLASSIFY, 0.0, 3000.0, "nobody in time"), 0.0),
    ],
)
def test_callers_rest_as_they_were_told_and_knock_once_a_second(
    outcome: Outcome, seconds: float
) -> None:
    assert rest_s(outcome, 4.0) == pytest.approx(seconds)
    assert rest_s(outcome, 0.0) == 0.0


def test_callers_think_for_as_long_as_was_asked() -> None:
    chance = random.Random(3)
    assert parse_think_time("2") == ThinkTime(2.0, 2.0)
    assert parse_think_time("2").draw_s(chance) == 2.0
    drawn = [parse_think_time("1..5").draw_s(chance) for _ in range(500)]
    assert 1.0 <= min(drawn) < 1.2 and 4.8 < max(drawn) <= 5.0
    around = [parse_think_time("exp:2").draw_s(chance) for _ in range(2000)]
    assert statistics.fmean(around) == pytest.approx(2.0, rel=0.1)
    assert statistics.stdev(around) == pytest.approx(2.0, rel=0.15)
    for text in ("", "x", "-1", "5..1", "nan", "inf", "exp:0", "exp:1..2"):
        with pytest.raises(ValueError, match="no think time; write seconds: 2"):
            parse_think_time(text)


@pytest.mark.parametrize(
    "told",
    [
        {"usage": {"completion_tokens": "x"}},
        {"usage": [3]},
        {"budget": {"steps": 4, "expected": {"value": float("nan")}}},
        {"budget": {"steps": 4, "reason": ["load"]}},
    ],
)
def test_nonsense_is_an_error_of_one_request_and_never_reaches_the_sums(
    told: dict[str, object],
) -> None:
    answer = {"text": "ab", "budget": {"steps": 4}, **told}
    with pytest.raises(AnswerError, match=" is "):
        read_generation(json.dumps(answer).encode(), Ask(4), Facts())
