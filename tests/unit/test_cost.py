"""Times of calls are learned, kept current, and not upset by a call that stalls."""

import random
import time
from collections.abc import Callable, Sequence

import pytest

from serve.bundle.manifest import Latency, LatencyEntry, Machine
from serve.engine.cost import AnswerTime, Cost, CostKey

Seconds = Callable[[int, int], float]
FULL = CostKey("classify", 8)


def cost(rows: int, length: int) -> float:
    return 0.003 + 1.2e-4 * rows * length + 3e-7 * rows * length**2


def shapes(count: int, seed: int = 0) -> list[tuple[int, int]]:
    chance = random.Random(seed)
    return [(chance.choice((1, 2, 3, 5, 8, 13, 16)), chance.randint(10, 128)) for _ in range(count)]


def p95(errors: list[float]) -> float:
    return sorted(errors)[int(0.95 * len(errors))]


def table(cost: Seconds, lengths: Sequence[int]) -> Latency:
    """What was measured beforehand."""
    points = [(rows, length) for rows in (1, 8, 32) for length in lengths]
    entries = tuple(
        LatencyEntry(8, "classify", rows, length, 1000 * cost(rows, length), 1e6)
        for rows, length in points
    )
    return Latency(Machine("cpu", 2, 2, "runtime"), "2026-01-01T00:00:00+00:00", entries)


def errors_of(model: Cost, cost: Seconds) -> list[float]:
    return [
        abs(cost(rows, length) / (model.call_s(FULL, rows, length) or 0) - 1)
        for rows, length in shapes(200)
    ]


def test_nothing_is_known_of_what_was_never_seen() -> None:
    assert Cost().call_s(FULL, 1, 10) is None


def test_predictions_are_near_on_a_machine_that_is_a_little_noisy() -> None:
    model, chance, errors = Cost(), random.Random(1), []
    for rows, length in shapes(1500):
        seconds = cost(rows, length) * chance.lognormvariate(0, 0.04)
        predicted = model.call_s(FULL, rows, length)
        if predicted is not None:
            errors.append(abs(seconds / predicted - 1))
        model.observe(FULL, rows, length, seconds)
    assert p95(errors[200:]) <= 0.15
    assert p95(errors) <= 0.25


@pytest.mark.parametrize("seed", range(10))
def test_a_shape_that_it_does_not_know_does_not_lead_it_astray(seed: int) -> None:
    # Few rows run on one thread and take longer each: no factors fit. Nothing is known before.
    model, chance, errors = Cost(), random.Random(seed), []
    for _ in range(400):
        steps, rows = chance.choice((1, 2, 4, 8)), chance.randint(1, 16)
        length = chance.randint(16, 128)
        seconds = steps * (5e-5 + 9e-6 * rows * length * (1.6 if rows < 4 else 1.0))
        cost_key = CostKey("classify", steps)
        if (predicted := model.call_s(cost_key, rows, length)) is not None:
            errors.append(abs(predicted / seconds - 1))
        for _ in range(3):
            late = 1.5 if chance.random() < 0.05 else 1.0
            noisy = seconds * chance.lognormvariate(0, 0.08) * late
            model.observe(cost_key, rows, length, noisy)
    assert p95(errors[60:]) <= 0.5


def test_a_table_is_where_it_starts() -> None:
    model = Cost()
    model.learn(table(cost, lengths=(32, 128)))
    assert p95(errors_of(model, cost)) <= 0.15
    # Another machine, three times as slow, says so with one call.
    model.rescale(FULL, 1, 128, 3 * cost(1, 128))
    assert model.call_s(FULL, 8, 64) == pytest.approx(3 * cost(8, 64), rel=0.15)


def test_a_call_that_stalls_changes_little() -> None:
    model = Cost()
    for rows, length in shapes(300):
        model.observe(FULL, rows, length, cost(rows, length))
    before = model.call_s(FULL, 8, 64)
    assert before is not None
    model.observe(FULL, 8, 64, 100 * cost(8, 64))
    after = model.call_s(FULL, 8, 64)
    assert after is not None and after <= 1.15 * before
    for rows, length in shapes(20, seed=2):
        model.observe(FULL, rows, length, cost(rows, length))
    assert model.call_s(FULL, 8, 64) == pytest.approx(cost(8, 64), rel=0.05)


def test_a_machine_that_slows_down_is_noticed_for_all_steps() -> None:
    model, one = Cost(), CostKey("classify", 1)
    for rows, length in shapes(300):
        model.observe(FULL, rows, length, cost(rows, length))
        model.observe(one, rows, length, cost(rows, length) / 8)
    for rows, length in shapes(40):
        model.observe(FULL, rows, length, 2 * cost(rows, length))
    assert model.call_s(FULL, 8, 64) == pytest.approx(2 * cost(8, 64), rel=0.15)
    assert model.call_s(one, 8, 64) == pytest.approx(2 * cost(8, 64) / 8, rel=0.3)


def test_one_shape_for_ever_does_not_spoil_the_others() -> None:
    model = Cost()
    for rows, length in shapes(300):
        model.observe(FULL, rows, length, cost(rows, length))
    chance = random.Random(4)
    for _ in range(5000):
        model.observe(FULL, 1, 20, cost(1, 20) * chance.lognormvariate(0, 0.05))
    assert model.call_s(FULL, 16, 128) == pytest.approx(cost(16, 128), rel=0.3)
    assert (model.call_s(FULL, 16, 128) or 0) > (model.call_s(FULL, 16, 64) or 0)


def test_caution_covers_most_calls() -> None:
    model, chance, late = Cost(), random.Random(1), 0
    for number, (rows, length) in enumerate(shapes(3000)):
        seconds = cost(rows, length) * chance.lognormvariate(0, 0.1)
        predicted = model.call_s(FULL, rows, length)
        if number >= 1000 and predicted is not None:
            late += seconds > predicted * model.caution
        model.observe(FULL, rows, length, seconds)
    assert late / 2000 <= 0.08


def test_the_way_of_an_answer_is_learned() -> None:
    answer, chance = AnswerTime(), random.Random(1)
    for _ in range(2000):
        answer.observe(chance.uniform(0.001, 0.011))
    assert 0.009 <= answer.seconds <= 0.016
    for _ in range(60):
        answer.lower()
    assert answer.seconds < 0.01


def test_a_prediction_costs_microseconds() -> None:
    model = Cost()
    model.observe(FULL, 8, 64, 0.05)
    begun_s = time.process_time()
    for _ in range(2000):
        model.call_s(FULL, 8, 64)
    assert (time.process_time() - begun_s) / 2000 < 50e-6


def test_what_was_slow_is_not_believed_for_ever() -> None:
    model = Cost()
    for rows, length in shapes(300):
        model.observe(FULL, rows, length, cost(rows, length))
    for rows, length in shapes(60):
        model.observe(FULL, rows, length, 5 * cost(rows, length))
    slow = model.call_s(FULL, 8, 64)
    for _ in range(60):
        model.lower_caution()
    assert slow is not None and (model.call_s(FULL, 8, 64) or slow) < slow / 2
    assert model.caution == 1.0


def test_what_runs_alone_for_long_does_not_upset_what_is_known_of_the_rest() -> None:
    decode, chance = CostKey("decode", 8), random.Random(4)
    model = Cost()

    def decode_s(rows: int) -> float:  # whatever the length
        return 0.003 + 0.001 * rows

    for rows in (1, 4, 16) * 20:
        model.observe(decode, rows, 100, decode_s(rows))
    errors = []
    for number in range(12_000):
        rows, length = (16, 60 + number % 40) if number // 2000 % 2 else (1, 20 + number % 200)
        seconds = decode_s(rows) * chance.lognormvariate(0, 0.05)
        errors.append(abs(seconds / (model.call_s(decode, rows, length) or 0) - 1))
        model.observe(decode, rows, length, seconds)
    assert p95(errors) <= 0.15
    for rows in (1, 4, 16):
        assert model.call_s(decode, rows, 100) == pytest.approx(decode_s(rows), rel=0.15)


def in_parts(rows: int, length: int) -> float:
    """What a call takes on two threads, which share four rows and more."""
    largest = rows if rows < 4 else -(-rows // 2)
    return cost(largest, length) * (1.0 if rows < 4 else 1.2)


def test_rows_that_run_in_parts_are_predicted_by_the_largest() -> None:
    model, chance, errors = Cost(2), random.Random(3), []
    for rows, length in shapes(1500):
        if (predicted := model.call_s(FULL, rows, length)) is not None:
            errors.append(abs(in_parts(rows, length) / predicted - 1))
        model.observe(FULL, rows, length, in_parts(rows, length) * chance.lognormvariate(0, 0.04))
    assert p95(errors[200:]) <= 0.1


def test_what_slows_calls_in_parts_alone_leads_no_call_far_astray() -> None:
    model, chance, errors = Cost(2), random.Random(3), []
    for number, (rows, length) in enumerate(shapes(1500)):
        slow = 1.5 if rows >= 4 and number % 400 >= 200 else 1.0  # half of a core is taken
        seconds = slow * in_parts(rows, length) * chance.lognormvariate(0, 0.02)
        errors.append(abs(seconds / (model.call_s(FULL, rows, length) or 1) - 1))
        model.observe(FULL, rows, length, seconds)
    assert p95(errors[200:]) <= 0.25


def test_a_machine_that_slows_down_is_noticed_by_whichever_calls_there_are() -> None:
    model = Cost(2)
    for rows, length in shapes(300):
        model.observe(FULL, rows, length, in_parts(rows, length))
    for _, length in shapes(100):
        model.observe(FULL, 12, length, 2 * in_parts(12, length))
    assert (model.call_s(FULL, 1, 64) or 0) > 1.1 * in_parts(1, 64)
    assert model.lasting < 0.97


def test_a_table_is_believed_but_for_the_speed_of_the_machine() -> None:
    model = Cost()
    model.learn(table(cost, lengths=(32, 64, 128)))
    for length in (40, 80, 120) * 8:  # of few rows
        model.observe(FULL, 1, length, 2 * cost(1, length))
    assert model.call_s(FULL, 16, 128) == pytest.approx(2 * cost(16, 128), rel=0.2)


def test_a_table_says_what_calls_in_parts_take() -> None:
    model = Cost(2)
    model.learn(table(in_parts, lengths=(32, 64, 128)))
    assert p95(errors_of(model, in_parts)) <= 0.15
    # Another machine, on which threads gain more: each way has its own measurement.
    model.rescale(FULL, 1, 128, 3 * in_parts(1, 128))
    model.rescale(FULL, 4, 128, 2 * in_parts(4, 128))
    assert model.call_s(FULL, 3, 64) == pytest.approx(3 * in_parts(3, 64), rel=0.15)
    assert model.call_s(FULL, 9, 64) == pytest.approx(2 * in_parts(9, 64), rel=0.15)


@pytest.mark.parametrize("seen", [2, 12])
def test_what_is_known_of_one_way_is_taken_for_the_other(seen: int) -> None:
    model = Cost(2)
    model.observe(FULL, seen, 64, in_parts(seen, 64))
    other = 12 if seen == 2 else 2
    assert model.knows(FULL)
    assert model.call_s(FULL, other, 64) == pytest.approx(in_parts(other, 64), rel=0.4)


@pytest.mark.parametrize(("late", "noise"), [(0.0, 0.3), (0.1, 0.1)])
def test_what_runs_alone_for_very_long_does_not_upset_other_steps(
    late: float, noise: float
) -> None:
    one, eight = CostKey("decode", 1), CostKey("decode", 8)
    model, chance = Cost(), random.Random(4)
    for length in range(10, 250):
        model.observe(one, 1, length, 0.001)
        model.observe(eight, 1, length, 0.008)
    for number in range(60_000):
        slow = 3 if chance.random() < late else 1
        seconds = 0.001 * slow * chance.lognormvariate(0, noise)
        model.observe(one, 1, 10 + number % 240, seconds)
        if number % 1000 == 999:
            said = model.call_s(eight, 1, 100) or 0
            assert 0.65 <= said / 0.008 <= 1.6, number


def test_a_curve_of_which_only_rounding_is_left_begins_anew() -> None:
    model = Cost()
    model.observe(FULL, 1, 20, 0.01)
    curve = model._curves[FULL]
    curve._known = (1e16,) * 6
    curve.learn(1, 20, 0.012)
    for _ in range(50):
        model.observe(FULL, 1, 20, 0.012)
    assert model.call_s(FULL, 1, 20) == pytest.approx(0.012, rel=0.05)
