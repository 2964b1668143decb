"""Makes golden bundles: `python -m tests.golden.make [NAME ...]`, only for a new format version.

Each is a tiny run, exported by `export` as any other, with what it answered then beside it. A
folder that is there is kept: golden bundles are never made anew within a format version.
"""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from export.run import ExportRequest, export_run
from serve.bundle import (
    SCHEMA_VERSION,
    Bundle,
    Latency,
    LatencyEntry,
    Machine,
    Precision,
    read_bundle,
    write_latency,
)
from serve.runtime import open_model
from serve.runtime.protocol import FloatArray
from tests.fixtures.tiny_runs import (
    tiny_image_recipe,
    tiny_label_recipe,
    tiny_pair_recipe,
    tiny_point_recipe,
    tiny_text_recipe,
    trained,
)
from tests.golden.answers import answer, rows_of
from train.recipe import Recipe

FOLDER = Path(__file__).resolve().parent / f"version-{SCHEMA_VERSION}"
QUICK = ["optim.iterations=20", "model.layers=1"]
# Rows enough to certify thresholds, and a model that has learnt something to be certain of.
CALIBRATED = ["data.rows=6400", "data.held_out=0.5", "data.longest=4", "optim.iterations=150"]
TARGET_TOKENS = 2
PROMPT, BITS, SOURCE = "the quick fox", "^ 1 0 1", "two five one"
IMAGE = [[(7 * row + 13 * column) % 256 for column in range(14)] for row in range(14)]
CLOUD = [[row, row % 3, 0.5 * (row % 5)] for row in range(9)]


@dataclasses.dataclass(frozen=True, slots=True)
class Golden:
    """What a bundle is made of, and what it is asked."""

    recipe: Callable[..., Recipe]
    settings: list[str]
    asked: Any
    precision: Precision = "fp32"
    steps: tuple[int, ...] = (1, 2)


def label_recipe(_: Path, *overrides: str) -> Recipe:
    return tiny_label_recipe(*overrides)


BUNDLES = {
    "decoder": Golden(tiny_text_recipe, ["model.conditioned=true", "model.tied=true"], PROMPT),
    "decoder-int8": Golden(
        tiny_text_recipe, ["model.width=64", "model.hidden=512"], PROMPT, "int8"
    ),
    "decoder-fixed": Golden(tiny_text_recipe, ["model.depth=discrete"], PROMPT),
    "text": Golden(label_recipe, CALIBRATED, BITS, steps=(1, 4)),
    "image": Golden(tiny_image_recipe, ["steps.method=heun"], IMAGE),
    "points": Golden(tiny_point_recipe, ["steps.method=ab2"], CLOUD),
    "chain": Golden(
        label_recipe, ["model.block=timed", "model.depth=chain", "steps.method=midpoint"], BITS
    ),
    "translator": Golden(tiny_pair_recipe, ["model.tied=true"], SOURCE),
}


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or BUNDLES:
        if not (FOLDER / name).exists():
            make(name, BUNDLES[name])


def make(name: str, golden: Golden) -> None:
    """One bundle, and NAME.json: what it was asked, what that became, and its logits."""
    with tempfile.TemporaryDirectory() as scratch:
        recipe = golden.recipe(Path(scratch), *QUICK, *golden.settings)
        run = trained(recipe, Path(scratch))
        request = ExportRequest(
            FOLDER / name, golden.steps, name=name, precision=golden.precision, latency=False
        )
        bundle = export_run(run, request)
    write_latency(bundle.folder, made_up(bundle))
    opened, rows, target = open_model(bundle), rows_of(bundle, golden.asked), begun(bundle)
    logits = {steps: answer(opened, steps, rows, target) for steps in bundle.manifest.steps}
    record = {
        "asked": golden.asked,
        "rows": rows.tolist(),
        "target": target.tolist(),
        "logits": {steps: rounded(each) for steps, each in logits.items()},
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    read_bundle(bundle.folder)


def begun(bundle: Bundle) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The beginning of a translation (1, N); of other tasks, empty."""
    first = None if bundle.manifest.tokenizer is None else bundle.manifest.tokenizer.bos_id
    tokens = [] if first is None else [first, *range(10, 10 + TARGET_TOKENS - 1)]
    return np.array([tokens], dtype=np.int64)


def made_up(bundle: Bundle) -> Latency:
    """A latency table that names no machine."""
    kinds = ("classify",) if bundle.manifest.task == "classify" else ("prefill", "decode")
    entries = [
        {"steps": steps, "kind": kind, "batch": 1, "length": 1, "median_ms": 0.5, "p95_ms": 1}
        for steps in bundle.manifest.steps
        for kind in kinds
    ]
    machine = Machine("made up", 2, 1, "onnxruntime")
    return Latency(
        machine, "2026-01-01T00:00:00+00:00", tuple(map(LatencyEntry.from_json, entries))
    )


def rounded(logits: FloatArray) -> Any:
    """As many digits as a float32 has."""
    return (
        [float(f"{each:.8g}") for each in logits] if logits.ndim == 1 else [*map(rounded, logits)]
    )


if __name__ == "__main__":
    main(sys.argv[1:])
