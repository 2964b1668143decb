"""Latency of a bundle on this machine: medians of runtime calls over steps, batches and lengths."""

import datetime
import os
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np

from serve.bundle import (
    BundleError,
    ImageInput,
    Latency,
    LatencyEntry,
    Machine,
    Manifest,
    PointsInput,
    TextInput,
    read_bundle,
    write_latency,
)
from serve.runtime import Batches, Model, open_model
from serve.runtime.protocol import RowArray
from serve.runtime.session import usable_cores

Kind = Literal["classify", "prefill", "decode"]
ENOUGH_S, ENOUGH_RUNS, MOST_RUNS = 0.25, 7, 200
BATCHES = (1, 8, 32)  # rows of a call of a classifier
ROWS = (1, 4, 16)  # that are written together


def measure_latency(model: Model, threads: int) -> Latency:
    """Median and 95th percentile of runtime calls over steps, batches and lengths."""
    manifest = model.bundle.manifest
    entries: list[LatencyEntry] = []
    for steps in manifest.steps:
        match manifest.task:
            case "classify" | "tag":
                entries += _classify(model.classifier(steps).run, steps, manifest)
            case "generate":
                entries += _write(model.decoder(steps), steps, manifest)
            case "translate":
                entries += _write(model.translator(steps), steps, manifest)
    machine = Machine(cpu_name(), os.cpu_count() or 1, threads, _runtime_name())
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Latency(machine, now, tuple(entries))


def calibrate_latency(
    folder: Path, threads: int | None = None, say: Callable[[str], None] = print
) -> None:
    """Measure a bundle's latency here and write its latency.json."""
    bundle = read_bundle(folder, latency=False)  # one that is damaged is to be replaced
    if not os.access(folder, os.W_OK):  # before the work, not after it
        raise BundleError(
            "cannot be written, and the latency is kept there: calibrate a copy", file=str(folder)
        )
    model = open_model(bundle, threads)
    say(
        f"measuring latency on this machine ({threads or usable_cores()} threads): "
        f"{about(_expected_s(model))}"
    )
    latency = measure_latency(model, threads or usable_cores())
    if read_bundle(folder, verify=False, latency=False).manifest != bundle.manifest:
        raise ValueError(f"{folder} was replaced while it was measured: calibrate it again")
    write_latency(bundle.folder, latency)


def about(seconds: float) -> str:
    """A time that was estimated, in words."""
    if seconds < 5:
        return "a few seconds"
    if seconds < 90:
        return f"about {5 * round(seconds / 5)} seconds"
    return f"about {round(seconds / 60)} minutes"


def _expected_s(model: Model) -> float:
    """How long it takes, from one row of a classifier; of others where no call is slow."""
    manifest = model.bundle.manifest
    first = manifest.rungs[0]
    if not manifest.labelled:
        return ENOUGH_S * (2 + len(ROWS)) * len(manifest.steps)
    lengths = _lengths(manifest)
    run, row = model.classifier(first.steps).run, _rows(manifest, 1, lengths[-1])
    run(row)
    before = time.perf_counter()
    run(row)
    row_s = (time.perf_counter() - before) / (lengths[-1] * first.nfe)
    return sum(
        max(ENOUGH_S, (1 + ENOUGH_RUNS) * row_s * rung.nfe * batch * length)
        for rung, batch, length in product(manifest.rungs, BATCHES, lengths)
    )


def _classify(
    run: Callable[[RowArray], object], steps: int, manifest: Manifest
) -> Iterator[LatencyEntry]:
    for batch, length in product(BATCHES, _lengths(manifest)):
        rows = _rows(manifest, batch, length)
        yield _entry(partial(run, rows), steps, "classify", batch, length)


def _lengths(manifest: Manifest) -> list[int]:
    """Of the rows to measure a classifier with."""
    match manifest.input:
        case TextInput(max_tokens=most, exact=True):
            return [most]
        case TextInput(max_tokens=most):
            return sorted({min(32, most), min(128, most), most})
        case PointsInput(max_points=most):
            return sorted({min(256, most), min(1024, most), most})
        case _:
            return [1]


def _write(run: Batches, steps: int, manifest: Manifest) -> Iterator[LatencyEntry]:
    """Prompts or sources read, and tokens written behind them."""
    most = manifest.text_input.max_tokens
    for length in sorted({max(1, min(32, most // 2)), max(1, most // 2)}):
        tokens = _tokens(manifest, 1, length)[0]

        def prefill(tokens: np.ndarray = tokens) -> None:
            run.open_batch().add(tokens)

        yield _entry(prefill, steps, "prefill", 1, length)
    translates = manifest.target_max_tokens is not None
    room = manifest.target_max_tokens or most
    context = max(1, min(32 if translates else 128, room // 2))
    for batch in ROWS:
        rows = run.open_batch()
        for _ in range(batch):
            # The positions of a translation are those of its answer, which begins with one.
            rows.add(_tokens(manifest, 1, min(32, most) if translates else context)[0])
        token = _tokens(manifest, batch, 1)[:, 0]
        while rows.lengths[0] < context:
            rows.step(token)
        # Every call makes the rows one position longer; without a cache, that much slower too.
        runs = min(room - context - 1, MOST_RUNS if manifest.keeps_caches else 2 * ENOUGH_RUNS)
        if runs > 0:
            yield _entry(partial(rows.step, token), steps, "decode", batch, context, runs)


def _entry(
    call: Callable[[], object],
    steps: int,
    kind: Kind,
    batch: int,
    length: int,
    most_runs: int = MOST_RUNS,
) -> LatencyEntry:
    call()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < most_runs and (
        len(times) < ENOUGH_RUNS or time.perf_counter() - started < ENOUGH_S
    ):
        before = time.perf_counter()
        call()
        times.append((time.perf_counter() - before) * 1e3)
    median, p95 = np.percentile(times, [50, 95])
    return LatencyEntry(steps, kind, batch, length, round(float(median), 4), round(float(p95), 4))


def _rows(manifest: Manifest, batch: int, length: int) -> RowArray:
    draw = np.random.default_rng(0)
    match manifest.input:
        case ImageInput(channels=channels, height=height, width=width):
            return draw.standard_normal((batch, channels, height, width), dtype=np.float32)
        case PointsInput(dimensions=dimensions):
            return draw.uniform(-0.5, 0.5, (batch, length, dimensions)).astype(np.float32)
        case _:
            return _tokens(manifest, batch, length)


def _tokens(manifest: Manifest, batch: int, length: int) -> np.ndarray:
    draw = np.random.default_rng(0)
    return draw.integers(1, manifest.text_tokenizer.vocab_size, (batch, length), dtype=np.int64)


def cpu_name() -> str:
    """The processor's own name, or its architecture."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _runtime_name() -> str:
    from importlib.metadata import version

    return f"onnxruntime {version('onnxruntime')}"
