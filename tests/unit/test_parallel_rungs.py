"""The scheduler's calls for rungs that run in parallel, each on a thread of its own."""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest

from serve.engine.generate import DecodePart
from serve.engine.job import Job, LaneKey
from tests.generation_jobs import (
    EIGHT,
    FOUR,
    ONE,
    TWO,
    decoded,
    decoded_parts,
    engine,
    generate,
    started,
)
from tests.stepped import SteppedEngine, parts

LADDER = (ONE, TWO, FOUR, EIGHT)
Parts = Sequence[DecodePart]


def parallel(sides: int, rows: dict[LaneKey, int]) -> SteppedEngine:
    s = engine(most_lanes=8, sides=sides)
    for key, count in rows.items():
        started(s, *(generate(f"{key.steps}.{row}", lane=key) for row in range(count)))
    s.share("g", "parallel")
    return s


def spent(found: Parts) -> list[int]:
    """The calls of each side."""
    sides: Counter[int] = Counter()
    for part in found:
        sides[part.side] += part.calls
    return sorted(sides.values())


def test_all_sides_are_busy_and_each_rung_gets_its_tokens() -> None:
    s = parallel(2, dict.fromkeys(LADDER, 4))
    tokens: Counter[int] = Counter()
    calls = [decoded(s).what for _ in range(320)]
    for call in calls:
        assert call.parallel and call.contended
        tokens.update(part.lane.key.steps for part in call.parts if part.ends)
    longest = sum(max(spent(call.parts)) for call in calls)
    both = sum(sum(spent(call.parts)) for call in calls)
    assert both >= 1.9 * longest
    assert tokens[8] * 8 >= 0.6 * longest, "the longest rung is not left behind"
    for steps in (1, 2, 4):
        assert tokens[steps] == pytest.approx(tokens[8] * (8 / steps) ** (1 / 3), rel=0.07)


def test_a_rung_is_once_in_a_call_and_its_token_goes_on_with_the_same_rows() -> None:
    s = parallel(3, {ONE: 2, FOUR: 1, EIGHT: 3})
    while any(part.begins and not part.ends for part in decoded_parts(s)):
        pass
    under_way: dict[LaneKey, tuple[int, tuple[Job, ...]]] = {}
    for number in range(60):
        if number == 20:
            s.submit(generate("new", lane=FOUR))
        call = s.step()
        if call is None or call.kind != "decode":
            continue
        assert len({part.lane for part in parts(call)}) == len(parts(call))
        for part in parts(call):
            key = part.lane.key
            if not part.begins and key not in under_way:
                continue  # it was begun where calls were shared
            done, rows = under_way.pop(key, (0, part.jobs))
            assert part.begins == (done == 0) and (done == 0 or rows == part.jobs)
            done += part.calls
            assert part.ends == (done == key.steps)
            if not part.ends:
                under_way[key] = done, part.jobs
    assert len(s.rows(FOUR)) == 2


@pytest.mark.parametrize("sides", [2, 3, 5])
def test_sides_cost_alike_however_many_rows_a_rung_has(sides: int) -> None:
    chance = random.Random(sides)
    for _ in range(20):
        rows = {key: chance.randint(1, 4) for key in chance.sample(LADDER, chance.randint(2, 4))}
        s = parallel(sides, rows)
        most = max(1, max(key.steps for key in rows) // 2)
        bound = max(min(most, key.steps) * (count + 1) for key, count in rows.items())
        seen: defaultdict[LaneKey, int] = defaultdict(int)
        for _ in range(40):
            found = decoded_parts(s)
            assert 2 <= len({part.side for part in found}) <= min(sides, len(rows))
            costs: Counter[int] = Counter()
            for part in found:
                costs[part.side] += part.calls * (len(part.jobs) + 1)
                seen[part.lane.key] += part.ends
            assert max(costs.values()) <= bound
        assert set(seen) == set(rows) and min(seen.values()) >= 1, "none starves"


def test_a_rung_that_is_left_alone_gets_whole_tokens_again() -> None:
    s = parallel(2, {ONE: 1, EIGHT: 1})
    (short,) = s.rows(ONE)
    s.cancel(short)
    last = [decoded(s).what for _ in range(12)]
    assert not last[-1].parallel and last[-1].parts[0].whole


def test_a_new_row_of_one_step_starts_at_once_among_longer_ones() -> None:
    s = parallel(2, {FOUR: 4, EIGHT: 4})
    new = generate("n", lane=ONE)
    s.submit(new)
    calls = 0
    while new not in s.rows(ONE):
        s.step()
        calls += 1
    assert calls <= 3


def test_what_fills_a_free_side_is_not_held_against_a_rung() -> None:
    s = parallel(2, {EIGHT: 4, FOUR: 4})
    for _ in range(300):
        decoded(s)
    s.share("g", "shared")
    waited = 0
    while all(part.lane.key != FOUR for part in decoded_parts(s)):
        waited += 1
    assert waited <= 16
