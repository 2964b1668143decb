"""What the benchmark of ranges says, from qualities made by hand, and from runs of seconds."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import dial_range
from benchmarks.dial_range import Measured, paired, rising, runs_of, says
from benchmarks.lab import FOLDER, Result
from tests.fixtures.tiny_runs import TINY
from train.loop import TrainingLoop, train
from train.recipe import Recipe, load_recipe
from train.tally import Quality, gain

ROWS = 400
BEST = ("run.keep=best", "run.evaluate_every=1", "optim.lr=1e-12")  # its first weights are kept


def made(
    shares: dict[int, float],
    parameters: int = 100,
    seed: int = 0,
    full: int = 8,
    drawn: str = "a",
) -> Measured:
    """A run whose rows are right up to a share of them, the same ones first."""
    rows = np.arange(ROWS) / ROWS
    per_row = {count: (rows < share).astype(np.float64) for count, share in shares.items()}
    qualities = {
        count: Quality("accuracy", share, share, share, ROWS, 0.0, 0.0)
        for count, share in shares.items()
    }
    return Measured(f"run-s{seed}", seed, parameters, full, 1, 1.0, qualities, per_row, drawn)


def found(dial: dict[int, float], **plain: tuple[float, int]) -> dict[str, str]:
    beside = {int(k[1:]): [made({1: v}, size)] for k, (v, size) in plain.items()}
    return {str(what): str(text) for what, text in says([made(dial)], beside)}


def test_a_dial_with_range() -> None:
    rows = found({1: 0.5, 2: 0.7, 4: 0.8, 8: 0.9, 16: 0.95}, p1=(0.49, 95), p4=(0.69, 380))
    assert rows["range"].startswith("+0.4000 ± ") and rows["range"].endswith("1 and 8 steps")
    assert rows["each rung"] == "strictly rising"
    assert rows["first rung beside plain of 1 block"] == "+0.0100"
    assert rows["lead at 8 steps over plain of 1 block"] == "+0.4100"
    assert rows["lead at 8 steps over 4 plain blocks"] == "+0.2100"
    assert rows["share of the lead of 4 blocks recovered"] == "2.05"
    assert rows["beyond training, 16 steps beside 8"].startswith("+0.0500")
    assert "depth helps here" in rows["what 4 plain blocks are worth over 1"]
    assert rows["parameters at equal quality"] == "100; no plain model up to 380 is as good"


def test_a_flat_dial_on_a_task_without_depth() -> None:
    rows = found({1: 0.5, 8: 0.5}, p1=(0.5, 95), p8=(0.51, 800))
    assert rows["each rung"] == "monotone; no gain beyond the interval from 1 to 8"
    assert "no dial has range here" in rows["what 8 plain blocks are worth over 1"]
    assert "100 against 95 of the smallest" in rows["parameters at equal quality"]


def test_a_rung_that_is_worse_is_named() -> None:
    assert rising([made({1: 0.5, 2: 0.7, 4: 0.6})], [1, 2, 4]).startswith("not monotone: 4 steps")


def test_intervals_are_of_paired_rows_and_of_all_seeds() -> None:
    """Rows that both get right tell nothing: half the interval of independent ones."""
    one = made({1: 0.5, 8: 0.6})
    alone = paired([one], 1, 8)
    assert alone.half == pytest.approx(1.96 * (0.1 * 0.9 / ROWS) ** 0.5, rel=0.01)
    others = [made({1: 0.5, 8: 0.6}, drawn=rows) for rows in "bcd"]
    assert paired([one, *others], 1, 8).half == pytest.approx(alone.half / 2)
    assert paired([one, made({1: 0.5, 8: 0.8})], 1, 8).better == pytest.approx(0.2)


def test_rows_that_all_seeds_were_measured_on_count_once() -> None:
    """Seeds that agree on the same rows say no more of them than one does."""
    one = made({1: 0.5, 8: 0.6})
    assert paired([one, one, one, one], 1, 8) == paired([one], 1, 8)
    both = paired([one, one, made({1: 0.5, 8: 0.6}, drawn="b")], 1, 8)
    assert both.better == pytest.approx(0.1)
    assert both.half == pytest.approx(paired([one], 1, 8).half * (4 / 9 + 1 / 9) ** 0.5)


def test_fewer_nats_are_better() -> None:
    assert gain(np.array([2.0, 2.0]), np.array([1.5, 1.5]), "loss").better == 0.5
    assert gain(np.array([0.0, 1.0]), np.array([1.0, 1.0]), "accuracy").better == 0.5


def test_it_measures_runs_and_leaves_out_unfinished_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "queue"))  # whatever trains on this machine
    (tmp_path / "queue").mkdir()
    small = [*TINY, "model.layers=1", "data.rows=60", "optim.iterations=4", "data.rounds=0"]
    for name, recipe in (
        ("tiny-s0", load_recipe("logic", small)),
        ("tiny-s1", load_recipe("logic", [*small, "run.seed=1", *BEST])),
        ("tiny-plain1-s0", load_recipe("logic-discrete", small)),
    ):
        train(recipe, tmp_path / name, quiet=True)
    longer = load_recipe("logic", [*small, "optim.iterations=8", "run.seed=2"])
    with pytest.raises(KeyboardInterrupt):
        train_until(longer, tmp_path / "tiny-s2")
    dials, plain = runs_of(tmp_path, "tiny")
    assert [path.name for path in dials] == ["tiny-s0", "tiny-s1"] and list(plain) == [1]
    assert "still in training: tiny-s2" in capsys.readouterr().err
    first, second = (dial_range.measured(path, [1]).rows for path in dials)
    assert first == second  # puzzles are the same ones for all seeds
    words = ["--runs", str(tmp_path), "--task", "tiny", "--steps", "1,2", "--results"]
    assert dial_range.main([*words, str(tmp_path / "kept")]) == 0
    kept = Result.read(tmp_path / "kept" / "dial_range_tiny.json")
    assert len(kept.tables[0].rows) == 5 and kept.tables[1].rows[0][0] == "range"
    with pytest.raises(ValueError, match="has no run other-s0"):
        dial_range.main(["--runs", str(tmp_path), "--task", "other", "--quick"])


def train_until(recipe: Recipe, folder: Path) -> None:
    """A training that is interrupted after its first checkpoint."""
    whole = TrainingLoop.iterate

    def stopping(self: TrainingLoop, iteration: int) -> dict[str, object]:
        if iteration == 4:
            raise KeyboardInterrupt
        return whole(self, iteration)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "iterate", stopping)
        train(recipe, folder, quiet=True)
