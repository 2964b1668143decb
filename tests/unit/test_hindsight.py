"""What hindsight says of calls: nothing is left of what the others tell, and chance stays."""

import random

from benchmarks.hindsight import TimedCall, errors


def _calls(noise: float) -> list[TimedCall]:
    """Of two rungs, on a machine of two speeds, where odd rows take longer."""
    chance, calls, now_s = random.Random(1), [], 0.0
    for _ in range(600):
        steps, rows, length = chance.choice((1, 4)), chance.randint(1, 16), chance.randint(16, 128)
        largest = rows if rows < 4 else -(-rows // 2)
        seconds = steps * (1e-3 + 1e-4 * largest * length + 1e-7 * largest * length**2)
        seconds *= 1.5 if rows >= 4 and now_s % 10 > 5 else 1.0
        seconds *= 1.1 if rows % 2 else 1.0
        seconds *= chance.lognormvariate(0, noise)
        calls.append(TimedCall(steps, rows, length, now_s, seconds))
        now_s += seconds
    return calls


def _p95(found: list[float]) -> float:
    return sorted(found)[int(0.95 * len(found))]


def test_all_that_other_calls_tell_is_known() -> None:
    assert _p95(errors(_calls(noise=0.0), most_parts=2)) <= 0.06


def test_chance_is_left() -> None:
    found = errors(_calls(noise=0.1), most_parts=2)
    assert len(found) == 600
    assert 0.15 <= _p95(found) <= 0.25  # 1.96 of 0.1, and what the speed of the moment misses


def test_a_few_calls_are_enough_to_be_asked() -> None:
    assert len(errors(_calls(noise=0.1)[:3], most_parts=2)) == 3
