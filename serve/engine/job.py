"""A job: what the engine plans with. Also its limits, its deadline, its calls and its events.

Plain values, so that planning runs in a simulator.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import Generic, Literal, NamedTuple, TypeVar

from serve.bundle.manifest import model_name
from serve.errors import ServeError

WorkT = TypeVar("WorkT")

Kind = Literal["classify", "generate", "search"]
CallKind = Literal["classify", "prefill", "decode", "search"]
# How rungs of one model decode at the same time: all in one call, each on a thread of its own, or a
# token of one after a token of another.
Sharing = Literal["together", "abreast", "turns"]


class LaneKey(NamedTuple):
    """Work that may share a batch: one rung of one model, or rows whose steps are chosen late.

    A tuple, since lanes are looked up by it for every request and every call.
    """

    model: str  # its key
    kind: Kind
    steps: int
    threshold: float | None = None  # of a classification: how sure an early answer must be
    late: bool = False  # of a classification: steps are the most; a batch may get fewer
    traced: bool = False  # of a classification: what each step reads out is wanted too

    @property
    def name(self) -> str:
        """The model's name: what people and metrics call it."""
        return model_name(self.model)


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
    """Where a job stands. A job ends exactly once."""

    QUEUED = "queued"  # no part of it has run
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Job(Generic[WorkT]):
    """One request in the scheduler."""

    lane: LaneKey
    work: WorkT
    lengths: tuple[int, ...]  # tokens of each row; a generation has one row, its prompt
    positions: int = 0  # the most positions that are held in memory for a generation or search
    may_pad: bool = True  # whether a row may be padded to the length of others
    deadline: Deadline | None = None
    choices: tuple[int, ...] = ()  # steps that a batch of a late lane may get, ascending
    tokens_left: int = 0  # that a generation or a search may still write
    beams: int = 1  # of a search: the rows of its calls
    admitted: bool = False  # it was looked at when the server chose its steps, just now
    state: State = State.QUEUED
    request_id: str = ""  # for logs
    number: int = -1  # order of arrival, given by the scheduler
    queued_s: float = 0.0
    started_s: float | None = None
    first_token_s: float | None = None
    most_tokens: int = field(init=False)  # that were to be written at first
    rows_left: int = field(init=False)
    ends_s: float = field(init=False)  # its deadline, if it has one

    def __post_init__(self) -> None:
        self.most_tokens = self.tokens_left
        self.rows_left = len(self.lengths)
        self.ends_s = math.inf if self.deadline is None else self.deadline.ends_s


@dataclass(frozen=True, slots=True)
class ClassifyCall(Generic[WorkT]):
    """Run these rows together: (job, index of the row within the job)."""

    lane: LaneKey
    rows: tuple[tuple[Job[WorkT], int], ...]
    steps: int
    seconds: float  # predicted

    @property
    def length(self) -> int:
        """The length to which all rows are padded."""
        return max(job.lengths[row] for job, row in self.rows)

    @property
    def rung(self) -> LaneKey:
        """What the rows run on."""
        return self.lane._replace(steps=self.steps, late=False)


@dataclass(frozen=True, slots=True)
class PrefillCall(Generic[WorkT]):
    """Forget the reading of jobs that are over, then read a piece of the job's prompt, if any."""

    lane: LaneKey
    over: tuple[int, ...]  # numbers of jobs
    job: Job[WorkT] | None


class DecodePart(NamedTuple, Generic[WorkT]):
    """Remove `evict` in order, append those that join, then take the rows further, if any are.

    From the beginning of a token to its end there are no changes: a part that neither begins nor
    ends is a step between. `lost`: drop the batch instead.
    """

    lane: LaneKey
    evict: tuple[int, ...]
    join: tuple[Job[WorkT], ...]
    jobs: tuple[Job[WorkT], ...]  # all rows, those that joined last
    begins: bool = True
    ends: bool = True
    lost: bool = False
    calls: int = 1  # of the graph of one step, unless the token is whole
    side: int = 0  # of those that go abreast

    @property
    def whole(self) -> bool:
        """Whether it takes a token from its beginning to its end."""
        return self.begins and self.ends


class DecodeCall(NamedTuple, Generic[WorkT]):
    """Rows of several lanes of one model, or a whole token for those of one lane."""

    parts: tuple[DecodePart[WorkT], ...]
    contended: bool = False  # whether more lanes than one have rows to decode
    abreast: bool = False  # each side on a thread of its own, instead of all in one call

    @property
    def model(self) -> str:
        return self.parts[0].lane.model

    @property
    def lane(self) -> LaneKey:
        """One of its lanes."""
        return self.parts[0].lane


@dataclass(frozen=True, slots=True)
class SearchCall(Generic[WorkT]):
    """Free the memory of searches that are over, then take one step of the job's; none may be."""

    lane: LaneKey
    over: tuple[Job[WorkT], ...]
    job: Job[WorkT] | None


Call = ClassifyCall[WorkT] | PrefillCall[WorkT] | DecodeCall[WorkT] | SearchCall[WorkT]


# What no queue, batch or cache may exceed. Plain numbers; who keeps to them is elsewhere.


@dataclass(frozen=True, slots=True)
class Limits:
    """What no queue, batch or cache may exceed."""

    queue_requests: int = 256
    batch_rows: int = 16
    batch_tokens: int = 8192  # rows times the longest, in one classification call
    decode_rows: int = 16
    cache_bytes: int = 128 * 2**20
    run_ahead: bool = True  # whether a row that decodes alone may
    max_wait_s: float = 0.0  # how long a classification may wait for company
    queue_wait_s: float = math.inf  # predicted, of a request that would be queued
    degrade_wait_s: float | None = None  # predicted, at which steps fall; None: they never do

    def __post_init__(self) -> None:
        for name in ("queue_requests", "batch_rows", "batch_tokens", "decode_rows", "cache_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_wait_s < 0:
            raise ValueError("max_wait_s must not be negative")
        if self.queue_wait_s <= 0:
            raise ValueError("queue_wait_s must be greater than 0")
        if self.degrade_wait_s is not None and self.degrade_wait_s <= 0:
            raise ValueError("degrade_wait_s must be greater than 0, or None")


# The deadlines of all jobs that have one, the next one first.


class Deadlines(Generic[WorkT]):
    """Which jobs are late; jobs that have ended are forgotten by and by."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job[WorkT]]] = []

    @property
    def next_s(self) -> float | None:
        """The next deadline, of a job that may have ended."""
        return self._heap[0][0] if self._heap else None

    def add(self, job: Job[WorkT]) -> None:
        """Watch over a numbered job, if it has a deadline."""
        if job.deadline is not None:
            heappush(self._heap, (job.deadline.ends_s, job.number, job))

    def passed(self, now_s: float) -> list[Job[WorkT]]:
        """Jobs that have not ended in time; each is named once."""
        late = []
        while self._heap and self._heap[0][0] <= now_s:
            job = heappop(self._heap)[2]
            if job.state is not State.ENDED:
                late.append(job)
        return late


# What the engine tells whoever waits for an answer. What every request makes is tuples, which are
# made several times as quickly as frozen dataclasses.


FinishReason = Literal["stop", "length"]


class Span(NamedTuple):
    """When the work of a request ran, on the engine's clock."""

    queued_s: float
    started_s: float
    ended_s: float

    @property
    def queue_ms(self) -> float:
        return (self.started_s - self.queued_s) * 1000

    @property
    def compute_ms(self) -> float:
        return (self.ended_s - self.started_s) * 1000


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """How likely the model itself found a token, and what else it found likely."""

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


Scores = tuple[float, ...]  # the probability of every label


@dataclass(frozen=True, slots=True)
class Tags:
    """The likeliest label of each position of a row, by its number, and its probability."""

    labels: tuple[int, ...]
    scores: Scores


class Labelled(NamedTuple):
    """The answer to a row: what its label is, or what those of its positions are."""

    found: Scores | Tags
    readouts: tuple[Scores | Tags, ...] = ()  # after each step, if that was asked


class ClassifiedEvent(NamedTuple):
    """The end of a classification."""

    rows: tuple[Labelled, ...]
    steps: tuple[int, ...]  # of the rung that each row ran on
    evaluations: tuple[int, ...]  # velocity evaluations that each row took
    span: Span


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """The end of a request that got no answer."""

    error: ServeError


Event = TokenEvent | GeneratedEvent | ClassifiedEvent | FailedEvent
Deliver = Callable[[Event], None]
