"""A bundle opened with onnxruntime: its sessions, opened when first needed.

All but tiny models run every rung from the graphs of one step, so that the weights are in memory
once and the cost of a call can be predicted. Tiny models use one graph a rung, which saves calls.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Self, final

from serve.bundle import Bundle, BundleError, Manifest, Rung
from serve.runtime.classifier import (
    OrtClassifier,
    OrtStepClassifier,
    ParallelClassifier,
    ParallelStepClassifier,
    RowSplitter,
)
from serve.runtime.decoder import OrtDecoder
from serve.runtime.mixing import OrtMix
from serve.runtime.prefix import OrtPrefixDecoder, OrtTranslator
from serve.runtime.protocol import (
    CPU,
    Device,
    Model,
    largest_in_words,
    largest_row,
    largest_tokens,
    run_largest,
    rung_for,
)
from serve.runtime.session import (
    Interface,
    InterruptibleSession,
    StepSessions,
    Weights,
    encoder_interface,
    failure,
    graph_interface,
    open_session,
    open_steps,
    shared_options,
    step_interface,
    usable_cores,
)

# How many threads a session should have is measured on one row, since threads synchronise after
# every product and small products are faster on one. Batches of a classifier are split over threads
# anyway; for a decoder only the step of a single row is measured.


_ALWAYS_ONE_S = 0.005  # an evaluation this fast is not worth splitting
_WORTH = 0.8  # of the time on one thread: other work could use the cores
_TIMES = 3
_SMALL_BYTES = 16 << 20  # of weights; reading more takes longer than synchronising threads
_ROUNDS, _LEAST_ROUNDS = 15, 3
_NO_SLOWER = 1.03  # within measurement error; the other cores are free then

Opening = Callable[[int], Model]  # opens the model with this many threads a session


def tune_threads(opening: Opening, most: int) -> None:
    """Leave the model with one thread or `most`, whichever answers one row sooner."""
    one_s, evaluations = _timed(opening(1))
    if one_s <= _ALWAYS_ONE_S * evaluations:
        return
    all_s, _ = _timed(opening(most))
    if all_s >= _WORTH * one_s:
        opening(1)


def tune_single_row(
    sessions: StepSessions, open_alone: Callable[[], InterruptibleSession], manifest: Manifest
) -> StepSessions:
    """These sessions, with a one-thread session for single rows if that is no slower."""
    most = manifest.text_input.max_tokens
    middle = most // 2  # cached positions, so that attention has its average share
    rounds = min(_ROUNDS, (most - middle) // 2)
    if rounds < _LEAST_ROUNDS or manifest.files[manifest.weights].bytes > _SMALL_BYTES:
        return sessions
    alone = replace(sessions, single=open_alone())
    tokens = largest_tokens(manifest)
    longest = manifest.rungs[-1]
    batches = [OrtDecoder(one, manifest, longest).open_batch() for one in (sessions, alone)]
    for batch in batches:
        batch.add(tokens[:middle])
    taken = interleaved([partial(batch.step, tokens[:1]) for batch in batches], rounds)
    return alone if taken[1] <= _NO_SLOWER * taken[0] else sessions


def interleaved(runs: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """The median seconds of each run with its threads awake, alternating."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, times in zip(runs, taken, strict=True):
            run()
            begun_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - begun_s)
    return [median(times) for times in taken]


def _timed(model: Model) -> tuple[float, int]:
    """Seconds of one row at the fewest steps, and its evaluations."""
    manifest = model.bundle.manifest
    rung, row = manifest.rungs[0], largest_row(manifest)[None]
    classifier = model.classifier(rung.steps)
    classifier.run(row)
    taken_s = []
    for _ in range(_TIMES):
        begun_s = time.perf_counter()
        classifier.run(row)
        taken_s.append(time.perf_counter() - begun_s)
    return min(taken_s), rung.nfe


TINY_BYTES = 1 << 20  # of weights: calling a step takes as long as computing it


@final
class OrtModel:
    """All rungs of a bundle, in one process."""

    def __init__(self, bundle: Bundle, threads: int | None = None, device: Device = CPU) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self.threads = usable_cores() if threads is None else threads
        self.bundle = bundle
        self._device = device
        self._classifiers: dict[int, ParallelClassifier] = {}
        self._session_threads = self.threads  # until warm-up finds that one is better
        # A GPU splits the rows itself.
        self._splitter = RowSplitter(self.threads if device.name == "cpu" else 1)
        self._decoders: dict[int, OrtDecoder | OrtPrefixDecoder] = {}
        self._translators: dict[int, OrtTranslator] = {}
        self._steps: StepSessions | None = None
        self._mix: OrtMix | None = None
        self._weights: Weights | None = None
        self._run_options = shared_options()
        self.opening = False

    @property
    def open_steps(self) -> tuple[int, ...]:
        """The rungs that can run at once."""
        return tuple(sorted({*self._classifiers, *self._decoders, *self._translators}))

    @property
    def most_parts(self) -> int:
        return self._splitter.most

    @property
    def single_steps(self) -> bool:
        return self._device.runs_single_steps(self.bundle.manifest)

    def classifier(self, steps: int) -> ParallelClassifier:
        rung = rung_for(self.bundle.manifest, steps, "classify", "tag")
        if steps not in self._classifiers:
            self._classifiers[steps] = (
                self.step_classifier(steps)
                if self._shares_weights()
                else ParallelClassifier(self._whole(rung), self._splitter)
            )
        return self._classifiers[steps]

    def step_classifier(self, steps: int) -> ParallelStepClassifier:
        rung_for(self.bundle.manifest, steps, "classify", "tag")
        if self.bundle.manifest.step is None:
            raise BundleError(f"{self.bundle.manifest.name} has no graphs of one step")
        steps_alone = OrtStepClassifier(self._step_sessions(), self.bundle.manifest, steps)
        return ParallelStepClassifier(steps_alone, self._splitter)

    def decoder(self, steps: int) -> OrtDecoder | OrtPrefixDecoder:
        rung = rung_for(self.bundle.manifest, steps, "generate")
        if steps not in self._decoders:
            manifest = self.bundle.manifest
            self._decoders[steps] = (
                OrtDecoder(self._step_sessions(), manifest, rung)
                if self._device.keeps_caches(manifest)
                else OrtPrefixDecoder(self._open_graph(rung), manifest)
            )
        return self._decoders[steps]

    def mix(self) -> OrtMix | None:
        manifest = self.bundle.manifest
        if not self._device.keeps_caches(manifest):
            return None
        if self._mix is None:
            self._mix = OrtMix(self._step_sessions(), manifest)
        return self._mix

    def unrolled(self, steps: int) -> OrtClassifier | OrtPrefixDecoder:
        """The rung as the one graph that other runtimes run."""
        manifest = self.bundle.manifest
        rung = manifest.rung(steps)
        if manifest.labelled:
            return self._whole(rung)
        return OrtPrefixDecoder(self._open_graph(rung), manifest)

    def translator(self, steps: int) -> OrtTranslator:
        rung = rung_for(self.bundle.manifest, steps, "translate")
        if steps not in self._translators:
            assert rung.encoder is not None
            manifest = self.bundle.manifest
            encoder = self._open(rung.encoder, encoder_interface(manifest))
            self._translators[steps] = OrtTranslator(encoder, self._open_graph(rung), manifest)
        return self._translators[steps]

    def warm_up(self) -> None:
        manifest = self.bundle.manifest
        for rung in manifest.rungs:
            try:
                if not self.open_steps and self.threads > 1 and self._device.name == "cpu":
                    self._tune_threads()
                run_largest(self, rung.steps)
            except BundleError:
                raise
            except Exception as error:  # onnxruntime has no base class of its own
                raise failure(
                    f"fails on {largest_in_words(manifest)}, which the manifest promises",
                    error,
                    self.bundle.folder / self._file_of(rung),
                ) from error

    def _tune_threads(self) -> None:
        """Use one thread where that is better than all."""
        if not self._writes:
            tune_threads(self._with_threads, self.threads)
        elif self.bundle.manifest.keeps_caches:
            steps = self._step_sessions()
            self._steps = tune_single_row(steps, self._open_alone, self.bundle.manifest)

    @property
    def _writes(self) -> bool:
        """Whether calls follow each other closely, each waiting for the one before."""
        return not self.bundle.manifest.labelled

    def _with_threads(self, count: int) -> Self:
        """The same model with this many threads a session; all sessions open anew."""
        if count != self._session_threads:
            self._drop()
            self._session_threads = count
        return self

    def close(self) -> None:
        self._drop()
        self._splitter.close()

    def _drop(self) -> None:
        # One by one: each holds the interpreter for milliseconds, and other threads wait.
        for rungs in (self._classifiers, self._decoders, self._translators):
            while rungs:
                rungs.popitem()
        self._steps = self._mix = self._weights = None

    def interrupt(self) -> None:
        self._run_options.terminate = True

    def resume(self) -> None:
        self._run_options.terminate = False

    def _file_of(self, rung: Rung) -> str:
        """The graph of the rung."""
        manifest = self.bundle.manifest
        if manifest.step is not None and (manifest.keeps_caches or self._shares_weights()):
            return manifest.step.step
        return rung.graph

    def _whole(self, rung: Rung) -> OrtClassifier:
        return OrtClassifier(self._open_graph(rung), self.bundle.manifest)

    def _open_graph(self, rung: Rung) -> InterruptibleSession:
        return self._open(rung.graph, graph_interface(self.bundle.manifest))

    def _open_alone(self) -> InterruptibleSession:
        """The step on one thread, for single rows."""
        step = self.bundle.manifest.step
        assert step is not None
        return self._open(step.step, step_interface(self.bundle.manifest), threads=1)

    def _open(
        self, file: str, interface: Interface, threads: int | None = None
    ) -> InterruptibleSession:
        with self._opens():
            return open_session(
                self.bundle,
                file,
                interface,
                threads or self._session_threads,
                self._device,
                self._run_options,
                self._lent(),
                self._writes,
            )

    def _step_sessions(self) -> StepSessions:
        if self._steps is None:
            with self._opens():
                self._steps = open_steps(
                    self.bundle,
                    self._session_threads,
                    self._run_options,
                    self._lent(),
                    self._writes,
                    self._device,
                )
        return self._steps

    @contextmanager
    def _opens(self) -> Iterator[None]:
        self.opening = True
        try:
            yield
        finally:
            self.opening = False

    def _lent(self) -> Weights | None:
        """The weights for sessions that open now; on a GPU they are read from the file."""
        if self._device.name != "cpu":
            return None
        if self.bundle.manifest.keeps_caches or self._shares_weights():
            return Weights.read(self.bundle, in_place=False)
        if self._weights is None:
            self._weights = Weights.read(self.bundle, in_place=True)
        return self._weights

    def _shares_weights(self) -> bool:
        """Whether a classifier's rungs run from single steps, not from a session each.

        On a GPU a whole rung is one call, which costs less than a call a step.
        """
        manifest = self.bundle.manifest
        if manifest.step is None or self._device.name != "cpu":
            return False
        # With 8 bits only the step uses the runtime's own integer products; and of 16 bits the
        # matrices of a whole rung would become float32 in every call.
        return (
            manifest.precision in ("int8", "fp16")
            or manifest.files[manifest.weights].bytes > TINY_BYTES
        )
