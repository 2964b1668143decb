"""The routes POST /v1/classify and POST /v1/generate."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Literal, NotRequired

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from serve.api.body import (
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
    EventStream,
    LazyList,
    NamedEvents,
    StreamChunk,
    Submission,
    TextEvent,
    answer,
    answer_of,
    check_answer,
    check_beams,
    check_count,
    check_max_tokens,
    drawn_seed,
    entries_of,
    filled,
    ranked,
    takes,
    token_labels,
    wish_of,
)
from serve.budget import Decision
from serve.bundle import LABELLING, Manifest
from serve.catalog import WRITING, Served
from serve.engine.engine import Engine
from serve.engine.job import (
    ClassifiedEvent,
    GeneratedEvent,
    Labelled,
    ScoredToken,
    Tags,
    TokenEvent,
)
from serve.errors import InvalidField
from serve.exchange import Route, ThisExchange
from serve.inputs.rows import InputRow, check_kinds, read_items
from serve.settings import Settings

# Shapes of answers.


_FINISH = (
    "`stop`: a stop string was reached, or the model ended its text. `length`: max_tokens were "
    "generated."
)


class LabelScore(TypedDict):
    """A label and how likely it is."""

    label: Annotated[str, Field(description="One of the model's labels.")]
    score: Annotated[float, Field(description="Probability that the model gives it.")]


class ClassifyResult(TypedDict):
    """The answer for one input."""

    label: Annotated[str, Field(description="Most likely label.")]
    score: Annotated[float, Field(description="Probability that the model gives it.")]
    top: Annotated[
        list[LabelScore], Field(description="Most likely labels, the most likely first.")
    ]
    truncated: Annotated[bool, Field(description="Whether a text was cut to fit the model.")]
    budget: Annotated[Budget, Field(description="The work that was done.")]
    trace: NotRequired[
        Annotated[
            list["Readout"],
            Field(
                description="What the model would have answered after "
                "each step, if `trace` was set."
            ),
        ]
    ]


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
    trace: NotRequired[
        Annotated[
            list["Readout"],
            Field(
                description="What the model would have answered after "
                "each step, if `trace` was set."
            ),
        ]
    ]


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


class TokenScore(Answer):
    """Log-probability of a token of the answer, and of its alternatives."""

    token: str = Field(description="Text of the token; U+FFFD if it is part of a character.")
    logprob: float = Field(description="Log-probability that the model gives it.")
    top: list[Alternative] = Field(description="Most likely tokens, the most likely first.")


class GenerateResponse(Answer):
    """The text that continues the prompt, or translates it."""

    id: str = Field(description="Id of the request, also in the header x-request-id.")
    model: str = Field(description="The model that answered.")
    text: str = Field(description="The answer, without the prompt and the stop string.")
    finish_reason: Literal["stop", "length"] = Field(description=_FINISH)
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
    finish_reason: Literal["stop", "length"] = Field(description=_FINISH)
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

    def chunk(self, event: TokenEvent) -> TokenChunk:
        return TokenChunk(
            index=event.index,
            text=event.text,
            steps=self.submission.decision.steps,
            logprob=None if event.logprob is None else _token_score(event.logprob),
        )

    def done(self, event: GeneratedEvent) -> DoneChunk:
        return DoneChunk(
            id=self.submission.id,
            model=self.submission.served.name,
            finish_reason=event.finish_reason,
            seed=self.submission.wishes[0].sampling.seed,
            usage=self._usage(event),
            budget=budget_of(self.submission.decision),
            timing=self.submission.timing(event.span),
        )

    def whole(self, event: GeneratedEvent, spent: Timing) -> dict[str, object]:
        """The fields of GenerateResponse, as a dictionary because it may be large."""
        wish = self.submission.wishes[0]
        return {
            "id": self.submission.id,
            "model": self.submission.served.name,
            "text": event.text,
            "finish_reason": event.finish_reason,
            "seed": wish.sampling.seed,
            "logprobs": None if wish.logprobs is None else LazyList(map(_score, event.logprobs)),
            "usage": self._usage(event),
            "budget": budget_of(self.submission.decision),
            "timing": spent,
        }

    def written(self, events: Sequence[TextEvent]) -> StreamChunk:
        return NamedEvents(self.chunk, self.done).write([event for _, event in events])

    def _usage(self, event: GeneratedEvent) -> Usage:
        prompt, completion = len(self.submission.wishes[0].prompt), event.completion_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
        )


def generate_routes(settings: Settings, engine: Engine, reader: Reader) -> APIRouter:
    """The route, for an engine."""
    router = APIRouter(tags=["inference"], route_class=Route)

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
        max_tokens = asked.limit(settings.max_tokens)
        check_max_tokens(max_tokens, settings)
        check_answer(1, max_tokens, asked.logprobs, settings)
        check_beams(asked, served)
        prompt = await reader.read(
            exchange,
            len(asked.prompt),
            submission.deadline,
            lambda: served.codec.encode_prompt(asked.prompt),
        )
        submission.generate((wish_of(asked, served, prompt, drawn_seed(), max_tokens),))
        return await _run(AnswerWriter(submission))

    return router


async def _run(writer: AnswerWriter) -> Response:
    async with AsyncExitStack() as work:
        running = await work.enter_async_context(writer.submission.running())
        events = await running.first()
        if writer.submission.wishes[0].stream:
            return EventStream(
                events,
                running.events,
                work.pop_all(),
                writer.written,
                running.stream_headers,
            )
    _, event = events[0]
    assert isinstance(event, GeneratedEvent)
    spent = writer.submission.timing(event.span)
    return answer_of(writer.whole(event, spent), entries_of(event), server_timing(spent))


def _score(logprob: ScoredToken) -> dict[str, object]:
    """The fields of TokenScore."""
    return {
        "token": logprob.token,
        "logprob": logprob.logprob,
        "top": [{"token": token, "logprob": value} for token, value in logprob.top],
    }


def _token_score(logprob: ScoredToken) -> TokenScore:
    return TokenScore(
        token=logprob.token,
        logprob=logprob.logprob,
        top=[Alternative(token=token, logprob=value) for token, value in logprob.top],
    )


# POST /v1/classify


_DEFAULT_LABELS = 5


def classify_routes(settings: Settings, engine: Engine, reader: Reader) -> APIRouter:
    """The route, for an engine."""
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
        check_count(asked.input, settings.max_inputs)
        check_kinds(asked.input, manifest)
        submission.refuse_early(len(asked.input))
        inputs = await reader.read(
            exchange,
            _characters(asked),
            submission.deadline,
            lambda: read_items(asked.input, manifest, served.text, asked.truncate is not False),
        )
        event = await submission.classify(inputs, traced=asked.trace is True)
        spent = submission.timing(event.span)
        response: ClassifyResponse = {
            "id": submission.id,
            "model": served.name,
            "results": _results(event, inputs, manifest, top, submission.decision),
            "timing": spent,
        }
        answered = answer(response, server_timing(spent))
        engine.observe_answer(engine.clock() - event.span.ended_s)
        return answered

    return router


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


def _characters(asked: ClassifyRequest) -> int | None:
    """The length of the texts to encode; None for other inputs."""
    total = 0
    for item in asked.input:
        if item.characters is None:
            return None
        total += item.characters
    return total


def _results(
    event: ClassifiedEvent,
    inputs: list[InputRow],
    manifest: Manifest,
    top: int,
    decision: Decision,
) -> list[ClassifyResult] | list[TagResult]:
    answered = [
        (labelled, one, budget_of(decision.served_at(steps), evaluations))
        for labelled, steps, evaluations, one in zip(
            event.rows, event.steps, event.evaluations, inputs, strict=True
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
