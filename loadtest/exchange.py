"""One request over a kept-alive connection: sent, read, checked and timed.

It deliberately knows nothing of when requests are sent and of what becomes of their outcomes.
"""

import itertools
import time
from contextlib import nullcontext
from urllib.parse import urlsplit

import gevent
from gevent.lock import BoundedSemaphore
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPSocketPoolResponse

from loadtest.answers import (
    AnswerError,
    Facts,
    describe_refusal,
    read_classification,
    read_completion,
    read_generation,
    read_wait,
)
from loadtest.outcomes import Outcome
from loadtest.plan import Plan
from loadtest.schedule import Shot
from loadtest.stream import TokenStream
from loadtest.target import ENDPOINTS, headers

CUT_SHORT = "no answer before the end of the test"  # the error of a sender that is ended meanwhile

_LONGEST_ERROR = 300  # characters


class Line:
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
