"""Certified early answers: the exact bound, the policy, and the promise, kept on fresh data."""

import dataclasses
import math
from fractions import Fraction
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from export.early import CONFIDENCE, LEVELS, MIN_ROWS, THRESHOLDS, Jumps, certify, most_differing
from serve.bundle import BundleError, Calibration, Level

Logits = npt.NDArray[np.float32]
CLASSES = 3


def test_the_bound_is_the_exact_one() -> None:
    """Counted in whole numbers: the most that pass is the last that is rare enough."""
    for rows, share in ((50, Fraction(1, 20)), (300, Fraction(1, 50)), (90, Fraction(1, 2))):
        most, tail = -1, Fraction(0)
        for count in range(rows + 1):
            tail += math.comb(rows, count) * share**count * (1 - share) ** (rows - count)
            if tail > 1 - Fraction(CONFIDENCE):
                break
            most = count
        assert most_differing(rows, float(share)) == most
    assert most_differing(50, 0.05) == -1  # even no error at all proves too little
    assert most_differing(MIN_ROWS, LEVELS[0]) >= 0


def test_thresholds_are_few_fixed_and_fall_from_never_to_always() -> None:
    assert sorted(set(THRESHOLDS), reverse=True) == list(THRESHOLDS)
    assert THRESHOLDS[0] >= 64 and THRESHOLDS[-1] == 0 and len(THRESHOLDS) < 1000


def population(rows: int, seed: int) -> Logits:
    """Jumps of 4 evaluations (M, R, C) whose early answers are wrong the more, the less sure."""
    draw = np.random.default_rng(seed)
    full = draw.normal(0, 2, (rows, CLASSES))
    noise = draw.normal(0, 1, (3, rows, CLASSES)) * np.array([0.8, 0.5, 0.2])[:, None, None]
    return np.concatenate([full + noise, full[None]]).astype(np.float32)


def given(jumps: Logits, threshold: float) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The policy, row by row as a server would run it: answers (R,), evaluations (R,)."""
    top = np.sort(jumps, axis=-1)
    margins, labels = top[..., -1] - top[..., -2], jumps.argmax(-1)
    answers, spent = labels[-1].copy(), np.full(jumps.shape[1], len(jumps))
    for place in reversed(range(len(jumps) - 1)):
        stops = margins[place] >= threshold
        answers[stops], spent[stops] = labels[place][stops], place + 1
    return answers, spent


def certified(jumps: Logits) -> Calibration:
    calibration = certify([Jumps(jumps)], "a test", say=pytest.fail)
    assert calibration is not None
    return calibration


def test_the_promise_is_kept_on_fresh_data() -> None:
    """Over many draws of calibration rows, at most about 5 % certify too loose a threshold."""
    everyone = population(40_000, seed=1)
    truth = everyone[-1].argmax(-1)

    @cache
    def share(threshold: float) -> float:
        return float((given(everyone, threshold)[0] != truth).mean())

    draw, draws = np.random.default_rng(2), 200
    broken, usable = dict.fromkeys(LEVELS, 0), dict.fromkeys(LEVELS, 0)
    for _ in range(draws):
        rows = draw.integers(0, everyone.shape[1], MIN_ROWS)
        for level in certified(everyone[:, rows]).levels:
            assert level.threshold is not None
            broken[level.max_disagreement] += share(level.threshold) > level.max_disagreement
            usable[level.max_disagreement] += level.evaluations < 3.5
    allowed = draws * 0.05 + 3 * math.sqrt(draws * 0.05 * 0.95)
    assert max(broken.values()) <= allowed
    assert min(usable.values()) > 0.9 * draws  # and not by never stopping
    assert max(broken.values()) > 0  # the bound is a bound, not a wall: the test can tell


def test_levels_say_what_the_policy_does_on_the_rows() -> None:
    jumps = population(MIN_ROWS, seed=3)
    calibration = certified(jumps)
    assert calibration.rows == MIN_ROWS and calibration.confidence == CONFIDENCE
    assert [level.max_disagreement for level in calibration.levels] == list(LEVELS)
    for level in calibration.levels:
        assert level.threshold is not None
        answers, spent = given(jumps, level.threshold)
        assert level.observed == (answers != jumps[-1].argmax(-1)).mean()
        assert level.evaluations == pytest.approx(spent.mean())
        assert level.observed < level.max_disagreement
    evaluations = [level.evaluations for level in calibration.levels]
    assert evaluations == sorted(evaluations, reverse=True) and evaluations[-1] < evaluations[0]


def test_batches_make_no_difference() -> None:
    jumps = population(MIN_ROWS, seed=4)
    pieces = certify(map(Jumps, np.array_split(jumps, 7, axis=1)), "a test")
    assert pieces == certified(jumps)


def test_answers_that_never_change_stop_at_once_even_tied() -> None:
    same = np.broadcast_to(population(MIN_ROWS, seed=5)[-1], (4, MIN_ROWS, CLASSES)).copy()
    same[:, :100] = 1.0  # ties: the first class every time, with no margin at all
    for level in certified(same).levels:
        assert level == Level(level.max_disagreement, 0.0, 1.0, 0.0)


def test_answers_that_always_change_are_never_given_early() -> None:
    jumps = np.zeros((4, MIN_ROWS, CLASSES), np.float32)
    jumps[:3, :, 0], jumps[3, :, 1] = 100.0, 100.0  # sure, and wrong
    for level in certified(jumps).levels:
        assert level == Level(level.max_disagreement, None, 4.0, 0.0)


def test_logits_that_are_no_numbers_never_stop_a_row() -> None:
    jumps = population(MIN_ROWS, seed=6)
    jumps[0, :, 0], jumps[1, :] = np.nan, np.inf
    jumps[2] = jumps[3]
    for level in certified(jumps).levels:
        assert level.threshold == 0.0 and level.evaluations == 3.0 and level.observed == 0.0


def test_one_evaluation_is_the_full_answer() -> None:
    assert certified(population(MIN_ROWS, seed=7)[-1:]).levels[0].evaluations == 1.0


def test_a_row_of_positions_is_as_sure_as_the_least_of_them_and_differs_where_any_does() -> None:
    cells = np.stack([population(MIN_ROWS, seed=seed) for seed in (11, 12, 13)], axis=2)
    present = np.random.default_rng(5).random((MIN_ROWS, 3)) < 0.7
    present[:, 0] = True
    calibration = certify([Jumps(cells, present)], "a test", say=pytest.fail)
    assert calibration is not None
    top = np.sort(cells, axis=-1)  # (M, R, 3, C)
    margins = np.where(present, top[..., -1] - top[..., -2], np.inf).min(-1)  # (M, R)
    labels = np.where(present, cells.argmax(-1), -1)
    for level in calibration.levels:
        if level.threshold is None:
            continue
        sure = margins >= np.float32(level.threshold)
        sure[-1] = True
        first = sure.argmax(0)
        answered = labels[first, np.arange(MIN_ROWS)]  # (R, 3)
        assert level.observed == (answered != labels[-1]).any(-1).mean()
        assert level.evaluations == pytest.approx(1 + first.mean())
    assert any(level.threshold is not None for level in calibration.levels)


def test_with_endings_going_on_costs_two_evaluations_and_must_be_worth_it() -> None:
    jumps = population(MIN_ROWS, seed=3)
    full = len(jumps)
    with_endings = certify([Jumps(jumps)], "a test", say=pytest.fail, endings=True)
    assert with_endings is not None
    kinds = set()
    for level, before in zip(with_endings.levels, certified(jumps).levels, strict=True):
        spent = 2 * before.evaluations - 1  # of the same threshold
        kinds.add(spent <= full)
        if spent <= full:
            assert level.threshold == before.threshold
            assert level.evaluations == pytest.approx(spent)
        else:
            assert level.threshold is None and level.evaluations == full
    assert kinds == {True, False}


@pytest.mark.parametrize("rows", [0, MIN_ROWS - 1])
def test_too_few_rows_certify_nothing_and_say_so(rows: int) -> None:
    said: list[str] = []
    batches = [Jumps(population(rows, seed=8))] if rows else []
    assert certify(batches, "a test", said.append) is None
    assert f"there are {rows:,}" in said[0] and f"{MIN_ROWS:,}" in said[0]


def test_a_calibration_survives_its_json() -> None:
    calibration = certified(population(MIN_ROWS, seed=9))
    value = {
        **dataclasses.asdict(calibration),
        "levels": [dataclasses.asdict(level) for level in calibration.levels],
    }
    assert Calibration.from_json(value) == calibration


STRICT = {"max_disagreement": 0.01, "threshold": 3.0, "evaluations": 2.5, "observed": 0.004}
LOOSE = {"max_disagreement": 0.05, "threshold": 1.0, "evaluations": 1.5, "observed": 0.03}


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"rows": 0}, "rows", "at least 1"),
        ({"confidence": 1.0}, "confidence", "must be at most"),
        ({"source": ""}, "source", "at least 1 character"),
        ({"levels": []}, "levels", "at least 1 item"),
        ({"levels": [STRICT] * 17}, "levels", "at most 16"),
        ({"levels": [LOOSE, STRICT]}, "levels[1].max_disagreement", "strict to loose"),
        ({"levels": [STRICT, STRICT]}, "levels[1].max_disagreement", "each once"),
        ({"levels": [STRICT, LOOSE | {"threshold": 4.0}]}, "levels[1].threshold", "asks more"),
        ({"levels": [STRICT, LOOSE | {"threshold": None}]}, "levels[1].threshold", "asks more"),
        ({"levels": [STRICT | {"threshold": -1.0}]}, "levels[0].threshold", "at least 0"),
        ({"levels": [STRICT | {"threshold": "3"}]}, "levels[0].threshold", "a number"),
        (
            {"levels": [STRICT | {"max_disagreement": 0.0}]},
            "levels[0].max_disagreement",
            "at least",
        ),
        ({"levels": [STRICT | {"max_disagreement": 1}]}, "levels[0].max_disagreement", "at most"),
        ({"levels": [STRICT | {"evaluations": 0.5}]}, "levels[0].evaluations", "at least 1"),
        ({"levels": [STRICT | {"observed": 0.02}]}, "levels[0].observed", "above max_dis"),
        ({"levels": [{"max_disagreement": 0.01}]}, "levels[0].threshold", "missing"),
        ({"levels": {}}, "levels", "a list"),
        ({"extra": 1}, "extra", "not a known key"),
    ],
)
def test_a_malformed_calibration_names_its_field(
    change: dict[str, object], field: str, words: str
) -> None:
    good = {"rows": 4000, "confidence": 0.95, "source": "held-out", "levels": [STRICT, LOOSE]}
    assert Calibration.from_json(good).levels[1].threshold == 1.0
    with pytest.raises(BundleError, match=words) as raised:
        Calibration.from_json(good | change)
    assert raised.value.field == field
