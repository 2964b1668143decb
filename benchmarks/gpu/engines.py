"""Builds, verifies and times a bundle on a GPU in every way there is, beside the CPU.

    python -m benchmarks.gpu.engines BUNDLE [--engines FOLDER] [--results FILE]

The ways: onnxruntime's CUDA provider, its TensorRT provider, and native engines in fp32, fp16 and
bf16. Each is compared with the CPU on random rows of several sizes; a time is the median of whole
calls, the copies to and from the GPU included. Ends with status 3 where there is no GPU, 2 for a
bundle that cannot be read, 1 where a way is wrong, 0 otherwise; what could not be run is listed
with the reason.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.lab import Cell, Provenance, Table
from export.tensorrt import TOLERANCES, EngineRequest, build_engines, largest_error, sample_tokens
from serve.bundle import Bundle, BundleError, Manifest, TextInput, read_bundle
from serve.runtime import OpenedModel, open_model
from serve.runtime.protocol import Device, RowArray, largest_row
from serve.runtime.tensorrt import Precision, open_cuda

WRONG, UNUSABLE, NO_GPU = 1, 2, 3
# The CUDA and TensorRT providers compute float32 without TF32, if in other orders of sums.
PROVIDER_TOLERANCE = TOLERANCES["fp32"]
_ROWS = (1, 16, 64)
_WARM_CALLS, _CALLS = 5, 50


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


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    parsed = _parser().parse_args(arguments)
    try:
        bundle = read_bundle(parsed.bundle)
    except BundleError as error:
        print(error, file=sys.stderr)
        return UNUSABLE
    try:
        facts = open_cuda().facts()
    except BundleError as error:
        print(f"nothing was run: {error}", file=sys.stderr)
        return NO_GPU
    provenance = Provenance.now("gpu.engines", arguments)
    with tempfile.TemporaryDirectory() as folder:
        timed, skipped, broken = measure(bundle, parsed.engines or Path(folder), parsed.calls)
    result = provenance.result(
        "gpu_engines",
        f"{bundle.manifest.name} on {facts['gpu']}",
        ", ".join(f"{name} {value}" for name, value in facts.items()),
        [_times(timed), _reasons("Skipped", skipped), _reasons("Broken", broken)],
        [],
    )
    print(result.text)
    if parsed.results is not None:
        record = {
            "host": facts,
            "timed": [asdict(one) for one in timed],
            "skipped": skipped,
            "broken": broken,
        }
        parsed.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"kept in {parsed.results}")
    return 0 if all(one.right for one in timed) and not broken else WRONG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument(
        "--engines", type=Path, metavar="FOLDER", help="where to keep the engines, one folder each"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="where to keep the JSON")
    parser.add_argument("--calls", type=int, default=_CALLS, help="timed calls (%(default)s)")
    return parser


def measure(
    bundle: Bundle, folder: Path, calls: int
) -> tuple[list[Timed], dict[str, str], dict[str, str]]:
    """Every way at every rung; and why a way was refused here, or failed."""
    reference = open_model(bundle)
    timed: list[Timed] = []
    skipped: dict[str, str] = {}
    broken: dict[str, str] = {}
    for way in ways(bundle, folder):
        try:
            model = way.open()
            for steps in bundle.manifest.steps:
                error = 0.0 if way.name == "cpu" else largest_error(model, reference, steps)
                timed += [
                    Timed(way.name, steps, rows, _median_ms(call, calls), error, way.tolerance)
                    for rows, call in _calls(model, steps)
                ]
        except BundleError as error:
            skipped[way.name] = str(error)
        except Exception as error:  # one way that fails must not hide what the others do
            broken[way.name] = f"{type(error).__name__}: {error}"
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


def _calls(model: OpenedModel, steps: int) -> Iterator[tuple[int, Callable[[], object]]]:
    """Calls of several sizes, of the greatest length."""
    manifest = model.bundle.manifest
    for rows in _ROWS:
        taken = _rows(manifest, rows)
        if manifest.task == "translate":
            read = model.translator(steps).read
            source = np.asarray(taken[0], dtype=np.int64)
            answers = np.repeat(source[None, : manifest.target_max_tokens], rows, axis=0)
            yield rows, lambda read=read, s=source, a=answers: read(s).follow(a)  # type: ignore[misc]  # defaults bind now
        else:
            forward = model.unrolled(steps).forward
            yield rows, lambda forward=forward, taken=taken: forward(taken)  # type: ignore[misc]  # defaults bind now


def _rows(manifest: Manifest, rows: int) -> RowArray:
    random = np.random.default_rng(0)
    if isinstance(manifest.input, TextInput):
        return sample_tokens(manifest, random, (rows, manifest.input.max_tokens))
    return random.standard_normal((rows, *largest_row(manifest).shape)).astype(np.float32)


def _median_ms(call: Callable[[], object], calls: int) -> float:
    for _ in range(_WARM_CALLS):
        call()
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def _times(timed: Sequence[Timed]) -> Table:
    columns = ("way", "steps", "rows", "median ms", "error", "allowed", "")
    cells: list[Sequence[Cell]] = [
        (
            one.way,
            one.steps,
            one.rows,
            one.median_ms,
            f"{one.error:.1e}",
            f"{one.tolerance:.0e}",
            "right" if one.right else "WRONG",
        )
        for one in timed
    ]
    return Table("Whole calls; errors are of the largest logit, against the CPU", columns, cells)


def _reasons(caption: str, reasons: dict[str, str]) -> Table:
    return Table(caption, ("way", "why"), list(reasons.items()))


if __name__ == "__main__":
    sys.exit(main())
