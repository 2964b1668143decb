"""Figures of docs/budgets.md and docs/compared.md are those that were measured."""

import re
from pathlib import Path

from benchmarks.lab import RESULTS, Result
from serve.bundle import read_bundle

ROOT = Path(__file__).parents[2]
BUDGETS = (ROOT / "docs" / "budgets.md").read_text(encoding="utf-8")
COMPARED = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")


def test_the_models_beside_are_what_was_measured() -> None:
    (table, *_) = Result.read(RESULTS / "quality.json").tables
    found: dict[str, dict[str, str]] = {}
    for model, what, _, value, *_ in table.rows:
        found.setdefault(str(model), {})[str(what)] = str(value)
    for model, of in found.items():
        manifest = read_bundle(ROOT / "zoo" / model).manifest
        metric = manifest.rungs[0].quality.metric
        rungs = [value for what, value in of.items() if what.startswith("steps ")]
        best = (min if metric == "loss" else max)(rungs, key=float)
        cells = [of["steps 1"], best, of["discrete transformer"], of.get("bag of words", "")]
        row = " ".join(f"| {cell}".rstrip() for cell in cells)
        assert f"| {model}, {metric} {row} |" in COMPARED


def test_the_example_of_a_promise_is_in_the_bundle() -> None:
    calibration = read_bundle(ROOT / "zoo" / "topics").manifest.calibration
    assert calibration is not None
    (level,) = (each for each in calibration.levels if each.max_disagreement == 0.01)
    told = re.search(
        r"`topics` spends ([\d.]+) evaluations instead of 3, and ([\d.]+) % of the answers", BUDGETS
    )
    assert told is not None
    assert float(told[1]) == round(level.evaluations, 2)
    assert float(told[2]) == round(level.observed * 100, 2)
