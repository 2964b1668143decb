"""POST /v1/chat/completions: messages in, the next one out, in OpenAI's shape.

Knows messages; what all routes in that shape share is in routes.openai.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve.catalog import WRITING, Served
from serve.engine.engine import Engine
from serve.errors import WrongTask
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
from serve.wire.openai_answers import ChatResponse
from serve.wire.openai_requests import ChatRequest
from serve.wire.openai_shapes import ChatShape
from serve.wire.reader import Reader


def chat_routes(settings: Settings, engine: Engine, reader: Reader) -> APIRouter:
    """The route, for an engine."""
    router = APIRouter(tags=["openai"])

    @router.post(
        "/v1/chat/completions",
        summary="Answer a chat, in OpenAI's shape",
        response_model=ChatResponse,
        responses={
            200: {
                "description": STREAM_ABOUT.format(chunk="ChatChunk"),
                "content": {"text/event-stream": {}},
            },
            **OPENAI_PROBLEMS,
        },
        openapi_extra=takes(ChatRequest),
    )
    async def chat(request: Request) -> Response:
        asked = await read_json(request, ChatRequest, reader)
        served = engine.catalog.pick(asked.model, WRITING)
        _check_chats(served)
        decision = decide(request, served, asked)
        max_tokens = asked.limit(settings.max_tokens)
        check_max_tokens(max_tokens, settings, asked.limit_field)
        check_texts(asked.answers, settings)
        check_answer(asked.answers, max_tokens, asked.alternatives, settings, asked.limit_field)
        prompt = await reader.read(
            request,
            sum(len(message.content) for message in asked.messages),
            deadline_of(request, asked),
            lambda: _prompt(asked, served),
        )
        wishes = wishes_of(asked, served, [prompt], asked.answers, max_tokens, asked.alternatives)
        shape = ChatShape(asked.alternatives is not None)
        return await exchange_of(
            request, engine, served, asked, decision, wishes, 1, shape
        ).respond()

    return router


def _check_chats(served: Served) -> None:
    if served.chat is None:
        raise WrongTask(
            f"{served.name} translates, and takes no chats: send the text as prompt to "
            "/v1/completions",
            param="model",
            endpoint="/v1/completions",
        )


def _prompt(asked: ChatRequest, served: Served) -> list[int]:
    assert served.chat is not None
    return served.codec.encode_prompt(served.chat.prompt(asked.messages), "messages")
