"""One client of the soak: asks again and again, checks every answer, and sometimes leaves.

Knows what a right answer looks like; deliberately nothing of the server's memory or gauges.
"""

import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from benchmarks.client import Client, UnexpectedAnswer
from benchmarks.server import Server
from benchmarks.texts import PROMPT, text_of, window_of
from serve.bundle import Bundle, Manifest
from serve.inputs.text import TextCodec

LEFT = "left on purpose"
_LEAVE = 0.05
_MAX_TEXTS, _MAX_TOKENS = 4, 64


@dataclass(slots=True)
class Outcomes:
    """What came of the requests."""

    kinds: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, parts: "Iterable[Outcomes]") -> Self:
        whole = cls()
        for part in parts:
            whole.kinds += part.kinds
            whole.errors += part.errors
        return whole

    @property
    def answered(self) -> int:
        return sum(count for kind, count in self.kinds.items() if kind != LEFT)


@dataclass(frozen=True, slots=True)
class Callee:
    """A model, and the words of the longest text that it reads without cutting it."""

    manifest: Manifest
    words: tuple[str, ...]

    @classmethod
    def of(cls, bundle: Bundle) -> Self:
        if bundle.manifest.task == "generate":
            return cls(bundle.manifest, ())
        longest = text_of(TextCodec(bundle), window_of(bundle.manifest))
        return cls(bundle.manifest, tuple(longest.split(" ")))


class Caller:
    """Calls until a time has come. For one thread."""

    def __init__(self, server: Server, callees: Sequence[Callee], seed: int, end_s: float) -> None:
        self.outcomes = Outcomes()
        self._client = Client.of(server)
        self._callees = callees
        self._random = random.Random(seed)
        self._end_s = end_s

    def call_on(self) -> None:
        """Ask until the end; whatever goes wrong is kept, not raised."""
        while time.perf_counter() < self._end_s:
            self.ask()
        self.close()

    def ask(self) -> str | None:
        """One request; the name of what came of it, None if it went wrong."""
        try:
            kind = self._call()
        except Exception as error:
            self.outcomes.errors.append(f"{type(error).__name__}: {error}")
            self._client.close()
            return None
        self.outcomes.kinds[kind] += 1
        return kind

    def close(self) -> None:
        self._client.close()

    def _call(self) -> str:
        """One request; the name of what came of it."""
        callee = self._random.choice(self._callees)
        steps = self._random.choice(callee.manifest.steps)
        leave = self._random.random() < _LEAVE
        if callee.manifest.task == "classify":
            return self._classify(callee, steps, leave)
        return self._generate(callee.manifest, steps, leave)

    def _classify(self, callee: Callee, steps: int, leave: bool) -> str:
        manifest, count = callee.manifest, self._random.randint(1, _MAX_TEXTS)
        texts = [self._text(callee.words) for _ in range(count)]
        body = {"model": manifest.name, "input": texts, "steps": steps}
        if leave:
            return self._leave("/v1/classify", body)
        results = self._client.post("/v1/classify", body).body["results"]
        _expect(len(results) == count, f"{len(results)} results for {count} texts")
        for result in results:
            _expect_steps(result["budget"]["steps"], steps)
            _expect(result["label"] in (manifest.labels or ()), "an unknown label")
        return "classify"

    def _generate(self, manifest: Manifest, steps: int, leave: bool) -> str:
        tokens = self._random.randint(1, _MAX_TOKENS)
        body = {
            "model": manifest.name,
            "prompt": PROMPT * self._random.randint(1, 4),
            "max_tokens": tokens,
            "steps": steps,
            "stream": self._random.random() < 0.5,
        }
        if body["stream"]:
            return self._stream(body, steps, tokens, leave)
        if leave:
            return self._leave("/v1/generate", body)
        answer = self._client.post("/v1/generate", body).body
        _expect_done(answer, steps, tokens)
        return "generate"

    def _stream(self, body: dict[str, Any], steps: int, tokens: int, leave: bool) -> str:
        leave_at = self._random.randrange(tokens) if leave else None
        seen, done = 0, False
        for event in self._client.stream("/v1/generate", body):
            _expect(not done, "an event after the last")
            if event.name:
                _expect(event.name == "done", f"the event {event.name}: {event.data}")
                _expect_done(event.data, steps, tokens)
                done = True
                continue
            _expect(event.data["index"] == seen, f"token {event.data['index']}, not {seen}")
            _expect_steps(event.data["steps"], steps)
            if seen == leave_at:
                self._client.close()
                return LEFT
            seen += 1
        _expect(done and seen == tokens, f"{seen} of {tokens} tokens, done: {done}")
        return "generate, streamed"

    def _leave(self, path: str, body: dict[str, Any]) -> str:
        self._client.send_only(path, body)
        time.sleep(self._random.uniform(0.0, 0.1))
        self._client.close()
        return LEFT

    def _text(self, words: Sequence[str]) -> str:
        return " ".join(words[: self._random.randint(1, len(words))])


def _expect_done(answer: dict[str, Any], steps: int, tokens: int) -> None:
    _expect_steps(answer["budget"]["steps"], steps)
    written = answer["usage"]["completion_tokens"]
    _expect(written == tokens, f"{written} tokens instead of {tokens}")


def _expect_steps(found: int, asked: int) -> None:
    _expect(found == asked, f"{found} steps instead of {asked}")


def _expect(right: bool, otherwise: str) -> None:
    if not right:
        raise UnexpectedAnswer(otherwise)
