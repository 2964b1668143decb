"""Calibration: quality of every rung on held-out data, and its latency on this machine.

Measures in the runtime that serves; chooses what the effort words and the default mean.
"""

import datetime
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from serve.bundle import Bundle, Effort, Latency, LatencyEntry, Machine, Metric, Quality
from serve.runtime.protocol import Classifier, Decoder, Model
from train.data import Batch, Dataset
from train.quality import measure

Kind = Literal["classify", "prefill", "decode"]
EVALUATION_TOKENS = 8192  # tokens of one evaluation batch
ENOUGH_S, ENOUGH_RUNS = 0.25, 7


def held_out_batches(dataset: Dataset, window: int, samples: int | None) -> Iterable[Batch]:
    """The held-out split, whole, or about its first `samples` rows."""
    size = max(4, EVALUATION_TOKENS // window)
    batches: Iterable[Batch] = dataset.held_out(size)
    if samples is None:
        return batches
    if dataset.labels is not None:  # in order of length: take batches all over
        every = list(batches)
        wanted = max(1, min(len(every), samples // size))
        return [every[i] for i in np.linspace(0, len(every) - 1, wanted).round().astype(int)]
    return itertools.islice(batches, max(1, samples // size))


def measure_rung(run: Classifier | Decoder, batches: Iterable[Batch], labelled: bool) -> Quality:
    def logits_of(tokens: Tensor) -> tuple[Tensor, float]:
        array = tokens.contiguous().numpy()
        # `labelled` says which of the two it is.
        logits = run.run(array) if labelled else run.forward(array)  # type: ignore[union-attr]
        return torch.from_numpy(logits), 0.0

    quality = measure(logits_of, batches, labelled)
    metric: Metric = "accuracy" if labelled else "loss"
    return Quality(metric, quality.value, quality.low, quality.high, quality.samples)


def name_efforts(steps: list[int]) -> dict[int, Effort]:
    """low and max are the ends of the ladder; medium and high lie between, where there is room."""
    named: dict[int, Effort] = {steps[-1]: "max"}
    if len(steps) > 1:
        named[steps[0]] = "low"
    if len(steps) > 2:
        named[steps[max(1, (len(steps) - 1) // 3)]] = "medium"
    if len(steps) > 3:
        named[steps[-2]] = "high"
    return named


def choose_default(qualities: dict[int, Quality]) -> int:
    """The rung of best measured quality; of equals the one with fewest steps."""
    sign = -1 if next(iter(qualities.values())).metric == "loss" else 1
    return max(qualities, key=lambda steps: (sign * qualities[steps].value, -steps))


def measure_latency(model: Model, threads: int) -> Latency:
    """Median and 95th percentile of runtime calls over steps, batches and lengths."""
    bundle = model.bundle
    entries: list[LatencyEntry] = []
    for rung in bundle.manifest.rungs:
        if bundle.manifest.task == "classify":
            entries += _classify_entries(model.classifier(rung.steps), rung.steps, bundle)
        else:
            entries += _decode_entries(model.decoder(rung.steps), rung.steps, bundle)
    machine = Machine(_cpu_name(), os.cpu_count() or 1, threads, _runtime_name())
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Latency(machine, now, tuple(entries))


def _classify_entries(run: Classifier, steps: int, bundle: Bundle) -> list[LatencyEntry]:
    most = bundle.manifest.input.max_tokens
    entries = []
    for batch, length in itertools.product(
        (1, 8, 32), sorted({min(32, most), min(128, most), most})
    ):
        tokens = _tokens(bundle, batch, length)
        entries.append(_entry(partial(run.run, tokens), steps, "classify", batch, length))
    return entries


def _decode_entries(run: Decoder, steps: int, bundle: Bundle) -> list[LatencyEntry]:
    most = bundle.manifest.input.max_tokens
    entries = []
    for length in sorted({min(32, most // 2), most // 2}):
        tokens = _tokens(bundle, 1, length)[0]

        def prefill(tokens: np.ndarray = tokens) -> None:
            run.open_batch().add(tokens)

        entries.append(_entry(prefill, steps, "prefill", 1, length))
    context = min(128, most // 2)
    for batch in (1, 4, 16):
        rows = run.open_batch()
        for _ in range(batch):
            rows.add(_tokens(bundle, 1, context)[0])
        token = _tokens(bundle, batch, 1)[:, 0]
        room = most - context - 1  # every call makes the rows one position longer
        entries.append(_entry(partial(rows.step, token), steps, "decode", batch, context, room))
    return entries


def _entry(
    call: Callable[[], object],
    steps: int,
    kind: Kind,
    batch: int,
    length: int,
    most_runs: int = 200,
) -> LatencyEntry:
    call()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < most_runs - 1 and (
        len(times) < ENOUGH_RUNS or time.perf_counter() - started < ENOUGH_S
    ):
        before = time.perf_counter()
        call()
        times.append((time.perf_counter() - before) * 1e3)
    median, p95 = np.percentile(times or [0.0], [50, 95])
    return LatencyEntry(steps, kind, batch, length, round(float(median), 4), round(float(p95), 4))


def _tokens(bundle: Bundle, batch: int, length: int) -> np.ndarray:
    draw = np.random.default_rng(0)
    return draw.integers(1, bundle.manifest.tokenizer.vocab_size, (batch, length), dtype=np.int64)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _runtime_name() -> str:
    from importlib.metadata import version

    return f"onnxruntime {version('onnxruntime')}"
