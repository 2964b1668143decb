"""The routes POST /v1/classify and POST /v1/generate."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NotRequired

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from serve.api.body import (
    FINISH,
    Answer,
    Budget,
    ClassifyRequest,
    GenerateRequest,
    Reader,
    Timing,
    TokenLabel,
    Usage,
    budget_of,
    read_json,
    server_timing,
)
from serve.api.submission import (
    RUN_PROBLEMS,
    Submission,
    TextEvent,
    answer,
    answer_of,
    check_count,
    entries_of,
    event_of,
    filled,
    ranked,
    takes,
    token_labels,
)
from serve.budget import Decision
from serve.bundle import LABELLING, Manifest
from serve.catalog import WRITING, Served
from serve.engine.engine import Engine
from serve.engine.job import (
    ClassifiedEvent,
    Event,
    FailedEvent,
    FinishReason,
    GeneratedEvent,
    Labelled,
    ScoredToken,
    Tags,
    TokenEvent,
)
from serve.errors import InvalidField
from serve.exchange import Route, ThisExchange
from serve.inputs.rows import InputRow, check_kinds, read_items

# Shapes of answers.


class LabelScore(TypedDict):
    """A label and how likely it is."""

    label: Annotated[str, Field(description="One of the model's labels.")]
    score: Annotated[float, Field(description="Probability that the model gives it.")]


class Readout(TypedDict):
    """What the model would have answered after a step."""

    steps: Annotated[int, Field(description="Steps taken so far.")]
    labels: Annotated[
        list[str],
        Field(
            description="Most likely label of each entry of `tokens`; for a classifier, one label."
        ),
    ]
    scores: Annotated[list[float], Field(description="Probability of each of these labels.")]
    text: NotRequired[
        Annotated[str, Field(description="Like `text` of the result, with these labels.")]
    ]


Trace = Annotated[
    list[Readout],
    Field(description="What the model would have answered after each step, if `trace` was set."),
]


class ClassifyResult(TypedDict):
    """The answer for one input."""

    label: Annotated[str, Field(description="Most likely label.")]
    score: Annotated[float, Field(description="Probability that the model gives it.")]
    top: Annotated[
        list[LabelScore], Field(description="Most likely labels, the most likely first.")
    ]
    truncated: Annotated[bool, Field(description="Whether a text was cut to fit the model.")]
    budget: Annotated[Budget, Field(description="The work that was done.")]
    trace: NotRequired[Trace]


class TagResult(TypedDict):
    """The answer for one text of a model that labels each token."""

    tokens: Annotated[
        list[TokenLabel],
        Field(
            description="Every character for a model that labels characters, else every word, "
            "in order."
        ),
    ]
    text: NotRequired[
        Annotated[
            str,
            Field(
                description="The input with each character replaced by its label, for a model "
                "whose labels are characters: a filled-in puzzle, for example."
            ),
        ]
    ]
    truncated: Annotated[
        bool,
        Field(
            description="Whether the text was cut to fit the model. The part cut off has no labels."
        ),
    ]
    budget: Annotated[Budget, Field(description="The work that was done.")]
    trace: NotRequired[Trace]


class ClassifyResponse(TypedDict):
    """One result for each input, in the same order."""

    id: Annotated[str, Field(description="Id of the request, also in the header x-request-id.")]
    model: Annotated[str, Field(description="The model that answered.")]
    results: Annotated[
        list[ClassifyResult] | list[TagResult],
        Field(
            description="One result per input, in order. Results have `tokens` if the model's "
            "task is `tag`."
        ),
    ]
    timing: Annotated[Timing, Field(description="Where the time went.")]


class Alternative(Answer):
    """A token that could have been chosen."""

    token: str = Field(description="Text of the token; U+FFFD if it is part of a character.")
    logprob: float = Field(description="Log-probability that the model gives it.")


class TokenScore(Alternative):
    """Log-probability of a token of the answer, and of its alternatives."""

    top: list[Alternative] = Field(description="Most likely tokens, the most likely first.")


class GenerateResponse(Answer):
    """The text that continues the prompt, or translates it."""

    id: str = Field(description="Id of the request, also in the header x-request-id.")
    model: str = Field(description="The model that answered.")
    text: str = Field(description="The answer, without the prompt and the stop string.")
    finish_reason: FinishReason = Field(description=FINISH)
    seed: int = Field(description="Seed that was used. Send it to get this answer again.")
    logprobs: list[TokenScore] | None = Field(
        None, description="One entry per token of the answer, if `logprobs` was set."
    )
    usage: Usage = Field(description="Tokens read and written.")
    budget: Budget = Field(description="The work that was done.")
    timing: Timing = Field(description="Where the time went.")


class TokenChunk(Answer):
    """Data of an event without a name: one more token."""

    index: int = Field(description="Index of the token in the answer, from 0.")
    text: str = Field(
        description="Text to append. Empty while a character is incomplete or a stop string may "
        "have begun; a later event carries the text."
    )
    steps: int = Field(description="Steps taken for this token.")
    logprob: TokenScore | None = Field(
        None, description="Log-probability of the token, if `logprobs` was set."
    )


class DoneChunk(Answer):
    """Data of the event `done`, the last one of a stream that succeeded."""

    id: str = Field(description="Id of the request, also in the header x-request-id.")
    model: str = Field(description="The model that answered.")
    finish_reason: FinishReason = Field(description=FINISH)
    seed: int = Field(description="Seed that was used.")
    usage: Usage = Field(description="Tokens read and written.")
    budget: Budget = Field(description="The work that was done.")
    timing: Timing = Field(description="Where the time went.")


_STREAM_ABOUT = (
    "The answer. With `stream`: server-sent events, one without a name per token (TokenChunk), "
    "then exactly one `done` (DoneChunk) or `error` (ErrorResponse). If the connection breaks "
    "before that, the answer is incomplete."
)


@dataclass(frozen=True, slots=True)
class AnswerWriter:
    """Writes the answer to a generate request, whole or as a stream."""

    submission: Submission

    def whole(self, event: GeneratedEvent) -> Response:
        """The fields of GenerateResponse."""
        submission, (request,) = self.submission, self.submission.requests
        spent = submission.timing(event.span)
        body = {
            "id": submission.exchange.id,
            "model": submission.served.name,
            "text": event.text,
            "finish_reason": event.finish_reason,
            "seed": request.sampling.seed,
            "logprobs": None if request.logprobs is None else map(_score, event.logprobs),
            "usage": Usage.of(len(request.prompt), event.completion_tokens),
            "budget": budget_of(submission.decision),
            "timing": spent,
        }
        return answer_of(body, entries_of(event), server_timing(spent))

    def events(self, events: Sequence[TextEvent]) -> bytes:
        """Tokens as events without a name, and the end as `done` or `error`.

        Nothing follows the end: a deadline may pass while a token is on its way.
        """
        written = []
        for _, event in events:
            written.append(self._event(event))
            if not isinstance(event, TokenEvent):
                break
        return b"".join(written)

    def _event(self, event: Event) -> bytes:
        match event:
            case TokenEvent():
                return event_of(self._chunk(event))
            case GeneratedEvent():
                return event_of(self._done(event), b"event: done\n")
        assert isinstance(event, FailedEvent), "an event that no generation has"
        return event_of(event.error.body(), b"event: error\n")

    def _chunk(self, event: TokenEvent) -> dict[str, object]:
        """The fields of TokenChunk."""
        steps = self.submission.decision.steps
        chunk = {"index": event.index, "text": event.text, "steps": steps}
        return chunk if event.logprob is None else chunk | {"logprob": _score(event.logprob)}

    def _done(self, event: GeneratedEvent) -> dict[str, object]:
        """The fields of DoneChunk."""
        submission, (request,) = self.submission, self.submission.requests
        return {
            "id": submission.exchange.id,
            "model": submission.served.name,
            "finish_reason": event.finish_reason,
            "seed": request.sampling.seed,
            "usage": Usage.of(len(request.prompt), event.completion_tokens),
            "budget": budget_of(submission.decision),
            "timing": submission.timing(event.span),
        }


def _score(logprob: ScoredToken) -> dict[str, object]:
    """The fields of TokenScore."""
    return {
        "token": logprob.token,
        "logprob": logprob.logprob,
        "top": [{"token": token, "logprob": value} for token, value in logprob.top],
    }


_DEFAULT_LABELS = 5


def _labels_to_list(top_k: int | None, served: Served, labels: int) -> int:
    if top_k is not None and served.manifest.task == "tag":
        raise InvalidField(
            f"{served.name} gives each token one label: leave top_k out", param="top_k"
        )
    if top_k is None:
        return min(labels, _DEFAULT_LABELS)
    if top_k > labels:
        raise InvalidField(
            f"top_k is {top_k}, but {served.name} has {labels} labels: send at most {labels}",
            param="top_k",
        )
    return top_k


def _check_trace(asked: ClassifyRequest, served: Served) -> None:
    if asked.trace and not served.model.single_steps:
        raise InvalidField(
            f"{served.name} does not run step by step here, so there is nothing to trace: leave "
            "trace out",
            param="trace",
        )


def _results(
    event: ClassifiedEvent,
    inputs: list[InputRow],
    manifest: Manifest,
    top: int,
    decision: Decision,
) -> list[ClassifyResult] | list[TagResult]:
    answered = [
        (labelled, one, budget_of(decision.served_at(steps), spent))
        for labelled, steps, spent, one in zip(
            event.rows, event.steps, event.spent, inputs, strict=True
        )
    ]
    if manifest.task == "tag":
        return [_tagged(*one, manifest) for one in answered]
    return [_classified(*one, manifest.labels or (), top) for one in answered]


def _classified(
    labelled: Labelled, one: InputRow, budget: Budget, labels: tuple[str, ...], top: int
) -> ClassifyResult:
    scores = labelled.found
    assert not isinstance(scores, Tags)
    best: list[LabelScore] = [
        {"label": labels[index], "score": scores[index]} for index in ranked(scores)[:top]
    ]
    result: ClassifyResult = {
        "label": best[0]["label"],
        "score": best[0]["score"],
        "top": best,
        "truncated": one.truncated,
        "budget": budget,
    }
    if labelled.readouts:
        result["trace"] = [
            {"steps": step, "labels": [labels[likeliest]], "scores": [found[likeliest]]}
            for step, found in enumerate(labelled.readouts[: budget["steps"]], start=1)
            if not isinstance(found, Tags)
            for likeliest in ranked(found)[:1]
        ]
    return result


def _tagged(labelled: Labelled, one: InputRow, budget: Budget, manifest: Manifest) -> TagResult:
    tags = labelled.found
    assert isinstance(tags, Tags)
    result: TagResult = {
        "tokens": token_labels(tags, one, manifest),
        "truncated": one.truncated,
        "budget": budget,
    }
    if manifest.fills:
        result["text"] = filled(tags, one, manifest)
    if labelled.readouts:
        result["trace"] = [
            _readout(step, found, one, manifest)
            for step, found in enumerate(labelled.readouts[: budget["steps"]], start=1)
            if isinstance(found, Tags)
        ]
    return result


def _readout(step: int, tags: Tags, one: InputRow, manifest: Manifest) -> Readout:
    tokens = token_labels(tags, one, manifest)
    readout: Readout = {
        "steps": step,
        "labels": [token["label"] for token in tokens],
        "scores": [token["score"] for token in tokens],
    }
    if manifest.fills:
        readout["text"] = filled(tags, one, manifest)
    return readout


# The routes.


def native_routes(engine: Engine, reader: Reader) -> APIRouter:
    router = APIRouter(tags=["inference"], route_class=Route)

    @router.post(
        "/v1/classify",
        summary="Classify texts, images or clouds of points, or label the tokens of texts",
        response_model=ClassifyResponse,
        response_description="One result per input.",
        responses=RUN_PROBLEMS,
        openapi_extra=takes(ClassifyRequest),
    )
    async def classify(exchange: ThisExchange) -> Response:
        asked = await read_json(exchange, ClassifyRequest, reader)
        served = engine.catalog.pick(asked.model, LABELLING, asked.input[0].kind)
        manifest = served.manifest
        submission = Submission.of(exchange, engine, served, asked)
        top = _labels_to_list(asked.top_k, served, len(manifest.labels or ()))
        _check_trace(asked, served)
        check_count(asked.input, reader.settings.max_inputs)
        check_kinds(asked.input, manifest)
        texts = manifest.input.kind == "text"
        answering = submission.classify(
            reader,
            len(asked.input),
            sum(len(item.value) for item in asked.input) if texts else None,
            partial(read_items, asked.input, manifest, served.text, asked.truncate is not False),
            traced=asked.trace is True,
        )
        del asked  # while its rows wait for the model
        inputs, event = await answering
        spent = submission.timing(event.span)
        response: ClassifyResponse = {
            "id": submission.exchange.id,
            "model": served.name,
            "results": _results(event, inputs, manifest, top, submission.decision),
            "timing": spent,
        }
        answered = answer(response, server_timing(spent))
        engine.answer.observe(engine.clock() - event.span.ended_s)
        return answered

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
    async def generate(exchange: ThisExchange) -> Response:
        asked = await read_json(exchange, GenerateRequest, reader)
        tasks = WRITING if asked.num_beams is None else WRITING[::-1]
        served = engine.catalog.pick(asked.model, tasks)
        submission = Submission.of(exchange, engine, served, asked)
        prompt = asked.prompt
        await submission.write(
            reader, asked, 1, len(prompt), lambda: [served.codec.encode_prompt(prompt)]
        )
        writer = AnswerWriter(submission)
        if asked.stream:
            return await submission.stream(writer.events)
        (event,) = await submission.ends()
        return writer.whole(event)

    return router
