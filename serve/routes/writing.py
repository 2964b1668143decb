"""From a request for texts, decided in whatever protocol, to the jobs that write them.

One request may ask for several texts: they share its model, its steps and its deadline, and end
together. It deliberately knows neither how requests ask nor how answers look.
"""

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request

from serve.budget import Decision
from serve.catalog import Served
from serve.engine.engine import Engine
from serve.engine.job import Deadline, Event, FailedEvent, GeneratedEvent, Job, Kind, LaneKey
from serve.engine.predict import Asked
from serve.engine.work import Generation, Translation, Wish, Work
from serve.errors import InvalidField
from serve.routes.shared import deadline_of, note_decision
from serve.settings import Settings
from serve.wire.mailbox import Mailbox, Submitted
from serve.wire.schemas import BudgetFields
from serve.wire.wishes import positions_held

# Which of the texts an event is about.
TextEvent = tuple[int, Event]


@dataclass(frozen=True, slots=True)
class Running:
    """Jobs that are in the engine, and where their events come."""

    mailbox: Mailbox[TextEvent]
    jobs: Sequence[Job[Work]]

    async def first(self) -> list[TextEvent]:
        """What comes first; what fails at once is raised, so that it gets a status of its own."""
        events = await self.mailbox.take()
        _, event = events[0]
        if isinstance(event, FailedEvent):
            raise event.error
        return events

    @property
    def stream_headers(self) -> dict[str, str]:
        """What is known of the time when a stream begins."""
        job = min(self.jobs, key=lambda job: math.inf if job.started_s is None else job.started_s)
        assert job.started_s is not None
        return {"server-timing": f"queue;dur={round((job.started_s - job.queued_s) * 1000, 3)}"}


@dataclass(frozen=True, slots=True)
class Order:
    """Texts to write, with all that the server decides before."""

    request: Request
    engine: Engine
    served: Served
    decision: Decision
    wishes: Sequence[Wish]
    deadline: Deadline | None

    @classmethod
    def of(
        cls,
        request: Request,
        engine: Engine,
        served: Served,
        asked: BudgetFields,
        decision: Decision,
        wishes: Sequence[Wish],
    ) -> "Order":
        """Chooses the steps, where the request leaves that to the server."""
        deadline = deadline_of(request, asked)
        if len(decision.choices) > 1:
            steps = engine.steps_for(
                LaneKey(served.key, _kind(wishes[0]), decision.steps),
                decision.step_choices,
                _size(wishes),
                deadline,
            )
            decision = decision.served_at(steps)
        return cls(request, engine, served, decision, wishes, deadline)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Running]:
        """The jobs are in the engine; whatever ends this block early takes them out again."""
        mailbox: Mailbox[TextEvent] = Mailbox()
        jobs = [self._job(wish, mailbox.deliver, index) for index, wish in enumerate(self.wishes)]
        with Submitted(self.engine, jobs, mailbox, self.request):
            note_decision(self.request, self.engine, self.served, self.decision)
            yield Running(mailbox, jobs)

    def _job(self, wish: Wish, deliver: Callable[[TextEvent], None], index: int) -> Job[Work]:
        made = Translation if wish.num_beams > 1 else Generation
        return Job(
            lane=LaneKey(self.served.key, _kind(wish), self.decision.steps),
            work=made(wish, self.served.codec, partial(_deliver, deliver, index)),
            lengths=(len(wish.prompt),),
            positions=positions_held(wish, self.served),
            deadline=self.deadline,
            tokens_left=wish.max_tokens,
            beams=wish.num_beams,
            admitted=len(self.decision.choices) > 1,
        )


def check_max_tokens(asked: int, settings: Settings, param: str = "max_tokens") -> None:
    """InvalidField if that is more than this server writes."""
    if asked > settings.max_tokens:
        raise InvalidField(
            f"{param} is {asked}, but this server writes at most {settings.max_tokens}: send less",
            param=param,
        )


def check_texts(texts: int, settings: Settings) -> None:
    """InvalidField if they could never wait together."""
    if texts > settings.queue_limit:
        raise InvalidField(
            f"this asks for {texts} texts, but the queue of this server holds "
            f"{settings.queue_limit}: send fewer in one request",
            param="n",
        )


def check_answer(
    texts: int,
    max_tokens: int,
    logprobs: int | None,
    settings: Settings,
    param: str = "max_tokens",
) -> None:
    """InvalidField if the answer may be larger than this server makes any.

    One text without log-probabilities is no larger than max_tokens, which has a limit of its own.
    """
    if texts == 1 and logprobs is None:
        return
    alternatives = logprobs or 0
    asked = texts * max_tokens * (1 + alternatives)
    if asked > settings.max_answer_tokens:
        lower = [param, *(["the number of texts"] if texts > 1 else [])]
        lower += ["the number of logprobs"] if alternatives else []
        raise InvalidField(
            f"this asks for {asked} tokens, {texts} texts x {max_tokens} tokens x "
            f"{1 + alternatives} with the logprobs of each, but an answer of this server has at "
            f"most {settings.max_answer_tokens}: lower {' or '.join(lower)}",
            param=param,
        )


def entries_of(event: GeneratedEvent) -> int:
    """How much there is to write of its log-probabilities."""
    return len(event.logprobs) * (1 + len(event.logprobs[0].top)) if event.logprobs else 0


def _size(wishes: Sequence[Wish]) -> Asked:
    longest, first = max(len(one.prompt) for one in wishes), wishes[0]
    return Asked(longest, first.max_tokens, len(wishes), first.num_beams)


def _kind(wish: Wish) -> Kind:
    return "search" if wish.num_beams > 1 else "generate"


def _deliver(deliver: Callable[[TextEvent], None], index: int, event: Event) -> None:
    deliver((index, event))
