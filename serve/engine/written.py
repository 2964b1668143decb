"""What the metrics are told of the tokens that one call wrote: once for rows that are alike.

Knows labels and when a token is the first; deliberately neither text nor calls.
"""

from serve.engine.generation import Generation
from serve.engine.work import Work
from serve.metrics import Metrics
from serve.scheduler.job import Job, LaneKey


class Written:
    """The tokens of jobs of one lane, at one time."""

    def __init__(self, metrics: Metrics, now_s: float) -> None:
        self._metrics = metrics
        self._now_s = now_s
        self._lane: LaneKey | None = None
        self._tokens = 0
        self._rows_since_s: dict[float, int] = {}  # rows by the time of their token before

    def note(self, job: Job[Work], work: Generation) -> None:
        """The job has one token more."""
        self._lane = job.lane
        self._tokens += 1
        since_s = work.last_token_s
        if since_s is None:
            self._note_first(job)
        else:
            self._rows_since_s[since_s] = self._rows_since_s.get(since_s, 0) + 1
        work.last_token_s = self._now_s
        job.tokens_left -= 1

    def count(self) -> None:
        """Tell the metrics, once all jobs are noted."""
        if self._lane is None:
            return
        name, steps = self._lane.name, str(self._lane.steps)
        self._metrics.tokens.labels(name).inc(self._tokens)
        between = self._metrics.inter_token_seconds.labels(name, steps)
        for since_s, rows in self._rows_since_s.items():
            between.observe_all(self._now_s - since_s, rows)

    def _note_first(self, job: Job[Work]) -> None:
        assert job.started_s is not None
        labels = job.lane.name, str(job.lane.steps)
        job.first_token_s = self._now_s
        self._metrics.queue_seconds.labels(*labels).observe(job.started_s - job.queued_s)
        self._metrics.first_token_seconds.labels(*labels).observe(self._now_s - job.queued_s)
