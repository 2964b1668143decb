"""Each request and each call counts once, whatever names clients give and however many share it."""

import pytest

from serve.engine.job import Deadline, Job
from tests.generation_jobs import FOUR, ONE, TWO, decoded, engine, generate, started
from tests.stepped import SteppedEngine, generation


def counted(s: SteppedEngine, name: str) -> float:
    return s.metrics.registry.get_sample_value(f"stepdial_{name}_total", {"model": "g"}) or 0.0


def text(deadline: Deadline, request_id: str) -> Job:
    job = generation(FOUR, 5, 10, lambda event: None, deadline=deadline)
    job.request_id = request_id
    return job


def test_requests_whose_clients_chose_the_same_id_lapse_each_for_itself() -> None:
    s = engine()
    for _ in range(3):
        s.submit(text(Deadline(0.0, 1.0), "same"))
    both = Deadline(0.0, 1.0)
    s.submit(text(both, "two texts"), text(both, "two texts"))
    s.now_s = 2.0
    s.step()
    assert s.jobs() == []
    assert counted(s, "deadlines") == counted(s, "lapsed") == 4


def test_a_call_that_step_counts_share_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    s = engine(most_lanes=3)
    jobs = [generate("a", lane=ONE), generate("b", lane=TWO), generate("c", lane=FOUR)]
    started(s, *jobs)

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("tests.stepped.CountedMix.advance", fail)
    call = decoded(s)
    assert len(call.what) == 3 and s.jobs() == []
    assert counted(s, "runtime_failures") == 1


def test_a_call_that_step_counts_share_is_a_step_of_each_row() -> None:
    s = engine(most_lanes=3)
    started(s, generate("a", lane=ONE), generate("b", lane=TWO), generate("c", lane=FOUR))
    labels = {"model": "g", "kind": "decode"}

    def steps() -> float:
        return s.metrics.registry.get_sample_value("stepdial_steps_total", labels) or 0.0

    before = steps()
    assert len(decoded(s).what) == 3
    assert steps() == before + 3
