"""OpenAI's POST /v1/embeddings, for classifiers of texts: the pooled state at a chosen step."""

import base64
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import ConfigDict, Field
from pydantic.config import JsonDict
from starlette.responses import Response
from typing_extensions import TypedDict

from serve.api.body import Budget, BudgetFields, Reader, Timing, budget_of, read_json, server_timing
from serve.api.openai import OPENAI_PROBLEMS
from serve.api.submission import (
    LazyList,
    Submission,
    answer_of,
    check_count,
    takes,
)
from serve.catalog import Catalog, Served
from serve.engine.engine import Engine
from serve.engine.job import ClassifiedEvent, Tags
from serve.errors import InvalidField, NoEmbeddings
from serve.exchange import Exchange, Route, ThisExchange
from serve.inputs.rows import MAX_INPUTS, InputRow, Texts, read_items
from serve.runtime.protocol import FloatArray
from serve.settings import Settings

_EXAMPLES: list[JsonDict] = [
    {"model": "topics", "input": "Shares slide as oil climbs."},
    {"input": ["A film that stays with you.", "A dull mess."], "steps": 2},
]


class EmbeddingRequest(BudgetFields):
    """Texts to turn into vectors."""

    model_config = ConfigDict(json_schema_extra={"examples": [*_EXAMPLES]})

    input: Texts = Field(
        description=f"A text, or a list of up to {MAX_INPUTS}. Texts that are too long are cut, "
        "as in training. Lists of tokens are refused: those of another tokenizer would mean other "
        "words."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        "float",
        description="`float`: a list of numbers. `base64`: as little-endian 32-bit floats.",
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Accepted only if it is the width of the model's vectors, which are never cut.",
    )
    user: str | None = Field(None, description="Accepted and ignored.")


class EmbeddingItem(TypedDict):
    """The vector of one text."""

    object: Annotated[Literal["embedding"], Field(description="Type of this object.")]
    index: Annotated[int, Field(description="Index of the text in the request, from 0.")]
    embedding: Annotated[
        list[float] | str, Field(description="The vector, of length 1, as `encoding_format` says.")
    ]
    steps: Annotated[
        int,
        Field(description="Steps taken. Only vectors of the same steps are made to be compared."),
    ]


class EmbeddingUsage(TypedDict):
    """Tokens read."""

    prompt_tokens: Annotated[int, Field(description="Tokens of all texts, as the model read them.")]
    total_tokens: Annotated[int, Field(description="The same.")]


class EmbeddingReport(TypedDict):
    """What this server did for the answer. Not part of OpenAI's API."""

    budget: Annotated[Budget, Field(description="The work that was done, at the fewest steps.")]
    timing: Annotated[Timing, Field(description="Where the time of the request went.")]
    truncated: Annotated[list[int], Field(description="Indices of texts that were cut to fit.")]


class EmbeddingResponse(TypedDict):
    """One vector for each text, in the same order."""

    object: Annotated[Literal["list"], Field(description="Type of this object.")]
    model: Annotated[str, Field(description="The model that answered.")]
    data: Annotated[list[EmbeddingItem], Field(description="One entry per text, in order.")]
    usage: Annotated[EmbeddingUsage, Field(description="Tokens read.")]
    stepdial: Annotated[EmbeddingReport, Field(description="Steps and time.")]


def embedding_routes(settings: Settings, engine: Engine, reader: Reader) -> APIRouter:
    """The route, for an engine."""
    router = APIRouter(tags=["openai"], route_class=Route)

    @router.post(
        "/v1/embeddings",
        summary="OpenAI-compatible embeddings of texts",
        response_model=EmbeddingResponse,
        response_description="One vector per text.",
        responses=OPENAI_PROBLEMS,
        openapi_extra=takes(EmbeddingRequest),
    )
    async def embeddings(exchange: ThisExchange) -> Response:
        asked = await read_json(exchange, EmbeddingRequest, reader)
        served = embedder(engine.catalog, asked.model)
        _check_dimensions(asked.dimensions, served)
        submission = _submission(exchange, engine, served, asked)
        check_count(asked.input, settings.max_inputs)
        inputs, event = await submission.classify(
            reader,
            len(asked.input),
            sum(len(item.value) for item in asked.input),
            lambda: read_items(asked.input, served.manifest, served.text, truncate=True),
            embeds=True,
        )
        spent = submission.timing(event.span)
        vectors = unit_vectors(event)
        body = {
            "object": "list",
            "model": served.name,
            "data": LazyList(_items(vectors, event.steps, asked.encoding_format == "base64")),
            "usage": _usage(inputs),
            "stepdial": {
                "budget": budget_of(submission.decision.served_at(min(event.steps))),
                "timing": spent,
                "truncated": [index for index, one in enumerate(inputs) if one.truncated],
            },
        }
        answered = answer_of(body, vectors.size, server_timing(spent))
        engine.observe_answer(engine.clock() - event.span.ended_s)
        return answered

    return router


def embedder(catalog: Catalog, name: str | None) -> Served:
    """The model with this name, or the first that gives embeddings; NoEmbeddings if none does."""
    if name is None:
        for one in catalog:
            if one.manifest.embedding is not None:
                return one
        raise NoEmbeddings(
            "no served model gives embeddings: serve a classifier of texts that was exported by "
            "this release",
            param="model",
        )
    served = catalog.find(name)
    manifest = served.manifest
    if manifest.embedding is not None:
        return served
    if manifest.task == "classify" and manifest.input.kind == "text":
        reason = (
            "it was exported by an earlier release, or its readout has no pooled state; export its "
            "run again with this release"
        )
    else:
        reason = "only classifiers of texts do: name another model, or leave model out"
    raise NoEmbeddings(f"{name} gives no embeddings: {reason}", param="model")


def _check_dimensions(dimensions: int | None, served: Served) -> None:
    if dimensions not in (None, served.manifest.embedding):
        raise InvalidField(
            f"dimensions is {dimensions}, but the vectors of {served.name} have "
            f"{served.manifest.embedding} numbers and are never cut: leave it out",
            param="dimensions",
        )


def _submission(
    exchange: Exchange, engine: Engine, served: Served, asked: EmbeddingRequest
) -> Submission:
    """With the steps of all texts. Only a deadline lets the server choose: vectors must fit."""
    if asked.max_disagreement is not None:
        raise InvalidField(
            "max_disagreement is about labels, and says nothing of vectors: send steps or effort",
            param="max_disagreement",
        )
    submission = Submission.of(exchange, engine, served, asked)
    if asked.deadline_ms is None:
        submission.decision = submission.decision._replace(choices=())
    return submission


def unit_vectors(event: ClassifiedEvent) -> FloatArray:
    """The vectors of all texts (B, D), each of length 1."""
    found = [row.found for row in event.rows]
    states = np.array([one for one in found if not isinstance(one, Tags)])  # (B, D)
    lengths = np.sqrt((states**2).sum(axis=1, keepdims=True))
    vectors: FloatArray = (states / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
    return vectors


def _items(vectors: FloatArray, steps: Sequence[int], as_bytes: bool) -> Iterable[EmbeddingItem]:
    for index, (vector, taken) in enumerate(zip(vectors, steps, strict=True)):
        shown: list[float] | str
        if as_bytes:
            shown = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        else:
            shown = vector.tolist()
        yield {"object": "embedding", "index": index, "embedding": shown, "steps": taken}


def _usage(inputs: Sequence[InputRow]) -> EmbeddingUsage:
    tokens = sum(len(one.row) for one in inputs)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
