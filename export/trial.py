"""A bundle that nobody sees yet, opened as a server would: every rung verified and measured.

Puts verification and calibration in order; how each is done is theirs.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event

from export.against import compare
from export.calibrate import (
    Measured,
    choose_default,
    held_out_batches,
    measure_rung,
    named_rungs,
    range_of,
)
from export.disagreement import Jumps, certify
from export.expected import Answers, torch_threads
from export.graphs import Ladder, write_graphs
from export.parts import Traced
from export.verify import verify_rung
from export.verify_mix import verify_mix
from serve.bundle import (
    Calibration,
    Manifest,
    Range,
    Rung,
    Verified,
    open_staging,
    seal_bundle,
    steps_in_words,
)
from serve.runtime import OpenedModel, open_model
from serve.runtime.margins import present_positions
from serve.runtime.ort_session import usable_cores
from train.data.batch import Batch, Dataset
from train.model import Stepped
from train.recipe import Recipe

AT_ONCE = 2  # rungs: each holds the weights of a graph of its own
CALIBRATION_ROWS = 64
CALIBRATION_SOURCE = "rows of the training split that the model was not trained on"


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What is exported: a model, and the recipe and data that it was trained with."""

    model: Stepped
    recipe: Recipe
    dataset: Dataset
    iteration: int = 0
    same_data: bool = True  # to the last row, so that what it holds out was not learnt


@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """What the trial found."""

    rungs: tuple[Rung, ...]
    default_steps: int
    range: Range | None
    calibration: Calibration | None


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What the staged graphs are tried with."""

    draft: Manifest
    origin: Origin
    answers: Answers
    samples: int | None
    say: Callable[[str], None]
    _given_up: Event = dataclasses.field(default_factory=Event, init=False)

    @contextmanager
    def opened(self, staging: Path, target: Path) -> Iterator[OpenedModel]:
        """The staged graphs as a bundle of their own, gone afterwards."""
        with _sealed(self.draft, staging, target, self._threads) as model:
            yield model

    @contextmanager
    def opened_fp32(
        self, staging: Path, target: Path, traced: Traced, ladder: Ladder
    ) -> Iterator[OpenedModel]:
        """The same model in float32, to compare with."""
        rungs = tuple(dataclasses.replace(rung, against_fp32=None) for rung in self.draft.rungs)
        draft = dataclasses.replace(self.draft, precision="fp32", cache=traced.cache, rungs=rungs)
        with open_staging(target) as folder:
            if draft.tokenizer is not None:
                os.link(staging / draft.tokenizer.file, folder / draft.tokenizer.file)
            write_graphs(folder, traced, ladder, "fp32")
            with _sealed(draft, folder, target, self._threads) as model:
                yield model

    def run(self, opened: OpenedModel, reference: OpenedModel | None = None) -> Tried:
        """Every rung, verified and measured; the reference too, if there is one."""
        attempt = partial(self._attempt, opened, reference)
        for one in (opened, reference):
            if one is not None:
                _open_shared(one)
        with torch_threads(self._threads), ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                mixing = pool.submit(self._mix, opened)
                found = list(pool.map(attempt, reversed(self.draft.rungs)))[::-1]
                mixing.result()
            except BaseException:
                self._given_up.set()  # other rungs, and Ctrl-C, wait for one batch only
                raise
            finally:
                pool.shutdown(cancel_futures=True)
        measured = {rung.steps: one for rung, one in found}
        return Tried(
            named_rungs(tuple(rung for rung, _ in found), measured),
            choose_default(measured),
            range_of(measured),
            self._certified(opened),
        )

    def _attempt(
        self, opened: OpenedModel, reference: OpenedModel | None, rung: Rung
    ) -> tuple[Rung, Measured]:
        expected = self.answers.at(rung.steps)
        verified = verify_rung(opened, rung, expected)
        if reference is None:
            against = None
            measured = measure_rung(opened, rung.steps, self._batches())
        else:
            verify_rung(reference, rung, expected)
            measured, against = compare(opened, reference, rung.steps, self._batches())
        tried = dataclasses.replace(
            rung, verified=verified, quality=measured.quality, against_fp32=against
        )
        _report(tried, verified, self.say)
        return tried, measured

    def _mix(self, opened: OpenedModel) -> None:
        """With sessions of its own, since rungs are tried meanwhile."""
        if self.draft.task == "generate":
            tokens = max((edge[0] for edge in self.answers.samples), key=len).numpy()
            verify_mix(open_model(opened.bundle, self._threads), tokens)

    @property
    def _threads(self) -> int:
        return threads_each(len(self.draft.rungs))

    def _batches(self) -> Iterator[Batch]:
        for batch in held_out_batches(self.origin.dataset, self.draft, self.samples):
            if self._given_up.is_set():
                raise CancelledError
            yield batch

    def _certified(self, opened: OpenedModel) -> Calibration | None:
        draft = self.draft
        if not draft.labelled or draft.step is None:
            return None
        if draft.method != "euler" or draft.full_steps == 1:
            return None
        if self.samples is not None:
            self.say("max_disagreement stays uncalibrated: only some rows were asked for")
            return None
        if not self.origin.same_data:
            self.say("max_disagreement stays uncalibrated: rows of other data may have been learnt")
            return None
        classifier = open_model(opened.bundle).step_classifier(self.draft.full_steps)

        def jumps() -> Iterator[Jumps]:
            for batch in self.origin.dataset.validation(CALIBRATION_ROWS):
                rows = batch.inputs[0].contiguous().numpy()
                yield Jumps(classifier.jumps(rows), present_positions(rows, draft))

        return certify(jumps(), CALIBRATION_SOURCE, self.say)


def threads_each(rungs: int) -> int:
    """Of each of the rungs that are tried at once."""
    return max(1, usable_cores() // min(AT_ONCE, rungs))


@contextmanager
def _sealed(draft: Manifest, staging: Path, target: Path, threads: int) -> Iterator[OpenedModel]:
    with open_staging(target.with_name(f"{target.name}.trial")) as trial:
        for path in staging.iterdir():
            os.link(path, trial / path.name)
        folder = trial.with_name(f"{trial.name}-sealed")
        try:
            yield open_model(seal_bundle(trial, draft, folder), threads)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _open_shared(opened: OpenedModel) -> None:
    """What all rungs run with, before several of them ask for it at once."""
    manifest = opened.bundle.manifest
    if manifest.task == "generate":
        opened.decoder(manifest.full_steps)
    elif manifest.task == "translate":
        opened.translator(manifest.full_steps)
    elif manifest.step is not None:
        opened.step_classifier(manifest.full_steps)
    else:
        opened.classifier(manifest.full_steps)


def _report(rung: Rung, verified: Verified, say: Callable[[str], None]) -> None:
    q, against = rung.quality, rung.against_fp32
    beside = (
        "" if against is None else f", {100 * against.top1_agreement:.2f} % answers as in float32"
    )
    whole = "" if q.exact is None else f", {100 * q.exact:.2f} % of rows right as a whole"
    say(
        f"{steps_in_words(rung.steps):>9}: verified within {verified.max_abs_error:.1e} "
        f"(tolerance {verified.tolerance:.1e}), {q.metric} {q.value:.4f} "
        f"[{q.low:.4f}, {q.high:.4f}] on {q.samples}{whole}{beside}"
    )
