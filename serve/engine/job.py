"""A job, and the rest of what the engine plans with: lanes, calls, limits, deadlines and events.

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
# How rungs of one model decode at the same time: in one call, in parallel on a thread each, or
# alternating token by token.
Sharing = Literal["shared", "parallel", "alternating"]


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
    """The state of a job. A job ends exactly once."""

    QUEUED = "queued"  # nothing of it has run
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Job(Generic[WorkT]):
    """One request in the scheduler."""

    lane: LaneKey
    work: WorkT
    lengths: tuple[int, ...]  # tokens of each row; a generation has one row, its prompt
    positions: int = 0  # the most cached positions of a generation or search
    may_pad: bool = True  # whether rows may be padded to the length of others
    deadline: Deadline | None = None
    choices: tuple[int, ...] = ()  # steps that a batch of a late lane may get, ascending
    tokens_left: int = 0  # that a generation or search may still make
    beams: int = 1  # of a search: the rows of its calls
    admitted: bool = False  # admission has checked it when its steps were chosen
    state: State = State.QUEUED
    request_id: str = ""  # for logs
    number: int = -1  # order of arrival, set by the scheduler
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


@dataclass(frozen=True, slots=True)
class ClassifyCall(Generic[WorkT]):
    """Run these rows together: (job, index of the row in the job)."""

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
        """The rung that the rows run on."""
        return self.lane._replace(steps=self.steps, late=False)


@dataclass(frozen=True, slots=True)
class PrefillCall(Generic[WorkT]):
    """Free the prefill of jobs that are over, then prefill a piece of the job's prompt, if any."""

    lane: LaneKey
    over: tuple[int, ...]  # job numbers
    job: Job[WorkT] | None


class DecodePart(NamedTuple, Generic[WorkT]):
    """A lane's part of a decode call: remove `evict` in order, append `join`, then run the rows.

    Rows change only between two tokens. A part that neither begins nor ends a token is a step
    between. `lost`: drop the batch instead.
    """

    lane: LaneKey
    evict: tuple[int, ...]
    join: tuple[Job[WorkT], ...]
    jobs: tuple[Job[WorkT], ...]  # all rows; those that joined come last
    begins: bool = True
    ends: bool = True
    lost: bool = False
    calls: int = 1  # of the one-step graph, unless the token is whole
    side: int = 0  # of those that run in parallel

    @property
    def whole(self) -> bool:
        """Whether it is a whole token."""
        return self.begins and self.ends


class DecodeCall(NamedTuple, Generic[WorkT]):
    """Rows of several lanes of one model, or a whole token for one lane."""

    parts: tuple[DecodePart[WorkT], ...]
    contended: bool = False  # whether several lanes have rows to decode
    parallel: bool = False  # sides run on a thread each, not in one call

    @property
    def model(self) -> str:
        return self.parts[0].lane.model

    @property
    def lane(self) -> LaneKey:
        """One of its lanes."""
        return self.parts[0].lane


@dataclass(frozen=True, slots=True)
class SearchCall(Generic[WorkT]):
    """Free the memory of searches that are over, then run one step of the job's search, if any."""

    lane: LaneKey
    over: tuple[Job[WorkT], ...]
    job: Job[WorkT] | None


Call = ClassifyCall[WorkT] | PrefillCall[WorkT] | DecodeCall[WorkT] | SearchCall[WorkT]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of queue, batches and cache."""

    queue_requests: int = 256
    batch_rows: int = 16
    batch_tokens: int = 8192  # rows times the longest, in one classify call
    decode_rows: int = 16
    cache_bytes: int = 128 * 2**20
    speculate: bool = True  # whether a row that decodes alone may
    max_wait_s: float = 0.0  # how long a classification may wait for others to join its batch
    queue_wait_s: float = math.inf  # the longest predicted wait of a new request
    degrade_wait_s: float | None = None  # predicted wait at which steps are cut; None: never

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


class Deadlines(Generic[WorkT]):
    """The deadlines of all jobs, next one first. Jobs that have ended drop out over time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job[WorkT]]] = []

    @property
    def next_s(self) -> float | None:
        """The next deadline; its job may have ended."""
        return self._heap[0][0] if self._heap else None

    def add(self, job: Job[WorkT]) -> None:
        """Watch a numbered job, if it has a deadline."""
        if job.deadline is not None:
            heappush(self._heap, (job.deadline.ends_s, job.number, job))

    def passed(self, now_s: float) -> list[Job[WorkT]]:
        """Jobs whose deadline has passed and that have not ended; each is returned once."""
        late = []
        while self._heap and self._heap[0][0] <= now_s:
            job = heappop(self._heap)[2]
            if job.state is not State.ENDED:
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


class ClassifiedEvent(NamedTuple):
    """The end of a classification."""

    rows: tuple[Labelled, ...]
    steps: tuple[int, ...]  # of the rung that each row ran on
    evaluations: tuple[int, ...]  # velocity evaluations of each row
    span: Span


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """The end of a request that failed."""

    error: ServeError


Event = TokenEvent | GeneratedEvent | ClassifiedEvent | FailedEvent
Deliver = Callable[[Event], None]
