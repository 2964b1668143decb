"""What a right answer looks like: the checks that each response must pass, and what it tells.

It deliberately knows nothing of sockets and of streams, which loadtest/stream.py reads.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from loadtest.ask import Ask

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


# One answer of nonsense is one failed request: it must not reach the sums that are made of all.
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
