"""A bundle that nobody sees yet, opened as a server would: every rung verified and measured.

Puts verification and calibration in order; how each is done is theirs.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from export.against import compare
from export.calibrate import (
    Measured,
    choose_default,
    held_out_batches,
    measure_rung,
    named_rungs,
)
from export.disagreement import certify
from export.graphs import Ladder, write_graphs
from export.parts import Traced
from export.samples import Inputs
from export.verify import verify_rung
from serve.bundle import Calibration, Manifest, Rung, Verified, open_staging, seal_bundle
from serve.runtime import OpenedModel, open_model
from serve.runtime.protocol import FloatArray
from train.batch import Batch, Dataset
from train.config import Recipe
from train.model import Stepped

CALIBRATION_ROWS = 64
CALIBRATION_SOURCE = "rows of the training split that the model was not trained on"


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What is exported: a model, and the recipe and data that it was trained with."""

    model: Stepped
    recipe: Recipe
    dataset: Dataset
    iteration: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """What the trial found."""

    rungs: tuple[Rung, ...]
    default_steps: int
    calibration: Calibration | None


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What the staged graphs are tried with."""

    draft: Manifest
    origin: Origin
    edges: list[Inputs]
    samples: int | None
    say: Callable[[str], None]

    @contextmanager
    def opened(self, staging: Path, target: Path) -> Iterator[OpenedModel]:
        """The staged graphs as a bundle of their own, gone afterwards."""
        with _sealed(self.draft, staging, target) as model:
            yield model

    @contextmanager
    def opened_fp32(
        self, staging: Path, target: Path, traced: Traced, ladder: Ladder
    ) -> Iterator[OpenedModel]:
        """The same model in float32, to compare with."""
        rungs = tuple(dataclasses.replace(rung, against_fp32=None) for rung in self.draft.rungs)
        draft = dataclasses.replace(self.draft, precision="fp32", rungs=rungs)
        with open_staging(target) as folder:
            if draft.tokenizer is not None:
                os.link(staging / draft.tokenizer.file, folder / draft.tokenizer.file)
            write_graphs(folder, traced, ladder, "fp32")
            with _sealed(draft, folder, target) as model:
                yield model

    def run(self, opened: OpenedModel, reference: OpenedModel | None = None) -> Tried:
        """Every rung, verified and measured; the reference too, if there is one."""
        measured: dict[int, Measured] = {}
        rungs: list[Rung] = []
        for rung in self.draft.rungs:
            if reference is not None:
                verify_rung(self.origin.model, reference, rung, self.edges)
            verified = verify_rung(self.origin.model, opened, rung, self.edges)
            measured[rung.steps] = one = measure_rung(opened, rung.steps, self._batches())
            tried = dataclasses.replace(rung, verified=verified, quality=one.quality)
            if reference is not None:
                against = compare(opened, reference, rung.steps, self._batches())
                tried = dataclasses.replace(tried, against_fp32=against)
            rungs.append(tried)
            _report(tried, verified, self.say)
        return Tried(
            named_rungs(tuple(rungs), measured), choose_default(measured), self._certified(opened)
        )

    def _batches(self) -> Iterable[Batch]:
        return held_out_batches(self.origin.dataset, self.draft, self.samples)

    def _certified(self, opened: OpenedModel) -> Calibration | None:
        draft = self.draft
        if draft.task != "classify" or draft.step is None:
            return None
        if draft.method != "euler" or draft.full_steps == 1:
            return None
        if self.samples is not None:
            self.say("max_disagreement stays uncalibrated: only some rows were asked for")
            return None
        classifier = opened.step_classifier(self.draft.full_steps)

        def jumps() -> Iterator[FloatArray]:
            for batch in self.origin.dataset.validation(CALIBRATION_ROWS):
                yield classifier.jumps(batch.inputs[0].contiguous().numpy())

        return certify(jumps(), CALIBRATION_SOURCE, self.say)


@contextmanager
def _sealed(draft: Manifest, staging: Path, target: Path) -> Iterator[OpenedModel]:
    with open_staging(target.with_name(f"{target.name}.trial")) as trial:
        for path in staging.iterdir():
            os.link(path, trial / path.name)
        folder = trial.with_name(f"{trial.name}-sealed")
        try:
            yield open_model(seal_bundle(trial, draft, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _report(rung: Rung, verified: Verified, say: Callable[[str], None]) -> None:
    q, against = rung.quality, rung.against_fp32
    beside = (
        "" if against is None else f", {100 * against.top1_agreement:.2f} % answers as in float32"
    )
    say(
        f"{rung.steps:>3} steps: verified within {verified.max_abs_error:.1e} "
        f"(tolerance {verified.tolerance:.1e}), {q.metric} {q.value:.4f} "
        f"[{q.low:.4f}, {q.high:.4f}] on {q.samples}{beside}"
    )
