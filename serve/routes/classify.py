"""POST /v1/classify: texts, images or points in, labels out: of each input, or of its tokens.

Knows the shape of requests and answers; the engine knows how they are run.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve.budget import Decision
from serve.bundle import LABELLING, Manifest
from serve.catalog import Served
from serve.engine.engine import Engine
from serve.engine.job import ClassifiedEvent, Labelled, Tags
from serve.errors import InvalidField, Unprocessable
from serve.inputs.rows import Intake, check_kinds, read_items
from serve.routes.labelling import filled, labelled, ranked, refuse_early, token_labels
from serve.routes.shared import (
    RUN_PROBLEMS,
    answer,
    deadline_of,
    decide_budget,
    request_id,
    takes,
    timing,
)
from serve.settings import Settings
from serve.wire.answers import (
    Budget,
    ClassifyResponse,
    ClassifyResult,
    LabelScore,
    Readout,
    TagResult,
    budget_of,
    server_timing,
)
from serve.wire.body import read_json
from serve.wire.reader import Reader
from serve.wire.schemas import ClassifyRequest

_DEFAULT_LABELS = 5


def classify_routes(settings: Settings, engine: Engine, reader: Reader) -> APIRouter:
    """The route, for an engine."""
    router = APIRouter(tags=["inference"])

    @router.post(
        "/v1/classify",
        summary="Label one text, image or cloud of points, or several, or every token of texts",
        response_model=ClassifyResponse,
        response_description="A result for each input.",
        responses=RUN_PROBLEMS,
        openapi_extra=takes(ClassifyRequest),
    )
    async def classify(request: Request) -> Response:
        asked = await read_json(request, ClassifyRequest, reader)
        served = engine.catalog.pick(asked.model, LABELLING, asked.input[0].kind)
        manifest = served.manifest
        decision = decide_budget(request, served, asked)
        top = _labels_to_list(asked.top_k, served, len(manifest.labels or ()))
        _check_trace(asked, served)
        _check_count(asked, settings.max_inputs)
        check_kinds(asked.input, manifest)
        refuse_early(request, engine, served, asked, decision, len(asked.input))
        taken = await reader.read(
            request,
            _characters(asked),
            deadline_of(request, asked),
            lambda: read_items(asked.input, manifest, served.text, asked.truncate is not False),
        )
        event = await labelled(
            request, engine, served, asked, decision, taken, traced=asked.trace is True
        )
        spent = timing(request, engine, event.span)
        response: ClassifyResponse = {
            "id": request_id(request),
            "model": served.name,
            "results": _results(event, taken, manifest, top, decision),
            "timing": spent,
        }
        answered = answer(response, server_timing(spent))
        engine.latency.observe_answer(engine.clock() - event.span.ended_s)
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


def _check_count(asked: ClassifyRequest, max_inputs: int) -> None:
    if len(asked.input) > max_inputs:
        raise Unprocessable(
            f"input has {len(asked.input)} items, but this server takes at most {max_inputs} at "
            "once: send several requests",
            param="input",
        )


def _characters(asked: ClassifyRequest) -> int | None:
    """How much text there is to encode; None where there is something else to read."""
    total = 0
    for item in asked.input:
        if item.characters is None:
            return None
        total += item.characters
    return total


def _results(
    event: ClassifiedEvent, taken: list[Intake], manifest: Manifest, top: int, decision: Decision
) -> list[ClassifyResult] | list[TagResult]:
    answered = [
        (labelled, one, budget_of(decision.served_at(steps), evaluations))
        for labelled, steps, evaluations, one in zip(
            event.rows, event.steps, event.evaluations, taken, strict=True
        )
    ]
    if manifest.task == "tag":
        return [_tagged(*one, manifest) for one in answered]
    return [_classified(*one, manifest.labels or (), top) for one in answered]


def _classified(
    labelled: Labelled, one: Intake, budget: Budget, labels: tuple[str, ...], top: int
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


def _tagged(labelled: Labelled, one: Intake, budget: Budget, manifest: Manifest) -> TagResult:
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


def _readout(step: int, tags: Tags, one: Intake, manifest: Manifest) -> Readout:
    tokens = token_labels(tags, one, manifest)
    readout: Readout = {
        "steps": step,
        "labels": [token["label"] for token in tokens],
        "scores": [token["score"] for token in tokens],
    }
    if manifest.fills:
        readout["text"] = filled(tags, one, manifest)
    return readout
