"""A job, and the rest of what the engine plans with: lanes, limits, deadlines and events.

Plain values, so that planning runs in a simulator.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple, Protocol

from serve.errors import ServeError

Kind = Literal["classify", "generate", "search"]
CallKind = Literal["classify", "prefill", "decode", "search"]


class LaneKey(NamedTuple):
    """Work that may share a batch: one rung of a model, or rows whose steps are chosen late.

    A tuple, since lanes are looked up for every request and every call.
    """

    model: str  # its key
    kind: Kind
    steps: int
    threshold: float | None = None  # classifications: margin of an early answer
    late: bool = False  # classifications: `steps` are the most; a batch may get fewer
    traced: bool = False  # classifications: the readout after each step is wanted too
    embeds: bool = False  # classifications: the pooled state is wanted, not labels

    @property
    def name(self) -> str:
        """The model's name, as clients and metrics know it."""
        return self.model.partition("@")[0]


Turn = tuple[LaneKey, CallKind]


@dataclass(frozen=True, slots=True)
class Deadline:
    """When the whole answer must have left."""

    arrived_s: float
    given_s: float

    @property
    def ends_s(self) -> float:
        return self.arrived_s + self.given_s


class State(Enum):
    """The state of a job. A job ends exactly once."""

    QUEUED = "queued"  # nothing of it has run
    RUNNING = "running"
    ENDED = "ended"


class Work:
    """What a job computes: a classification, a generation or a beam search."""

    deliver: "Deliver"


class Lane(Protocol):
    """A queue of jobs that may share a batch."""

    def add(self, job: "Job") -> None:
        """Put a job at the end of the queue."""
        ...

    def drop(self, job: "Job") -> None:
        """The job is ending. What of it runs leaves at the next plan."""
        ...

    def busy(self) -> Sequence[CallKind]:
        """The kinds of calls that there is work for, now or once there is room."""
        ...


@dataclass(slots=True, eq=False)
class Job:
    """One request in the engine; of several texts to generate, one of them. A row is a job."""

    lane: LaneKey
    work: Work
    lengths: tuple[int, ...]  # tokens of each row; a generation has one row, its prompt
    positions: int = 0  # the most cached positions of a generation or search
    window: int = 0  # positions at which a generation's cache is full; 0: never
    may_pad: bool = True  # whether rows may be padded to the length of others
    deadline: Deadline | None = None
    choices: tuple[int, ...] = ()  # steps that a batch of a late lane may get, ascending
    tokens_left: int = 0  # that a generation or search may still make
    beams: int = 1  # of a search: the rows of its calls
    admitted: bool = False  # admission has checked it when its steps were chosen
    state: State = State.QUEUED
    request_id: str = ""  # for logs
    number: int = -1  # order of arrival
    queue: Lane | None = None  # that it is in
    queued_s: float = 0.0
    started_s: float | None = None
    first_token_s: float | None = None
    most_tokens: int = field(init=False)  # tokens_left at first
    rows_left: int = field(init=False)
    ends_s: float = field(init=False)  # the deadline; inf without one

    def __post_init__(self) -> None:
        self.most_tokens = self.tokens_left
        self.rows_left = len(self.lengths)
        self.ends_s = math.inf if self.deadline is None else self.deadline.ends_s

    def span(self, now_s: float) -> "Span":
        """When the job waited and ran."""
        assert self.started_s is not None
        return Span(self.queued_s, self.started_s, now_s)


def request_ids(jobs: Iterable[Job]) -> list[str]:
    """The ids of the requests of these jobs, each once."""
    return list(dict.fromkeys(job.request_id for job in jobs if job.request_id))


def in_requests(ids: list[str]) -> str:
    """The ids as part of a log message."""
    return f" in request {', '.join(ids)}" if ids else ""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of queue, batches and cache; the settings say which are possible."""

    queue_requests: int = 256
    batch_rows: int = 16
    batch_tokens: int = 8192  # rows times the longest, in one classify call
    decode_rows: int = 16
    cache_bytes: int = 128 * 2**20
    speculate: bool = True  # whether a row that decodes alone may
    max_wait_s: float = 0.0  # how long a classification may wait for others to join its batch
    queue_wait_s: float = math.inf  # the longest predicted wait of a new request
    degrade_wait_s: float | None = None  # predicted wait at which steps are cut; None: never


@dataclass(slots=True)
class Unread:
    """How many requests are not in a lane yet, because their input is still to be parsed."""

    waiting: int = 0
    running: int = 0
    wait_s: Callable[[], float] = lambda: 0.0  # until all of them are parsed


class Waiting(deque[Job]):
    """Jobs that wait, oldest first, and the tokens that they have to prefill and to generate."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt_tokens = self.tokens = 0

    def add(self, job: Job) -> None:
        """Put a job at the end of the queue."""
        self.append(job)
        self.prompt_tokens += job.lengths[0]
        self.tokens += job.tokens_left

    def take(self, job: Job) -> Job:
        """Take a job off the queue."""
        self.remove(job)
        self.prompt_tokens -= job.lengths[0]
        self.tokens -= job.tokens_left
        return job


_MOST_ENDED = 64  # deadlines of ended jobs that are kept, besides as many as there are jobs


class Jobs:
    """The jobs that have not ended, and their deadlines. Call with the engine's lock held."""

    def __init__(self) -> None:
        self.queued = 0
        self.ended = False  # whether a job has ended since somebody last looked
        self._live: dict[int, Job] = {}  # by number, so oldest first
        # A heap of deadlines and numbers, some of jobs that have ended.
        self._deadlines: list[tuple[float, int]] = []
        self._arrivals = 0

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._live.values()))

    @property
    def running(self) -> int:
        """Jobs of which some part has run."""
        return len(self._live) - self.queued

    @property
    def idle(self) -> bool:
        return not self._live

    def of_model(self, model: str) -> bool:
        """Whether there are jobs of this model."""
        return any(job.lane.model == model for job in self._live.values())

    def add(self, job: Job, queue: Lane, now_s: float) -> None:
        assert job.state is State.QUEUED and job.lengths
        job.number, job.queued_s, job.queue = self._arrivals, now_s, queue
        self._arrivals += 1
        self._live[job.number] = job
        if job.deadline is not None:
            heappush(self._deadlines, (job.deadline.ends_s, job.number))
            if len(self._deadlines) > _MOST_ENDED + 2 * len(self._live):
                self._deadlines = [one for one in self._deadlines if one[1] in self._live]
                heapify(self._deadlines)
        self.queued += 1
        queue.add(job)

    def start(self, job: Job, now_s: float) -> None:
        """A part of the job runs now."""
        if job.state is State.QUEUED:
            job.state, job.started_s = State.RUNNING, now_s
            self.queued -= 1

    def end(self, job: Job) -> bool:
        """The job is over, for whatever reason; False if it was before."""
        if job.state is State.ENDED:
            return False
        del self._live[job.number]
        if job.state is State.QUEUED:
            self.queued -= 1
        assert job.queue is not None
        job.queue.drop(job)
        job.state, job.queue, self.ended = State.ENDED, None, True
        return True

    @property
    def next_deadline_s(self) -> float | None:
        """The next deadline; its job may have ended."""
        return self._deadlines[0][0] if self._deadlines else None

    def passed(self, now_s: float) -> list[Job]:
        """Jobs whose deadline has passed and that have not ended; each is returned once."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            job = self._live.get(heappop(self._deadlines)[1])
            if job is not None:
                late.append(job)
        return late


# Events. Those of every request are tuples, which are made several times faster than frozen
# dataclasses.


FinishReason = Literal["stop", "length"]


class Span(NamedTuple):
    """When the work of a request ran, on the engine's clock."""

    queued_s: float
    started_s: float
    ended_s: float

    @classmethod
    def over(cls, spans: Iterable["Span"]) -> "Span":
        """From the first queued to the last ended."""
        queued_s, started_s, ended_s = zip(*spans, strict=True)
        return cls(min(queued_s), min(started_s), max(ended_s))

    @property
    def queue_ms(self) -> float:
        return (self.started_s - self.queued_s) * 1000

    @property
    def compute_ms(self) -> float:
        return (self.ended_s - self.started_s) * 1000


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """The log-probability of a token under the model, and of the most likely ones."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]
    offset: int  # where its text begins in the answer, in characters


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One more token. Its text may come with a later one: see TextStream and StopFilter."""

    index: int
    text: str
    logprob: ScoredToken | None = None


@dataclass(frozen=True, slots=True)
class GeneratedEvent:
    """The end of a generation."""

    finish_reason: FinishReason
    text: str
    completion_tokens: int
    logprobs: tuple[ScoredToken, ...]
    span: Span


Scores = tuple[float, ...]  # the probability of every label; or the numbers of an embedding


@dataclass(frozen=True, slots=True)
class Tags:
    """The likeliest label of each position of a row, by number, and its probability."""

    labels: tuple[int, ...]
    scores: Scores


class Labelled(NamedTuple):
    """The answer to a row: label scores, or a label for each position."""

    found: Scores | Tags
    readouts: tuple[Scores | Tags, ...] = ()  # after each step, if asked for


class Spent(NamedTuple):
    """What the answer to a row took."""

    steps: int
    evaluations: int  # of velocities


class ClassifiedEvent(NamedTuple):
    """The end of a classification."""

    rows: tuple[Labelled, ...]
    steps: tuple[int, ...]  # of the rung that each row ran on
    spent: tuple[Spent, ...]  # by each row, which may be early
    span: Span


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """The end of a request that failed."""

    error: ServeError


Event = TokenEvent | GeneratedEvent | ClassifiedEvent | FailedEvent
Deliver = Callable[[Event], None]
Deliveries = list[tuple[Deliver, Event]]
