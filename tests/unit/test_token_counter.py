"""What the metrics are told of tokens: rows that are alike at once, and each as if alone."""

from typing import Any

import pytest

from serve.engine.generate import count_tokens
from serve.engine.job import Job, LaneKey
from serve.engine.writing import Generation
from serve.metrics import SECONDS, Metrics

LANE = LaneKey("writer@2", "generate", 4)
LABELS = {"model": "writer", "steps": "4"}


class Text(Generation):
    """What of a generation the metrics look at."""

    def __init__(self, last_token_s: float | None) -> None:
        self.last_token_s = last_token_s


def sample(metrics: Metrics, name: str, **more: str) -> float:
    return metrics.registry.get_sample_value(f"stepdial_{name}", LABELS | more) or 0.0


def test_every_row_counts_with_the_time_since_its_own_token_before() -> None:
    metrics = Metrics()
    texts = [Text(9.98), Text(9.98), Text(9.98), Text(9.0), Text(None)]
    jobs = [Job(LANE, text, (3,), tokens_left=5) for text in texts]
    jobs[-1].queued_s, jobs[-1].started_s = 7.0, 9.5
    count_tokens(metrics, jobs, now_s=10.0)
    assert [job.tokens_left for job in jobs] == [4] * 5
    assert {text.last_token_s for text in texts} == {10.0} and jobs[-1].first_token_s == 10.0
    counted = metrics.registry.get_sample_value("stepdial_tokens_total", {"model": "writer"})
    assert counted == 5
    assert sample(metrics, "inter_token_seconds_count") == 4
    assert sample(metrics, "inter_token_seconds_sum") == pytest.approx(3 * 0.02 + 1.0)
    assert sample(metrics, "inter_token_seconds_bucket", le="0.025") == 3
    assert sample(metrics, "queue_seconds_sum") == 2.5
    assert sample(metrics, "time_to_first_token_seconds_sum") == 3.0


def test_nothing_written_is_nothing_counted() -> None:
    metrics = Metrics()
    count_tokens(metrics, [], now_s=1.0)
    assert sample(metrics, "inter_token_seconds_count") == 0


@pytest.mark.parametrize("amount", [0.0, SECONDS[0], 0.003, SECONDS[-1], 100.0])
def test_a_value_is_in_the_buckets_that_reach_it(amount: float) -> None:
    times: Any = Metrics().request_seconds.labels("/", "m", "1")
    times.observe(amount)
    found = {one.labels["le"]: one.value for one in times._child_samples() if one.labels}
    assert found == {
        "+Inf" if bound == float("inf") else str(bound): float(amount <= bound)
        for bound in (*SECONDS, float("inf"))
    }
