"""POST /v1/completions: prompts in, their continuations or translations out, in OpenAI's shape.

Knows prompts; what all routes in that shape share is in routes.openai.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve.catalog import WRITING, Served
from serve.engine.engine import Engine
from serve.routes.openai import (
    OPENAI_PROBLEMS,
    STREAM_ABOUT,
    decide,
    exchange_of,
    wishes_of,
)
from serve.routes.shared import deadline_of, takes
from serve.routes.writing import check_answer, check_max_tokens, check_texts
from serve.settings import Settings
from serve.wire.body import read_json
from serve.wire.openai_answers import CompletionResponse
from serve.wire.openai_requests import CompletionRequest
from serve.wire.openai_shapes import CompletionShape
from serve.wire.reader import Reader


def completion_routes(settings: Settings, engine: Engine, reader: Reader) -> APIRouter:
    """The route, for an engine."""
    router = APIRouter(tags=["openai"])

    @router.post(
        "/v1/completions",
        summary="Continue prompts, or translate texts, in OpenAI's shape",
        response_model=CompletionResponse,
        responses={
            200: {
                "description": STREAM_ABOUT.format(chunk="CompletionChunk"),
                "content": {"text/event-stream": {}},
            },
            **OPENAI_PROBLEMS,
        },
        openapi_extra=takes(CompletionRequest),
    )
    async def completions(request: Request) -> Response:
        asked = await read_json(request, CompletionRequest, reader)
        served = engine.catalog.pick(asked.model, WRITING)
        decision = decide(request, served, asked)
        max_tokens = asked.limit(settings.max_tokens)
        check_max_tokens(max_tokens, settings)
        texts = len(asked.prompt) * asked.candidates
        check_texts(texts, settings)
        check_answer(texts, max_tokens, asked.logprobs, settings)
        prompts = await reader.read(
            request,
            sum(prompt.characters for prompt in asked.prompt),
            deadline_of(request, asked),
            lambda: [prompt.read(served.codec) for prompt in asked.prompt],
        )
        ranks = asked.candidates > asked.answers
        wishes = wishes_of(
            asked,
            served,
            prompts,
            asked.candidates,
            max_tokens,
            0 if ranks and asked.logprobs is None else asked.logprobs,
        )
        shape = CompletionShape(_echoes(asked, served), asked.logprobs is not None)
        return await exchange_of(
            request, engine, served, asked, decision, wishes, len(prompts), shape
        ).respond()

    return router


def _echoes(asked: CompletionRequest, served: Served) -> list[str]:
    """What comes before each answer."""
    return [
        prompt.text(served.codec) if asked.echo else ""
        for prompt in asked.prompt
        for _ in range(asked.answers)
    ]
