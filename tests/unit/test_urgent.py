"""Of the generations that wait next, those that are late first: kept, and never out of date."""

import random
from typing import cast

from serve.engine.generate import GenerateLane
from serve.engine.job import Deadline, Job, LaneKey, Work
from serve.runtime import Batches

KEY = LaneKey("m", "generate", 2)
MAX_ROWS = 4


def job(chance: random.Random) -> Job:
    deadline = Deadline(0.0, float(chance.randint(1, 9))) if chance.random() < 0.7 else None
    return Job(KEY, Work(), (5,), 20, deadline=deadline, tokens_left=chance.randint(1, 9))


def latest_s(jobs: list[Job], token_s: float) -> float:
    return max((one.tokens_left * token_s - one.ends_s for one in jobs), default=0.0)


def test_no_other_of_the_next_ones_is_later_whatever_a_token_takes() -> None:
    chance, fewer = random.Random(0), 0
    lane = GenerateLane(KEY, 1, MAX_ROWS, cast(Batches, None))
    for _ in range(2000):
        what = chance.random()
        if what < 0.5 and len(lane.waiting) < 3 * MAX_ROWS:
            lane.add(job(chance))
        elif lane.waiting and what < 0.8:
            lane.take()
        elif lane.waiting:
            lane.drop(chance.choice(lane.waiting))
        due = [one for one in list(lane.waiting)[:MAX_ROWS] if one.deadline is not None]
        assert lane.next_due == due
        assert set(lane.urgent) <= set(due)
        fewer += len(lane.urgent) < len(due)
        for token_s in (0.0, 0.1, 1.0, 10.0):
            assert latest_s(lane.urgent, token_s) == latest_s(due, token_s)
    assert fewer > 200
