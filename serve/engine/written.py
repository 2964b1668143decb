"""What the metrics are told of the tokens that one call wrote: once for rows that are alike.

Knows labels and when a token is the first; deliberately neither text nor calls.
"""

from collections import Counter

from serve.engine.generation import Generation
from serve.engine.work import Work
from serve.metrics import Metrics
from serve.scheduler.job import Job, LaneKey


class Written:
    """The tokens of some jobs, at one time."""

    def __init__(self, metrics: Metrics, now_s: float) -> None:
        self._metrics = metrics
        self._now_s = now_s
        # Rows by their lane and the time of the token before; None: this is the first one.
        self._rows: Counter[tuple[LaneKey, float | None]] = Counter()

    def note(self, job: Job[Work], work: Generation) -> None:
        """The job has one token more."""
        self._rows[job.lane, work.last_token_s] += 1
        if work.last_token_s is None:
            self._note_first(job)
        work.last_token_s = self._now_s
        job.tokens_left -= 1

    def count(self) -> None:
        """Tell the metrics, once all jobs are noted."""
        for (lane, since_s), rows in self._rows.items():
            self._metrics.tokens.labels(lane.name).inc(rows)
            if since_s is not None:
                between = self._metrics.inter_token_seconds.labels(lane.name, str(lane.steps))
                between.observe_all(self._now_s - since_s, rows)

    def _note_first(self, job: Job[Work]) -> None:
        assert job.started_s is not None
        labels = job.lane.name, str(job.lane.steps)
        job.first_token_s = self._now_s
        self._metrics.queue_seconds.labels(*labels).observe(job.started_s - job.queued_s)
        self._metrics.first_token_seconds.labels(*labels).observe(self._now_s - job.queued_s)
