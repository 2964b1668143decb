"""A model of known answers behind the runtime's Protocols, which can be told to misbehave.

Classification: the more tokens a row has, the likelier its second label. Generation: after a token
comes the next one of the vocabulary, so "abc" goes on with "def". A translation goes on so from the
last token of its source, and never ends by itself. Nothing here computes.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from serve.bundle import Bundle, BundleError
from serve.catalog import Catalog, Served
from serve.runtime import Speculation
from serve.runtime.protocol import (
    DecodeBatch,
    FloatArray,
    IntArray,
    Prefill,
    RowArray,
    StepClassifier,
)
from tests.server_process import START_S

ROW_BYTES_A_POSITION = 1000


@dataclass
class Mood:
    """How the fake behaves; tests change it while it runs."""

    fail: Callable[[str, IntArray], None] = lambda kind, tokens: None  # may raise
    logits: Callable[[FloatArray], FloatArray] = lambda logits: logits
    gate: threading.Event = field(default_factory=threading.Event)  # calls wait for it
    calls: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)
    open_rows: int = 0
    pieces: int = 1  # that a prompt is read in
    most_batches: int = 1  # that share a call; 1: nothing mixes
    opening: bool = False
    obeys: bool = False  # whether a call that waits for the gate throws when it is interrupted
    interrupted: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def call(self, kind: str, steps: int, tokens: IntArray) -> None:
        self.gate.wait(START_S)
        if self.obeys and self.interrupted.is_set():
            raise RuntimeError("terminated")
        self.calls.append((kind, steps, tokens.shape))
        self.fail(kind, tokens)


class FakeClassifier:
    def __init__(self, bundle: Bundle, steps: int, mood: Mood) -> None:
        self._pad_id = bundle.manifest.text_tokenizer.pad_id
        self._steps = steps
        self._mood = mood

    def run(self, rows: RowArray) -> FloatArray:
        tokens = rows.astype(np.int64)
        self._mood.call("classify", self._steps, tokens)
        logits = np.zeros((len(tokens), 2), np.float32)
        logits[:, 1] = 0.1 * (tokens != self._pad_id).sum(axis=1)
        return self._mood.logits(logits)

    def embed(self, rows: RowArray) -> FloatArray:
        raise BundleError("the fake model has no embeddings")


class FakePrefill:
    def __init__(self, tokens: IntArray, pieces: int, run: Callable[[], FloatArray]) -> None:
        self.positions = len(tokens)
        self.last = tokens[-1:]  # (1,)
        self._pieces, self._run = pieces, run

    @property
    def nbytes(self) -> int:
        return self.positions * ROW_BYTES_A_POSITION

    def advance(self) -> FloatArray | None:
        self._pieces -= 1
        return None if self._pieces else self._run()


class FakeBatch:
    """Each row goes on from its own last token, whatever token it is given.

    But it notices when rows are given the tokens of each other.
    """

    def __init__(self, bundle: Bundle, steps: int, mood: Mood) -> None:
        self._vocab_size = bundle.manifest.text_tokenizer.vocab_size
        self._window = bundle.manifest.text_input.max_tokens
        self._steps = steps
        self._mood = mood
        self._lengths: list[int] = []
        self._last: IntArray = np.zeros(0, np.int64)  # (B,)
        self._stands: int | None = None

    @property
    def lengths(self) -> list[int]:
        return list(self._lengths)

    @property
    def nbytes(self) -> int:
        longest = max(self._lengths, default=0)
        return len(self._lengths) * longest * ROW_BYTES_A_POSITION

    def read(self, tokens: IntArray, positions: int = 0) -> FakePrefill:
        assert positions <= self._window

        def run() -> FloatArray:
            self._mood.call("prefill", self._steps, tokens)
            following: FloatArray = self._next(tokens[-1:])[0]
            return following

        assert 0 < len(tokens) <= self._window
        return FakePrefill(tokens, self._mood.pieces, run)

    def join(self, prefill: Prefill) -> None:
        assert self._stands is None, "a row joins between two tokens"
        assert isinstance(prefill, FakePrefill)
        self._lengths.append(prefill.positions)
        self._last = np.append(self._last, prefill.last)
        self._mood.open_rows += 1

    def add(self, tokens: IntArray) -> FloatArray:
        prefill = self.read(tokens)
        while (logits := prefill.advance()) is None:
            pass
        self.join(prefill)
        return logits

    @property
    def expected(self) -> IntArray:
        """The tokens (B,) that the rows are given if each gets the likeliest."""
        return self._after(self._last)

    def begin(self, tokens: IntArray) -> None:
        assert self._stands is None
        self._check(tokens)
        self._begun, self._stands = tokens, 0

    def advance(self) -> None:
        assert self._stands is not None and self._stands < self._steps
        self._stands += 1

    @property
    def at_end(self) -> bool:
        return self._stands == self._steps

    def end(self) -> FloatArray:
        assert self.at_end
        self._stands = None
        return self._grow(self._begun)

    def step(self, tokens: IntArray) -> FloatArray:
        assert self._stands is None
        self._check(tokens)
        check_order(tokens, self.expected)
        return self._grow(tokens)

    def _check(self, tokens: IntArray) -> None:
        assert tokens.shape == (len(self._lengths),)
        assert max(self._lengths) < self._window, "a row has no room"

    def _grow(self, tokens: IntArray) -> FloatArray:
        self._mood.call("decode", self._steps, tokens)
        self._lengths = [length + 1 for length in self._lengths]
        self._last = self._after(self._last)
        return self._next(self._last)

    def remove(self, row: int) -> None:
        assert self._stands is None, "a row leaves between two tokens"
        self._lengths[row] = self._lengths[-1]
        self._lengths.pop()
        self._last[row] = self._last[-1]
        self._last = self._last[:-1]
        self._mood.open_rows -= 1

    def _next(self, tokens: IntArray) -> FloatArray:
        logits = np.zeros((len(tokens), self._vocab_size), np.float32)
        logits[np.arange(len(tokens)), self._after(tokens)] = 20.0
        return self._mood.logits(logits)

    def _after(self, tokens: IntArray) -> IntArray:
        following = tokens + 1
        following[following == self._vocab_size] = 1
        return following


def check_order(tokens: IntArray, expected: IntArray) -> None:
    """The rows got these tokens (B,); others than expected may be so, but not in another order."""
    if sorted(tokens.tolist()) == sorted(expected.tolist()):
        assert (tokens == expected).all(), "rows got the tokens of each other"


class FakeMix:
    def __init__(self, mood: Mood) -> None:
        self.most_batches = mood.most_batches
        self.can_speculate = False
        self._mood = mood

    def begin(self, batches: Sequence[DecodeBatch], tokens: Sequence[IntArray]) -> None:
        own = [batch for batch in batches if isinstance(batch, FakeBatch)]
        assert own and len(own) == len(batches)
        check_order(np.concatenate(tokens), np.concatenate([batch.expected for batch in own]))
        for batch, some in zip(own, tokens, strict=True):
            batch.begin(some)

    def end(self, batches: Sequence[DecodeBatch]) -> list[FloatArray]:
        assert batches and all(isinstance(batch, FakeBatch) for batch in batches)
        return [batch.end() for batch in batches if isinstance(batch, FakeBatch)]

    def advance(self, batches: Sequence[DecodeBatch]) -> None:
        assert 0 < len(batches) <= self.most_batches
        for batch in batches:
            assert isinstance(batch, FakeBatch)
            batch.advance()

    def speculation(self, batch: DecodeBatch, lead: int) -> Speculation:
        raise NotImplementedError("no row of a fake runs ahead")


class FakeDecoder:
    def __init__(self, bundle: Bundle, steps: int, mood: Mood) -> None:
        self._bundle, self._steps, self._mood = bundle, steps, mood

    def open_batch(self) -> FakeBatch:
        return FakeBatch(self._bundle, self._steps, self._mood)

    def bytes_for(self, positions: int, rows: int = 1) -> int:
        return rows * positions * ROW_BYTES_A_POSITION

    def forward(self, tokens: IntArray) -> FloatArray:
        raise NotImplementedError("only verification asks for this")


class FakeTranslation:
    def __init__(self, bundle: Bundle, steps: int, mood: Mood, source: IntArray) -> None:
        tokenizer = bundle.manifest.text_tokenizer
        self._vocab_size, self._eos_id = tokenizer.vocab_size, tokenizer.eos_id
        self._steps, self._mood, self._source = steps, mood, source

    @property
    def nbytes(self) -> int:
        return len(self._source) * ROW_BYTES_A_POSITION

    def follow(self, prefixes: IntArray) -> FloatArray:
        self._mood.call("search", self._steps, prefixes)
        last = prefixes[:, -1] if prefixes.shape[1] > 1 else self._source[-1:]  # (B,)
        logits = np.zeros((len(prefixes), self._vocab_size), np.float32)
        logits[np.arange(len(last)), np.maximum((last + 1) % self._vocab_size, 3)] = 20.0
        logits[:, self._eos_id] = -1e9
        return self._mood.logits(logits)


class FakeTranslator(FakeDecoder):
    def read(self, source: IntArray) -> FakeTranslation:
        return FakeTranslation(self._bundle, self._steps, self._mood, source)

    def forward(self, source: IntArray, tokens: IntArray) -> FloatArray:  # type: ignore[override]  # a translator takes its source too
        raise NotImplementedError("only verification asks for this")


class FakeModel:
    def __init__(self, bundle: Bundle, mood: Mood) -> None:
        self._bundle = bundle
        self.mood = mood
        self.closed = False

    @property
    def bundle(self) -> Bundle:
        return self._bundle

    @property
    def most_parts(self) -> int:
        return 1

    @property
    def single_steps(self) -> bool:
        return False

    def classifier(self, steps: int) -> FakeClassifier:
        return FakeClassifier(self._bundle, steps, self.mood)

    def step_classifier(self, steps: int) -> StepClassifier:
        raise NotImplementedError("no test of the engine answers early on a fake")

    def decoder(self, steps: int) -> FakeDecoder:
        return FakeDecoder(self._bundle, steps, self.mood)

    def translator(self, steps: int) -> FakeTranslator:
        return FakeTranslator(self._bundle, steps, self.mood)

    def mix(self) -> FakeMix | None:
        return FakeMix(self.mood) if self.mood.most_batches > 1 else None

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    @property
    def opening(self) -> bool:
        return self.mood.opening

    def interrupt(self) -> None:
        self.mood.interrupted.set()
        if self.mood.obeys:
            self.mood.gate.set()

    def resume(self) -> None:
        self.mood.interrupted.clear()


def fake_catalog(mood: Mood, *bundles: Bundle) -> Catalog:
    """These bundles, served by fakes."""
    return Catalog(Served.open(bundle, FakeModel(bundle, mood)) for bundle in bundles)
