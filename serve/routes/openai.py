"""What the routes in OpenAI's shape share: from a request to its answers, whole or in pieces.

Knows how several answers to one request are written, chosen and reported; deliberately neither
what a prompt is nor how an answer looks.
"""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from serve.budget import Decision
from serve.catalog import Served
from serve.engine.engine import Engine
from serve.engine.job import FailedEvent, GeneratedEvent, Span
from serve.engine.sampling import MAX_SEED
from serve.engine.work import Wish
from serve.errors import ImpossibleBudget
from serve.routes.shared import RUN_PROBLEMS, decide_budget, request_id, timing
from serve.routes.writing import Order, Running, entries_of
from serve.wire.answers import Usage, budget_of, server_timing
from serve.wire.openai_answers import ChoiceWork, DialReport, OpenAIError
from serve.wire.openai_fields import OpenAIFields
from serve.wire.openai_shapes import Head, Shape, Tail
from serve.wire.openai_stream import ChunkWriter
from serve.wire.pieces import answer_of
from serve.wire.stream import EventStream
from serve.wire.wishes import Manner, drawn_seed, wish_in

OPENAI_PROBLEMS = {
    status: documented | {"model": OpenAIError} for status, documented in RUN_PROBLEMS.items()
}
STREAM_ABOUT = (
    "The answer; with `stream`, server-sent events without names: chunks, then `[DONE]`, or an "
    "error ({chunk}, OpenAIError). A connection that breaks without one of these two means that "
    "the answer is not complete."
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request, decided and ready to run."""

    order: Order
    shape: Shape
    head: Head
    prompts: int
    answers: int  # to each prompt
    counts: bool  # whether a stream ends with a chunk that counts

    @property
    def candidates(self) -> int:
        """The answers that are written to each prompt."""
        return len(self.order.wishes) // self.prompts

    async def respond(self) -> Response:
        """The response, or the stream of it."""
        async with AsyncExitStack() as work:
            running = await work.enter_async_context(self.order.running())
            if self.order.wishes[0].stream:
                return EventStream(
                    await running.first(),
                    running.mailbox,
                    work.pop_all(),
                    self._writer().write,
                    running.stream_headers,
                )
            events = await _ends(running)
        chosen = self._chosen(events)
        tail = self._tail(events, chosen)
        body = self.shape.whole(self.head, [events[index] for index in chosen], tail)
        entries = sum(entries_of(events[index]) for index in chosen)
        return answer_of(body, entries, server_timing(tail.report.timing))

    def _writer(self) -> ChunkWriter:
        everything = range(len(self.order.wishes))
        return ChunkWriter(
            self.shape,
            self.head,
            len(self.order.wishes),
            lambda events: self._tail(events, everything),
            self.order.request.url.path,
            self.counts,
        )

    def _chosen(self, events: Sequence[GeneratedEvent]) -> list[int]:
        """Which answers are returned: to each prompt the first, or the best of more, best first."""
        chosen: list[int] = []
        for prompt in range(self.prompts):
            first = prompt * self.candidates
            indices = list(range(first, first + self.candidates))
            if self.candidates > self.answers:
                indices.sort(key=lambda index: -_likelihood(events[index]))
            chosen += indices[: self.answers]
        return chosen

    def _tail(self, events: Sequence[GeneratedEvent], chosen: Sequence[int]) -> Tail:
        order = self.order
        spans = [event.span for event in events]
        whole = Span(
            queued_s=min(span.queued_s for span in spans),
            started_s=min(span.started_s for span in spans),
            ended_s=max(span.ended_s for span in spans),
        )
        report = DialReport(
            budget=budget_of(order.decision),
            timing=timing(order.request, order.engine, whole),
            seed=order.wishes[0].sampling.seed,
            choices=self._work(spans, chosen) if len(order.wishes) > 1 else None,
        )
        return Tail(self._usage(events), report)

    def _work(self, spans: Sequence[Span], chosen: Sequence[int]) -> list[ChoiceWork]:
        return [
            ChoiceWork(
                index=place,
                seed=self.order.wishes[index].sampling.seed,
                queue_ms=round(spans[index].queue_ms, 3),
                compute_ms=round(spans[index].compute_ms, 3),
            )
            for place, index in enumerate(chosen)
        ]

    def _usage(self, events: Sequence[GeneratedEvent]) -> Usage:
        read = sum(len(wish.prompt) for wish in self.order.wishes[:: self.candidates])
        written = sum(event.completion_tokens for event in events)
        return Usage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)


def exchange_of(
    request: Request,
    engine: Engine,
    served: Served,
    asked: OpenAIFields,
    decision: Decision,
    wishes: Sequence[Wish],
    prompts: int,
    shape: Shape,
) -> Exchange:
    """Ready to run, at the steps that are chosen now."""
    head = Head(shape.prefix + request_id(request), int(time.time()), served.name)
    order = Order.of(request, engine, served, asked, decision, wishes)
    return Exchange(order, shape, head, prompts, asked.answers, asked.counts_in_stream)


def decide(request: Request, served: Served, asked: OpenAIFields) -> Decision:
    """The rung for a request; what is wrong is said of the field that was sent."""
    try:
        return decide_budget(request, served, asked)
    except ImpossibleBudget as error:
        if error.param == "effort" and asked.reasoning_effort is not None:
            error.param = "reasoning_effort"
        raise


def wishes_of(
    asked: OpenAIFields,
    served: Served,
    prompts: Sequence[list[int]],
    candidates: int,
    max_tokens: int,
    logprobs: int | None,
) -> list[Wish]:
    """What to write: to each prompt so many answers, whose seeds follow each other."""
    seed = drawn_seed() if asked.seed is None else asked.seed
    return [
        wish_in(
            Manner(
                max_tokens=max_tokens,
                temperature=asked.temperature,
                top_k=asked.top_k,
                top_p=1.0 if asked.top_p is None else asked.top_p,
                seed=(seed + number) % (MAX_SEED + 1),
                stops=asked.stops,
                logprobs=logprobs,
                stream=asked.streams,
            ),
            served,
            prompt,
        )
        for prompt in prompts
        for number in range(candidates)
    ]


async def _ends(running: Running) -> list[GeneratedEvent]:
    """The ends of all texts; raises what kept one of them from being complete."""
    ends: dict[int, GeneratedEvent] = {}
    while len(ends) < len(running.jobs):
        for index, event in await running.mailbox.take():
            if isinstance(event, FailedEvent):
                raise event.error
            assert isinstance(event, GeneratedEvent)
            ends[index] = event
    return [ends[index] for index in range(len(ends))]


def _likelihood(event: GeneratedEvent) -> float:
    """The mean log-probability of a token."""
    return sum(one.logprob for one in event.logprobs) / len(event.logprobs)
