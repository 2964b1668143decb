"""What a right answer looks like: the checks that each response must pass.

A stream is read line by line, with the moment each line arrived, so that tokens are timed here.
It deliberately knows nothing of sockets; moments are seconds of any monotonic clock.
"""

import json
from typing import Any


class AnswerError(Exception):
    """The server answered, and the answer is wrong."""


def check_classification(body: bytes, steps: int) -> None:
    """One input was sent: expect one result, made with the steps that were asked for."""
    answer = _parse(body)
    results = answer.get("results")
    if not isinstance(results, list) or len(results) != 1 or not isinstance(results[0], dict):
        raise AnswerError("the answer does not hold exactly one result")
    if not results[0].get("label"):
        raise AnswerError("the result has no label")
    _check_steps(results[0].get("budget") or answer.get("budget"), steps)


def describe_refusal(status: int, body: bytes) -> str:
    """The server's own code and message, from its structured error where there is one."""
    try:
        error = _parse(body)["error"]
        return f"HTTP {status} {error['code']}: {error['message']}"
    except (AnswerError, KeyError, TypeError):
        return f"HTTP {status}"


class TokenStream:
    """Server-sent events of one generated text: tokens, then exactly one terminal event."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._event = "message"
        self._data: list[str] = []
        self._ended = False
        self.tokens = 0
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

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
            raise AnswerError(f"the stream broke off after {self.tokens} tokens")

    def _dispatch(self, at_s: float) -> None:
        event, data = self._event, "\n".join(self._data)
        self._event, self._data = "message", []
        if not data:  # a comment or a keep-alive
            return
        if self._ended:
            raise AnswerError("the stream went on after its terminal event")
        payload = _parse(data)
        if event == "message":
            self._take_token(payload, at_s)
        elif event == "done":
            self._ended = True
            _check_steps(payload.get("budget"), self._steps)
        elif event == "error":
            self._ended = True
            error = payload.get("error", payload)
            raise AnswerError(f"the stream ended with an error: {json.dumps(error)}")
        else:
            raise AnswerError(f"the stream holds an unknown event {event!r}")

    def _take_token(self, payload: dict[str, Any], at_s: float) -> None:
        if payload.get("index") != self.tokens:
            raise AnswerError(f"token {self.tokens} arrived as number {payload.get('index')}")
        if payload.get("steps") != self._steps:
            raise AnswerError(f"asked for {self._steps} steps, a token had {payload.get('steps')}")
        if self.first_token_s is None:
            self.first_token_s = at_s
        self.last_token_s = at_s
        self.tokens += 1


def _check_steps(budget: Any, steps: int) -> None:
    said = budget.get("steps") if isinstance(budget, dict) else None
    if said != steps:
        raise AnswerError(f"asked for {steps} steps, the answer says {said}")


def _parse(body: bytes | str) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:
        raise AnswerError("the answer is not JSON") from None
    if not isinstance(answer, dict):
        raise AnswerError("the answer is not a JSON object")
    return answer
