"""One request: sent over a kept-alive connection, read as it comes, checked and timed."""

import itertools
import json
import re
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import gevent
from gevent.lock import BoundedSemaphore
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPSocketPoolResponse

from loadtest.outcomes import Outcome
from loadtest.plan import Plan
from loadtest.schedule import Shot
from loadtest.target import ENDPOINTS, Ask, headers

_WAIT = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_MOST = 1e12  # beyond what any count or quality is


class AnswerError(Exception):
    """The server answered, and the answer is wrong."""


@dataclass(slots=True)
class Facts:
    """What one answer told; None and empty where it did not. Moments are of a monotonic clock."""

    status: int | None = None  # of HTTP
    retry_after_s: float | None = None  # when a refused caller may come back
    steps: float | None = None
    reason: str | None = None
    expected: float | None = None  # the quality of such answers, as the server states it
    metric: str | None = None  # what that is measured in
    label: str | None = None
    prompt_tokens: int | None = None
    token_moments_s: list[float] = field(default_factory=list)  # of a stream
    tokens: int = 0


def read_classification(body: bytes, ask: Ask, facts: Facts) -> None:
    """One input was sent: expect one result, made within the budget that was asked for."""
    answer = parse(body)
    results = answer.get("results")
    if not isinstance(results, list) or len(results) != 1 or not isinstance(results[0], dict):
        raise AnswerError("the answer does not hold exactly one result")
    if not results[0].get("label"):
        raise AnswerError("the result has no label")
    facts.label = str(results[0]["label"])
    read_budget(results[0].get("budget") or answer.get("budget"), ask, facts)


def read_generation(body: bytes, ask: Ask, facts: Facts) -> None:
    """A text in one piece, by our own route."""
    answer = parse(body)
    if not isinstance(answer.get("text"), str):
        raise AnswerError("the answer has no text")
    read_usage(answer, facts)
    read_budget(answer.get("budget"), ask, facts)


def read_completion(body: bytes, ask: Ask, facts: Facts) -> None:
    """A text in one piece, in the shape of OpenAI."""
    answer = parse(body)
    choices = answer.get("choices")
    one = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    said = one if isinstance(one, dict) else {}
    if not isinstance(said.get("text", _record(said, "message").get("content")), str):
        raise AnswerError("the answer does not hold exactly one choice with a text")
    read_usage(answer, facts)
    read_budget(openai_budget(answer), ask, facts)


def openai_budget(answer: dict[str, Any]) -> Any:
    """The work that was done, which answers in the shape of OpenAI keep apart; None if missing."""
    own = answer.get("stepdial")
    return own.get("budget") if isinstance(own, dict) else None


def read_usage(answer: dict[str, Any], facts: Facts) -> None:
    """Tokens read and written, where the answer says them."""
    usage = _record(answer, "usage")
    read, written = _number(usage, "prompt_tokens"), _number(usage, "completion_tokens")
    facts.prompt_tokens = facts.prompt_tokens if read is None else int(read)
    facts.tokens = facts.tokens if written is None else int(written)


def read_budget(budget: Any, ask: Ask, facts: Facts) -> None:
    """The work that was done, which must be within what was asked for."""
    said = budget if isinstance(budget, dict) else {}
    if objection := ask.objection(said.get("steps")):
        raise AnswerError(objection)
    expected = _record(said, "expected")
    facts.steps, facts.reason = _number(said, "steps"), _word(said, "reason")
    facts.expected, facts.metric = _number(expected, "value"), _word(expected, "metric")


def describe_refusal(status: int, body: bytes) -> str:
    """The server's own code and message, from its structured error where there is one."""
    try:
        error = parse(body)["error"]
        return f"HTTP {status} {error['code']}: {error['message']}"
    except (AnswerError, KeyError, TypeError):
        return f"HTTP {status}"


def read_wait(in_ms: object, in_s: object) -> float | None:
    """Of the headers retry-after-ms and Retry-After: when to come back; None if neither says."""
    for said, unit_s in ((in_ms, 1e-3), (in_s, 1.0)):
        if isinstance(said, str) and _WAIT.fullmatch(said):
            return float(said) * unit_s
    return None


# A malformed answer is a failed request and must not reach the sums over all answers.
def _record(answer: dict[str, Any], name: str) -> dict[str, Any]:
    found = answer.get(name)
    if found is not None and not isinstance(found, dict):
        raise AnswerError(f"{name} is {found!r}, no object")
    return found or {}


def _number(answer: dict[str, Any], name: str) -> float | None:
    found = answer.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) < _MOST:
        raise AnswerError(f"{name} is {found!r}, no number that makes sense")
    return found


def _word(answer: dict[str, Any], name: str) -> str | None:
    found = answer.get(name)
    if found is not None and not isinstance(found, str):
        raise AnswerError(f"{name} is {found!r}, no word")
    return found


def parse(body: bytes | str) -> dict[str, Any]:
    """A JSON object."""
    try:
        answer = json.loads(body)
    except ValueError:
        raise AnswerError("the answer is not JSON") from None
    if not isinstance(answer, dict):
        raise AnswerError("the answer is not a JSON object")
    return answer


# A stream of server-sent events, read line by line, with the time of each token. Two dialects: that
# of /v1/generate, which ends with an event `done`, and OpenAI's, which ends with the data `[DONE]`.


_LAST_DATA = "[DONE]"  # of the dialect of OpenAI


class TokenStream:
    """Events of one generated text: tokens, then exactly one terminal event."""

    def __init__(self, ask: Ask, facts: Facts, openai: bool = False) -> None:
        self._ask = ask
        self._facts = facts
        self._openai = openai
        self._event = "message"
        self._data: list[str] = []
        self._ended = False
        self._told = False  # what was done for it

    def feed(self, line: bytes, at_s: float) -> None:
        """Take one line of the stream, with or without its line end."""
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if not text:
            self._dispatch(at_s)
            return
        field, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._event = value
        elif field == "data":
            self._data.append(value)

    def finish(self) -> None:
        """The connection has ended: it must have said so first."""
        if not self._ended:
            raise AnswerError(f"the stream broke off after {self._facts.tokens} tokens")

    def _dispatch(self, at_s: float) -> None:
        event, data = self._event, "\n".join(self._data)
        self._event, self._data = "message", []
        if not data:  # a comment or a keep-alive
            return
        if self._ended:
            raise AnswerError("the stream went on after its terminal event")
        if self._openai:
            self._take_chunk(data, at_s)
        elif event == "message":
            self._take_token(parse(data), at_s)
        elif event == "done":
            self._ended = True
            payload = parse(data)
            read_budget(payload.get("budget"), self._ask, self._facts)
            tokens = self._facts.tokens
            read_usage(payload, self._facts)
            self._facts.tokens = tokens  # those that arrived
        elif event == "error":
            self._fail(parse(data))
        else:
            raise AnswerError(f"the stream holds an unknown event {event!r}")

    def _take_token(self, payload: dict[str, Any], at_s: float) -> None:
        facts, asked = self._facts, self._ask.steps
        if payload.get("index") != facts.tokens:
            raise AnswerError(f"token {facts.tokens} arrived as number {payload.get('index')}")
        if asked is not None and payload.get("steps") != asked:
            raise AnswerError(f"asked for {asked} steps, a token had {payload.get('steps')}")
        facts.token_moments_s.append(at_s)
        facts.tokens += 1

    def _take_chunk(self, data: str, at_s: float) -> None:
        if data == _LAST_DATA:
            self._ended = True
            if not self._told:
                read_budget(None, self._ask, self._facts)
            return
        payload = parse(data)
        if payload.get("error"):
            self._fail(payload)
        if budget := openai_budget(payload):
            self._told = True
            read_budget(budget, self._ask, self._facts)
        choices = payload.get("choices") or ()
        if not all(isinstance(choice, dict) for choice in choices):
            raise AnswerError("the stream holds choices that are no objects")
        for choice in choices:
            delta = choice.get("delta")
            said = delta if isinstance(delta, dict) else choice
            # The chunk that says who speaks, or why it ended, may carry no token.
            silent = "role" in said or choice.get("finish_reason") is not None
            if said.get("text") or said.get("content") or not silent:
                self._facts.token_moments_s.append(at_s)
                self._facts.tokens += 1
        if payload.get("usage"):
            read_usage(payload, self._facts)

    def _fail(self, payload: dict[str, Any]) -> None:
        self._ended = True
        error = payload.get("error", payload)
        told = isinstance(error, dict) and "code" in error and "message" in error
        said = f"{error['code']}: {error['message']}" if told else json.dumps(error)
        raise AnswerError(f"the stream ended with an error: {said}")


# One request over a kept-alive connection: sent, read, checked and timed.


CUT_SHORT = "no answer before the end of the test"  # the error of a sender that is ended meanwhile

_LONGEST_ERROR = 300  # characters


class Connections:
    """Connections to the server: opened when none is free, kept, and used again."""

    def __init__(self, plan: Plan, connections: int, in_flight: int | None = None) -> None:
        """So many may be under way at a time; others are held until one has ended."""
        terms = plan.terms
        self._plan = plan
        self._places = nullcontext() if in_flight is None else BoundedSemaphore(in_flight)
        self._headers = headers(plan.key)
        self._prefix = urlsplit(terms.url).path.rstrip("/")
        self._client = HTTPClient.from_url(
            terms.url,
            concurrency=connections,
            connection_timeout=terms.timeout_s,
            network_timeout=terms.timeout_s,
        )

    def close(self) -> None:
        """Leave no connection behind."""
        self._client.close()

    def send(self, shot: Shot, body: bytes, due_s: float, started_s: float) -> Outcome:
        """Send it now; `due_s` is when that should have been, of time.monotonic()."""
        facts = Facts()
        error: str | None = None
        ready_s, began_s = time.monotonic(), None
        try:
            with self._places:
                began_s = time.monotonic()
                self._exchange(shot, body, facts)
        except AnswerError as wrong:
            error = str(wrong)
        except gevent.GreenletExit:
            error = CUT_SHORT
        except Exception as broken:  # whatever a connection can do is one failed request
            error = f"{type(broken).__name__}: {broken}"
        ended_s = time.monotonic()
        moments = facts.token_moments_s
        pairs = itertools.pairwise(moments)
        return Outcome(
            operation=shot.operation,
            started_s=started_s,
            total_ms=(ended_s - due_s) * 1e3,
            error=_plain(error),
            status=facts.status,
            retry_after_s=facts.retry_after_s,
            first_token_ms=(moments[0] - due_s) * 1e3 if moments else None,
            gaps_ms=tuple((after - before) * 1e3 for before, after in pairs),
            tokens=facts.tokens,
            prompt_tokens=facts.prompt_tokens,
            lag_ms=(ready_s - due_s) * 1e3,
            held_ms=((began_s or ended_s) - ready_s) * 1e3,
            stage=shot.stage,
            steps=facts.steps,
            reason=facts.reason,
            expected=facts.expected,
            metric=facts.metric,
            correct=self._plan.is_correct(shot, facts.label) if error is None else None,
        )

    def _exchange(self, shot: Shot, body: bytes, facts: Facts) -> None:
        endpoint, ask = ENDPOINTS[shot.operation.endpoint], shot.operation.ask
        response = self._client.post(self._prefix + endpoint.path, body=body, headers=self._headers)
        facts.status = response.status_code
        try:
            if response.status_code != 200:
                told = response.get("retry-after-ms"), response.get("retry-after")
                facts.retry_after_s = read_wait(*told)
                raise AnswerError(describe_refusal(response.status_code, response.read()))
            if endpoint.streams:
                _read_stream(response, TokenStream(ask, facts, endpoint.openai))
            elif endpoint.task == "classify":
                read_classification(response.read(), ask, facts)
            elif endpoint.openai:
                read_completion(response.read(), ask, facts)
            else:
                read_generation(response.read(), ask, facts)
        finally:
            response.release()


def _plain(error: str | None) -> str | None:
    """One line of bounded length, whatever a server said: it is shown, and kept of each request."""
    if error is None:
        return None
    text = "".join(each if each.isprintable() else " " for each in error)
    return text if len(text) <= _LONGEST_ERROR else text[: _LONGEST_ERROR - 1] + "…"


def _read_stream(response: HTTPSocketPoolResponse, stream: TokenStream) -> None:
    while line := response.readline(b"\n"):
        stream.feed(line, time.monotonic())
    stream.finish()
