"""Each request and each call counts once, whatever names clients give and however many share it."""

from serve.engine.job import Deadline, Job
from tests.generation_jobs import FOUR, engine
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
