"""Builds, verifies and times a bundle on a GPU in every way there is, beside the CPU.

The ways: onnxruntime's CUDA provider, its TensorRT provider, and native engines in fp32, fp16 and
bf16. Each is compared with the CPU on random rows of several sizes; a time is the median of whole
calls, the copies to and from the GPU included.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.lab import interleave
from export.tensorrt import TOLERANCES, EngineRequest, build_engines, largest_error, sample_tokens
from serve.bundle import Bundle, BundleError, Manifest, TextInput
from serve.runtime import OpenedModel, open_model
from serve.runtime.protocol import Device, RowArray, largest_row
from serve.runtime.tensorrt import Precision

# The CUDA and TensorRT providers compute float32 without TF32, if in other orders of sums.
PROVIDER_TOLERANCE = TOLERANCES["fp32"]
_ROWS = (1, 16, 64)
_WARM_CALLS = 5


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a bundle."""

    name: str
    tolerance: float
    open: Callable[[], OpenedModel]


@dataclass(frozen=True, slots=True)
class Timed:
    """One measurement."""

    way: str
    steps: int
    rows: int
    median_ms: float
    error: float  # of the largest logit, against the CPU
    tolerance: float

    @property
    def right(self) -> bool:
        return self.error <= self.tolerance


def measure(
    bundle: Bundle, folder: Path, calls: int
) -> tuple[list[Timed], dict[str, str], dict[str, str]]:
    """Every way at every rung, in turn; and why a way was refused here, or failed."""
    reference = open_model(bundle)
    opened: dict[Way, tuple[OpenedModel, dict[int, float]]] = {}  # and errors, by steps
    skipped: dict[str, str] = {}
    broken: dict[str, str] = {}
    for way in ways(bundle, folder):
        try:
            model = way.open()
            errors = {
                steps: 0.0 if way.name == "cpu" else largest_error(model, reference, steps)
                for steps in bundle.manifest.steps
            }
            for steps, rows in itertools.product(bundle.manifest.steps, _ROWS):
                for _ in range(_WARM_CALLS):
                    _call(model, steps, rows)()
            opened[way] = model, errors
        except BundleError as error:
            skipped[way.name] = str(error)
        except Exception as error:  # one way that fails must not hide what the others do
            broken[way.name] = f"{type(error).__name__}: {error}"
    timed: list[Timed] = []
    for steps, rows in itertools.product(bundle.manifest.steps, _ROWS):
        times = interleave(
            {way: partial(_ms, _call(model, steps, rows)) for way, (model, _) in opened.items()},
            seconds=0,
            least=calls,
            most=calls,
        )
        timed += [
            Timed(way.name, steps, rows, median(found), opened[way][1][steps], way.tolerance)
            for way, found in times.items()
        ]
    return timed, skipped, broken


def ways(bundle: Bundle, folder: Path) -> Iterator[Way]:
    """The CPU first, since the others are held against it."""
    yield Way("cpu", 0.0, lambda: open_model(bundle))
    yield Way("cuda", PROVIDER_TOLERANCE, lambda: open_model(bundle, device=Device("cuda")))
    yield Way("tensorrt", PROVIDER_TOLERANCE, lambda: open_model(bundle, device=Device("tensorrt")))
    for precision, tolerance in TOLERANCES.items():
        yield Way(
            f"engines {precision}",
            tolerance,
            lambda precision=precision: _open_engines(bundle, folder / precision, precision),  # type: ignore[misc]  # defaults bind now
        )


def _open_engines(bundle: Bundle, folder: Path, precision: Precision) -> OpenedModel:
    build_engines(bundle, folder, EngineRequest(precision))
    return open_model(bundle, device=Device(engines=folder))


def _call(model: OpenedModel, steps: int, rows: int) -> Callable[[], object]:
    """A call with so many rows of the greatest length."""
    manifest = model.bundle.manifest
    taken = _rows(manifest, rows)
    if manifest.task != "translate":
        return partial(model.unrolled(steps).forward, taken)
    read = model.translator(steps).read
    source = np.asarray(taken[0], dtype=np.int64)
    answers = np.repeat(source[None, : manifest.target_max_tokens], rows, axis=0)
    return lambda: read(source).follow(answers)


def _rows(manifest: Manifest, rows: int) -> RowArray:
    random = np.random.default_rng(0)
    if isinstance(manifest.input, TextInput):
        return sample_tokens(manifest, random, (rows, manifest.input.max_tokens))
    return random.standard_normal((rows, *largest_row(manifest).shape)).astype(np.float32)


def _ms(call: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - begun_s)
