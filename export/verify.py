"""Verification of a rung in the runtime that serves it, against the model in float64.

The tolerance is a multiple of the error of torch's own float32 at that rung, so a long rung of an
ill-conditioned velocity does not fail for an error that every float32 runtime has. It is wider for
weights, activations and caches of 16 and 8 bits, in proportion to their coarser rounding.
"""

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from serve.bundle import Manifest, Rung, Verified, steps_in_words
from serve.runtime import OpenedModel
from serve.runtime.classifier import Present, present_positions
from serve.runtime.protocol import (
    Classifier,
    DecodeBatch,
    Decoder,
    FloatArray,
    IntArray,
    RowArray,
    Translator,
)
from train.data.arrays import unit_sphere
from train.data.batch import Dataset
from train.model import PAD_ID, OTTransformer, Stepped, pools

# Real held-out inputs in any shape: what graphs are traced and verified with.


ENOUGH_TOKENS, ENOUGH_ROWS = 20_000, 64
Inputs = tuple[Tensor, ...]


class Samples(ABC):
    """Draws inputs of a data set."""

    most: int  # tokens or points of a row

    @abstractmethod
    def draw(self, rows: int, length: int) -> Inputs:
        """So many rows of so many tokens or points; images have the one size they have."""

    def edges(self) -> list[Inputs]:
        """The shapes at the edges: least, whole, one row and several."""
        shapes = sorted({(1, 1), (3, min(17, self.most)), (1, self.most)})
        return [self.draw(rows, length) for rows, length in shapes]


def samples_of(dataset: Dataset, most: int, target_most: int) -> Samples:
    """A source of rows: at most `most` tokens or points each, and answers of `target_most`."""
    if dataset.sizes.channels:
        return ImageSamples(dataset)
    if dataset.sizes.dimensions:
        return PointSamples(dataset, most)
    if dataset.labels is None and len(next(iter(dataset.held_out(1))).inputs) == 2:
        return PairSamples(dataset, most, target_most)
    return TokenSamples(dataset, most)


class TokenSamples(Samples):
    """Rows joined end to end; those of a classifier get padding on their right."""

    def __init__(self, dataset: Dataset, most: int) -> None:
        self.most, self.ragged = most, dataset.labels is not None
        self._pad_id = dataset.sizes.pad_id
        self._stream = _stream(dataset, 0)

    def draw(self, rows: int, length: int) -> Inputs:
        tokens = _rows(self._stream, rows, length)
        return (_ragged(tokens, self._pad_id) if self.ragged else tokens,)


class PairSamples(Samples):
    """Sources with padding on their right, and answers that begin as the data's do."""

    def __init__(self, dataset: Dataset, most: int, target_most: int) -> None:
        self.most, self.target_most = most, target_most
        self._sources, self._targets = _stream(dataset, 0), _stream(dataset, 1)
        self._begin = next(iter(dataset.held_out(1))).inputs[1][0, 0]  # ()

    def draw(self, rows: int, length: int) -> Inputs:
        return self._pair(rows, length, min(length + 1, self.target_most))

    def edges(self) -> list[Inputs]:
        return [*super().edges(), self._pair(2, min(5, self.most), self.target_most)]

    def _pair(self, rows: int, length: int, target_length: int) -> Inputs:
        source = _ragged(_rows(self._sources, rows, length))  # (B, S)
        target = _rows(self._targets, rows, target_length).clone()  # (B, N)
        target[:, 0] = self._begin
        return source, target


class ImageSamples(Samples):
    """Images as they are."""

    def __init__(self, dataset: Dataset) -> None:
        self._pixels = _some(dataset)  # (P, C, H, W)
        self.most = 1

    def draw(self, rows: int, length: int) -> Inputs:
        return (self._pixels[torch.arange(rows) % len(self._pixels)],)


class PointSamples(Samples):
    """Clouds of any number of points, centred and scaled again."""

    def __init__(self, dataset: Dataset, most: int) -> None:
        self.most = most
        self._clouds = _some(dataset).numpy()  # (P, N, d)

    def draw(self, rows: int, length: int) -> Inputs:
        clouds = self._clouds[np.arange(rows) % len(self._clouds)]
        some = clouds[:, np.arange(length) % clouds.shape[1]]  # (B, length, d)
        return (torch.from_numpy(unit_sphere(some)),)


def _stream(dataset: Dataset, which: int) -> Tensor:
    """The tokens of one of the inputs, one row after another."""
    pieces: list[Tensor] = []
    for batch in dataset.held_out(8):
        tokens = batch.inputs[which]
        pieces.append(tokens[tokens != dataset.sizes.pad_id])
        if sum(map(len, pieces)) > ENOUGH_TOKENS:
            break
    return torch.cat(pieces)


def _some(dataset: Dataset) -> Tensor:
    return next(iter(dataset.held_out(ENOUGH_ROWS))).inputs[0]


def _rows(stream: Tensor, rows: int, length: int) -> Tensor:
    return stream[torch.arange(rows * length) % len(stream)].view(rows, length)


def _ragged(tokens: Tensor, pad_id: int = 0) -> Tensor:
    """Every row a quarter shorter than the one before; none is empty."""
    rows, length = tokens.shape
    keep = (length - torch.arange(rows) * (length // 4)).clamp(min=1)  # (B,)
    return tokens.where(torch.arange(length) < keep[:, None], pad_id)


# The answers of the torch model at a rung, in float64 and in float32, that graphs are compared
# with.


MOST_AHEAD_BYTES = 64 << 20  # of answers that nobody has asked for yet


@dataclass(frozen=True, slots=True)
class Expected:
    """The answer to one sample at one rung."""

    inputs: Inputs
    logits: NDArray[np.float64]
    float32_error: float  # the farthest that torch's own float32 is from these
    embedding: "Expected | None" = None  # of a model that embeds: the same of its pooled state

    @property
    def scale(self) -> float:
        return float(np.abs(self.logits).max())


class Answers:
    """The answers of a model in float32 to samples, at any rung of one method."""

    def __init__(self, model: Stepped, samples: Sequence[Inputs], method: str) -> None:
        self.samples, self.method = samples, method
        single = model.eval()
        shared = {id(tensor): tensor for tensor in (*single.parameters(), *single.buffers())}
        self._single = _remembering(copy.deepcopy(single, shared))
        self._double = _remembering(copy.deepcopy(single).double())
        self._ahead: dict[tuple[int, int], Expected] = {}  # by steps and sample

    def at(self, steps: int) -> list[Expected]:
        """The answers to all samples, once: what was known before is forgotten then."""
        known = (self._ahead.pop((steps, index), None) for index in range(len(self.samples)))
        return [
            self.expect(steps, inputs) if one is None else one
            for one, inputs in zip(known, self.samples, strict=True)
        ]

    @contextmanager
    def ahead(self, ladder: Iterable[int]) -> Iterator[None]:
        """Work out answers beside what the block does; when that ends, no more are begun."""
        ended = Event()
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(self._work_ahead, sorted(ladder), ended)
            try:
                yield
            finally:
                ended.set()
        done.result()

    def _work_ahead(self, ladder: Sequence[int], ended: Event) -> None:
        held_bytes = sum(known.logits.nbytes for known in self._ahead.values())
        for steps in ladder:
            for index, inputs in enumerate(self.samples):
                if ended.is_set() or held_bytes > MOST_AHEAD_BYTES:
                    return
                if (steps, index) not in self._ahead:
                    self._ahead[steps, index] = answer = self.expect(steps, inputs)
                    held_bytes += answer.logits.nbytes

    def expect(self, steps: int, inputs: Inputs) -> Expected:
        """The answer to one sample."""
        found = [
            Expected(inputs, double.numpy(), float((single.double() - double).abs().max()))
            for double, single in zip(
                self._run(self._double, inputs, steps),
                self._run(self._single, inputs, steps),
                strict=True,
            )
        ]
        return dataclasses.replace(found[0], embedding=found[1]) if found[1:] else found[0]

    def _run(self, model: Stepped, inputs: Inputs, steps: int) -> list[Tensor]:
        """The logits, and of a model that pools its states what its head reads."""
        kind = next(model.parameters()).dtype
        given = (each.to(kind) if each.is_floating_point() else each for each in inputs)
        with torch.no_grad():
            out = model(*given, steps=steps, method=self.method)
            if not pools(model.head):
                return [out.logits]
            head = cast(Any, model.head)
            return [out.logits, head.pooled(out.trajectories[-1].end, *out.context)]


class FirstKept(nn.Module):
    """A velocity that keeps its first answer for each shape: there all rungs begin alike."""

    def __init__(self, velocity: nn.Module) -> None:
        super().__init__()
        self.velocity = velocity
        self._first: dict[torch.Size, tuple[tuple[Tensor, ...], Tensor]] = {}

    def forward(self, *state: Tensor) -> Tensor:
        """Of x and its context."""
        shape = state[0].shape
        if shape in self._first:
            given, answer = self._first[shape]
            if all(map(torch.equal, given, state)):
                return answer
        v: Tensor = self.velocity(*state)
        self._first.setdefault(shape, (state, v))
        return v


def _remembering(model: Stepped) -> Stepped:
    """The model, changed; a velocity that sees the size of the step begins otherwise each time."""
    if (
        isinstance(model, OTTransformer)
        and model.depth == "ode"
        and not getattr(model.velocity, "timed", False)
    ):
        model.velocity = FirstKept(model.velocity)
    return model


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads for each of torch's products."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Times torch's own float32 error, and times the largest logit: a few units in the last place.
SLACK, FLOOR = 16.0, 2e-6
# What numbers are rounded to where float32 rounds to 2^-24.
ROUNDED_TO = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 2.0**-8}
CACHES_ROUNDED_TO = {"kv_fp16": 2.0**-11, "kv_int8": 2.0**-8}
CONTINUED_TOKENS = 24
ALONE_TOKENS = 5


class VerificationError(ValueError):
    """A rung whose graph does not compute what the model computes."""


def allowed(manifest: Manifest) -> tuple[float, float]:
    """How many of torch's float32 errors, and what share of the largest logit, may be missing."""
    if not manifest.rounds:
        return SLACK, FLOOR
    weights = ROUNDED_TO.get(manifest.precision, 0.0)
    rounded_to = max(weights, CACHES_ROUNDED_TO.get(manifest.cache, 0.0))
    return rounded_to * 2.0**24, 8 * rounded_to


def verify_rung(opened: OpenedModel, rung: Rung, answers: list[Expected]) -> Verified:
    """Every kind of call that serving makes, and every graph of the rung, on each sample."""
    manifest, steps = opened.bundle.manifest, rung.steps
    check, embeddings = (_Check(rung, *allowed(manifest)) for _ in range(2))
    whole = None if manifest.task == "translate" else opened.unrolled(steps)
    for expected in answers:
        rows = expected.inputs[0].numpy()
        check.begin(expected, present_positions(rows, manifest))
        match manifest.task:
            case "classify" | "tag":
                runs: dict[str, Classifier] = {"a batch": opened.classifier(steps)}
                if manifest.step is not None:
                    runs["single steps"] = opened.step_classifier(steps)
                for what, run in runs.items():
                    _verify_classifier(check, run.run, rows, what)
                if manifest.embedding is not None:
                    assert expected.embedding is not None
                    embeddings.begin(expected.embedding)
                    runs["the whole graph"] = cast(Classifier, whole)  # as those of labels are
                    for what, run in runs.items():
                        _verify_classifier(embeddings, run.embed, rows, f"embeddings of {what}")
            case "generate":
                _verify_decoder(check, opened.decoder(steps), rows)
            case "translate":
                target = expected.inputs[1].numpy()
                _verify_translator(check, opened.translator(steps), rows, target)
        if whole is not None:
            check.compare(whole.forward(rows), "the whole graph")
    verified = check.verdict()
    if manifest.embedding is not None:
        embeddings.verdict()
    return verified


def _verify_classifier(
    check: "_Check", run: Callable[[RowArray], FloatArray], rows: RowArray, what: str
) -> None:
    together = run(rows)
    check.compare(together, what)
    if len(rows) > 1:
        check.same(together, [run(rows[i : i + 1]) for i in range(len(rows))], what)


def _verify_decoder(check: "_Check", run: Decoder, tokens: IntArray) -> None:
    forward = run.forward(tokens)
    check.compare(forward, "a prompt")
    rows, length = tokens.shape
    if length == 1:
        return
    start = max(1, length - CONTINUED_TOKENS)
    prompts = [max(1, start - row) for row in range(rows)]  # ragged on purpose
    logits = check.expected.copy()
    _decode(run.open_batch(), tokens, prompts, logits, length - max(prompts))
    check.compare(logits, "decoding")
    if rows > 1:
        check.same(forward, [run.forward(tokens[i : i + 1]) for i in range(rows)], "a prompt")
        alone = logits[:1].copy()
        few = min(ALONE_TOKENS, length - prompts[0])
        _decode(run.open_batch(), tokens[:1], prompts[:1], alone, few)
        check.same(logits[:1], [alone], "decoding")


def _decode(
    batch: DecodeBatch, tokens: IntArray, prompts: list[int], logits: FloatArray, count: int
) -> None:
    """Read the prompts and take in the logits of so many tokens more."""
    for row, prompt in enumerate(prompts):
        logits[row, prompt - 1] = batch.add(tokens[row, :prompt])
    _continue(batch, tokens, logits, count)


def _verify_translator(
    check: "_Check", run: Translator, source: IntArray, tokens: IntArray
) -> None:
    check.compare(run.forward(source, tokens), "pairs")
    batch, logits = run.open_batch(), check.expected.copy()
    for row, ids in enumerate(source):
        logits[row, 0] = batch.add(ids[ids != PAD_ID])
    _continue(batch, tokens, logits, min(CONTINUED_TOKENS, tokens.shape[1] - 1))
    check.compare(logits, "translating")


def _continue(batch: DecodeBatch, tokens: IntArray, logits: FloatArray, count: int) -> None:
    """Take in the logits of that many tokens more, row by row as they are."""
    rows = np.arange(len(tokens))
    for _ in range(count):
        at = np.array(batch.lengths)
        logits[rows, at] = batch.step(tokens[rows, at])


class _Check:
    """The differences seen so far at one rung."""

    def __init__(self, rung: Rung, slack: float, floor: float) -> None:
        self.rung, self.slack, self.floor = rung, slack, floor
        self.error = self.float32_error = self.scale = 0.0
        self.worst = ""
        self.shape: tuple[int, ...] = ()
        self.present: Present | slice = slice(None)
        self.expected: FloatArray = np.zeros(0, dtype=np.float32)

    def begin(self, expected: Expected, present: Present | None = None) -> None:
        """What the next answers should be; of a tagger, at the positions that are no padding."""
        self.present = slice(None) if present is None else present
        self.shape = tuple(expected.inputs[-1].shape)
        self.reference = expected.logits
        self.expected = expected.logits.astype(np.float32)
        self.float32_error = max(self.float32_error, expected.float32_error)
        self.scale = max(self.scale, expected.scale)

    def compare(self, logits: FloatArray, what: str) -> None:
        """Take in the difference of what the runtime gave."""
        apart = np.abs(logits.astype(np.float64) - self.reference)[self.present]
        difference = float(apart.max())
        if difference > self.error or np.isnan(difference):  # and above NaN is nothing
            self.error, self.worst = difference, f"{what} of shape {self.shape}"

    def same(self, together: FloatArray, alone: list[FloatArray], what: str) -> None:
        """That rows are answered bit for bit as they are without the others."""
        if not np.array_equal(together, np.concatenate(alone)):
            difference = float(np.abs(together - np.concatenate(alone)).max())
            raise VerificationError(
                f"{self._where} answers a row in {what} of shape {self.shape} otherwise than "
                f"alone, by {difference:.3g}. No bundle was kept."
            )

    def verdict(self) -> Verified:
        tolerance = self.slack * self.float32_error + self.floor * self.scale
        if not self.error <= tolerance < np.inf:
            raise VerificationError(
                f"{self._where} is off by {self.error:.3g} in {self.worst}, above its tolerance "
                f"{tolerance:.3g} (torch float32 is within {self.float32_error:.3g} of float64). "
                "No bundle was kept."
            )
        return Verified(self.error, tolerance, self.float32_error)

    @property
    def _where(self) -> str:
        return f"the graph of {steps_in_words(self.rung.steps)} ({self.rung.method})"


# Verification of rungs that share calls: each must answer as it does in calls of its own. Bit for
# bit, so no tolerance is needed, and any tokens will do.


def verify_mix(opened: OpenedModel, tokens: IntArray) -> None:
    """The last of tokens (B, N), behind the others, at all rungs together and at each alone."""
    mix = opened.mix()
    if mix is None or mix.most_batches == 1:
        return
    ladder = opened.bundle.manifest.steps[-mix.most_batches :]
    rows, length = tokens.shape
    alone, together = {}, {}
    for index, steps in enumerate(ladder):
        run = opened.decoder(steps)
        batch, other = run.open_batch(), run.open_batch()
        for row in range(rows):
            prompt = tokens[row, : max(1, length - 1 - row - index)]  # ragged on purpose
            batch.add(prompt)
            other.add(prompt)
        alone[steps] = batch.step(tokens[:, -1].copy())
        mix.begin([other], [tokens[:, -1].copy()])
        together[steps] = other
    for left in range(ladder[-1], 0, -1):  # they end together, and so stand at different steps
        mix.advance([batch for steps, batch in together.items() if steps >= left])
    for steps, batch in together.items():
        if not np.array_equal(mix.end([batch])[0], alone[steps]):
            raise VerificationError(
                f"the graph of {steps_in_words(steps)} answers otherwise when it shares calls with "
                "other step counts: no bundle was written; report this, with the recipe"
            )
