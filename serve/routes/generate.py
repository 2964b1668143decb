"""POST /v1/generate: a prompt in, its continuation or translation out, whole or in pieces.

Knows the shape of requests and answers; the engine knows how they are run.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve.catalog import WRITING
from serve.engine.engine import Engine
from serve.engine.job import GeneratedEvent, TokenEvent, TokenLogprob
from serve.routes.shared import (
    RUN_PROBLEMS,
    deadline_of,
    decide_budget,
    request_id,
    takes,
    timing,
)
from serve.routes.writing import Order, TextEvent, check_answer, check_max_tokens, entries_of
from serve.settings import Settings
from serve.wire.answers import (
    Alternative,
    DoneChunk,
    GenerateResponse,
    Timing,
    TokenChunk,
    TokenScore,
    Usage,
    budget_of,
    server_timing,
)
from serve.wire.body import read_json
from serve.wire.pieces import Each, answer_of
from serve.wire.reader import Reader
from serve.wire.schemas import GenerateRequest
from serve.wire.stream import EventStream, NamedEvents, Written
from serve.wire.wishes import check_beams, drawn_seed, wish_of

_STREAM_ABOUT = (
    "The answer; with `stream`, server-sent events: one without a name for each token "
    "(TokenChunk), then exactly one, `done` (DoneChunk) or `error` (ErrorResponse). A connection "
    "that breaks without one means that the answer is not complete."
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request, decided and ready to run; writes the parts of its answer."""

    order: Order

    def chunk(self, event: TokenEvent) -> TokenChunk:
        return TokenChunk(
            index=event.index,
            text=event.text,
            steps=self.order.decision.steps,
            logprob=None if event.logprob is None else _token_score(event.logprob),
        )

    def done(self, event: GeneratedEvent) -> DoneChunk:
        return DoneChunk(
            id=request_id(self.order.request),
            model=self.order.served.name,
            finish_reason=event.finish_reason,
            seed=self.order.wishes[0].sampling.seed,
            usage=self._usage(event),
            budget=budget_of(self.order.decision),
            timing=timing(self.order.request, self.order.engine, event.span),
        )

    def whole(self, event: GeneratedEvent, spent: Timing) -> dict[str, object]:
        """GenerateResponse: not made of that, since it may be large."""
        wish = self.order.wishes[0]
        return {
            "id": request_id(self.order.request),
            "model": self.order.served.name,
            "text": event.text,
            "finish_reason": event.finish_reason,
            "seed": wish.sampling.seed,
            "logprobs": None if wish.logprobs is None else Each(map(_score, event.logprobs)),
            "usage": self._usage(event),
            "budget": budget_of(self.order.decision),
            "timing": spent,
        }

    def written(self, events: Sequence[TextEvent]) -> Written:
        return NamedEvents(self.chunk, self.done).write([event for _, event in events])

    def _usage(self, event: GeneratedEvent) -> Usage:
        prompt, completion = len(self.order.wishes[0].prompt), event.completion_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
        )


def generate_routes(settings: Settings, engine: Engine, reader: Reader) -> APIRouter:
    """The route, for an engine."""
    router = APIRouter(tags=["inference"])

    @router.post(
        "/v1/generate",
        summary="Continue a prompt, or translate a text",
        response_model=GenerateResponse,
        responses={
            200: {"description": _STREAM_ABOUT, "content": {"text/event-stream": {}}},
            **RUN_PROBLEMS,
        },
        openapi_extra=takes(GenerateRequest),
    )
    async def generate(request: Request) -> Response:
        asked = await read_json(request, GenerateRequest, reader)
        tasks = WRITING if asked.num_beams is None else WRITING[::-1]
        served = engine.catalog.pick(asked.model, tasks)
        decision = decide_budget(request, served, asked)
        max_tokens = asked.limit(settings.max_tokens)
        check_max_tokens(max_tokens, settings)
        check_answer(1, max_tokens, asked.logprobs, settings)
        check_beams(asked, served)
        prompt = await reader.read(
            request,
            len(asked.prompt),
            deadline_of(request, asked),
            lambda: served.codec.encode_prompt(asked.prompt),
        )
        wish = wish_of(asked, served, prompt, drawn_seed(), max_tokens)
        order = Order.of(request, engine, served, asked, decision, (wish,))
        return await _run(Exchange(order))

    return router


async def _run(exchange: Exchange) -> Response:
    async with AsyncExitStack() as work:
        running = await work.enter_async_context(exchange.order.running())
        events = await running.first()
        if exchange.order.wishes[0].stream:
            return EventStream(
                events,
                running.mailbox,
                work.pop_all(),
                exchange.written,
                running.stream_headers,
            )
    _, event = events[0]
    assert isinstance(event, GeneratedEvent)
    spent = timing(exchange.order.request, exchange.order.engine, event.span)
    return answer_of(exchange.whole(event, spent), entries_of(event), server_timing(spent))


def _score(logprob: TokenLogprob) -> dict[str, object]:
    """TokenScore of a whole answer."""
    return {
        "token": logprob.token,
        "logprob": logprob.logprob,
        "top": [{"token": token, "logprob": value} for token, value in logprob.top],
    }


def _token_score(logprob: TokenLogprob) -> TokenScore:
    return TokenScore(
        token=logprob.token,
        logprob=logprob.logprob,
        top=[Alternative(token=token, logprob=value) for token, value in logprob.top],
    )
