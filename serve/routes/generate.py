"""POST /v1/generate: a prompt in, its continuation or translation out, whole or in pieces.

Knows the shape of requests and answers; the engine knows how they are run.
"""

import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve.budget import Decision
from serve.catalog import WRITING, Served
from serve.engine.engine import Engine
from serve.engine.events import FailedEvent, GeneratedEvent, TokenEvent, TokenLogprob
from serve.engine.generation import Generation, Wish
from serve.engine.translation import Translation
from serve.engine.work import Work
from serve.errors import InvalidField
from serve.routes.shared import (
    RUN_PROBLEMS,
    Encoding,
    answer,
    deadline_of,
    decide_budget,
    note_decision,
    request_id,
    takes,
    timing,
)
from serve.scheduler.job import Deadline, Job, Kind, LaneKey
from serve.settings import Settings
from serve.wire.answers import (
    Alternative,
    Budget,
    DoneChunk,
    GenerateResponse,
    TokenChunk,
    TokenScore,
    Usage,
)
from serve.wire.body import read_json
from serve.wire.mailbox import Mailbox, submitted
from serve.wire.schemas import GenerateRequest
from serve.wire.stream import EventStream
from serve.wire.wishes import check_beams, positions_held, wish_of

# A drawn seed fits a JavaScript number, so that every client can send it back as it came.
_DRAWN_BITS = 32

_STREAM_ABOUT = (
    "The answer; with `stream`, server-sent events: one without a name for each token "
    "(TokenChunk), then exactly one, `done` (DoneChunk) or `error` (ErrorResponse). A connection "
    "that breaks without one means that the answer is not complete."
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request, decided and ready to run; writes the parts of its answer."""

    request: Request
    engine: Engine
    served: Served
    decision: Decision
    wish: Wish
    deadline: Deadline | None

    def chunk(self, event: TokenEvent) -> TokenChunk:
        return TokenChunk(
            index=event.index,
            text=event.text,
            steps=self.decision.steps,
            logprob=None if event.logprob is None else _token_score(event.logprob),
        )

    def done(self, event: GeneratedEvent) -> DoneChunk:
        return DoneChunk(
            id=request_id(self.request),
            model=self.served.name,
            finish_reason=event.finish_reason,
            seed=self.wish.sampling.seed,
            usage=self._usage(event),
            budget=Budget.of(self.decision),
            timing=timing(self.request, self.engine, event.span),
        )

    def whole(self, event: GeneratedEvent) -> GenerateResponse:
        scores = [_token_score(logprob) for logprob in event.logprobs]
        return GenerateResponse(
            id=request_id(self.request),
            model=self.served.name,
            text=event.text,
            finish_reason=event.finish_reason,
            seed=self.wish.sampling.seed,
            logprobs=None if self.wish.logprobs is None else scores,
            usage=self._usage(event),
            budget=Budget.of(self.decision),
            timing=timing(self.request, self.engine, event.span),
        )

    def _usage(self, event: GeneratedEvent) -> Usage:
        prompt, completion = len(self.wish.prompt), event.completion_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
        )


def generate_routes(settings: Settings, engine: Engine) -> APIRouter:
    """The route, for an engine."""
    router = APIRouter(tags=["inference"])
    encoding = Encoding()

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
        asked = await read_json(
            request, GenerateRequest, settings.max_body_bytes, settings.body_timeout_s
        )
        tasks = WRITING if asked.num_beams is None else WRITING[::-1]
        served = engine.catalog.pick(asked.model, tasks)
        decision = decide_budget(request, served, asked)
        if asked.max_tokens > settings.max_tokens:
            raise InvalidField(
                f"max_tokens is {asked.max_tokens}, but this server writes at most "
                f"{settings.max_tokens}: send less",
                param="max_tokens",
            )
        check_beams(asked, served)
        prompt = await encoding.run(
            request, len(asked.prompt), lambda: served.codec.encode_prompt(asked.prompt)
        )
        wish = wish_of(asked, served, prompt, secrets.randbits(_DRAWN_BITS))
        kind: Kind = "search" if wish.num_beams > 1 else "generate"
        deadline = deadline_of(request, asked)
        if len(decision.choices) > 1:
            lane = LaneKey(served.name, kind, decision.steps)
            steps = engine.steps_for(
                lane, decision.step_choices, len(prompt), wish.max_tokens, deadline
            )
            decision = decision.served_at(steps)
        return await _run(Exchange(request, engine, served, decision, wish, deadline))

    return router


async def _run(exchange: Exchange) -> Response:
    mailbox, wish = Mailbox(), exchange.wish
    served, steps = exchange.served, exchange.decision.steps
    searches = wish.num_beams > 1
    kind: Kind = "search" if searches else "generate"
    job: Job[Work] = Job(
        lane=LaneKey(served.name, kind, steps),
        work=(Translation if searches else Generation)(wish, served.codec, mailbox.deliver),
        lengths=(len(wish.prompt),),
        positions=positions_held(wish, served),
        deadline=exchange.deadline,
        tokens_left=wish.max_tokens,
    )
    async with AsyncExitStack() as work:
        await work.enter_async_context(submitted(exchange.engine, job, mailbox, exchange.request))
        note_decision(exchange.request, exchange.engine, served, exchange.decision)
        # A stream waits for its first event too: what fails at once gets a status of its own.
        events = await mailbox.take()
        first = events[0]
        if isinstance(first, FailedEvent):
            raise first.error
        if wish.stream:
            assert job.started_s is not None
            queue_ms = round((job.started_s - job.queued_s) * 1000, 3)
            return EventStream(
                events,
                mailbox,
                work.pop_all(),
                exchange.chunk,
                exchange.done,
                {"server-timing": f"queue;dur={queue_ms}"},
            )
    assert isinstance(first, GeneratedEvent)
    response = exchange.whole(first)
    return answer(response, {"server-timing": response.timing.header})


def _token_score(logprob: TokenLogprob) -> TokenScore:
    return TokenScore(
        token=logprob.token,
        logprob=logprob.logprob,
        top=[Alternative(token=token, logprob=value) for token, value in logprob.top],
    )
