"""What the engine tells whoever waits for an answer.

Plain data; deliberately nothing of HTTP, and nothing that the engine goes on changing. What every
request makes is tuples, which are made several times as quickly as frozen dataclasses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from serve.errors import ServeError

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
class TokenLogprob:
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
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class GeneratedEvent:
    """The end of a generation."""

    finish_reason: FinishReason
    text: str
    completion_tokens: int
    logprobs: tuple[TokenLogprob, ...]
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
