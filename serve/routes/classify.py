"""POST /v1/classify: texts, images or points in, labels out.

Knows the shape of requests and answers; the engine knows how they are run.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve.budget import Decision
from serve.catalog import Served
from serve.engine.engine import Engine
from serve.engine.events import ClassifiedEvent
from serve.errors import InvalidField, Unprocessable
from serve.inputs.intake import Intake, check_kinds, read_items
from serve.routes.labelling import labelled, ranked, refuse_early
from serve.routes.shared import (
    RUN_PROBLEMS,
    Encoding,
    answer,
    decide_budget,
    request_id,
    takes,
    timing,
)
from serve.settings import Settings
from serve.wire.answers import (
    ClassifyResponse,
    ClassifyResult,
    LabelScore,
    budget_of,
    server_timing,
)
from serve.wire.body import read_json
from serve.wire.schemas import ClassifyRequest

_DEFAULT_LABELS = 5


def classify_routes(settings: Settings, engine: Engine) -> APIRouter:
    """The route, for an engine."""
    router = APIRouter(tags=["inference"])
    encoding = Encoding()

    @router.post(
        "/v1/classify",
        summary="Label one text, image or cloud of points, or several",
        response_model=ClassifyResponse,
        response_description="A result for each input.",
        responses=RUN_PROBLEMS,
        openapi_extra=takes(ClassifyRequest),
    )
    async def classify(request: Request) -> Response:
        asked = await read_json(
            request, ClassifyRequest, settings.max_body_bytes, settings.body_timeout_s
        )
        served = engine.catalog.pick(asked.model, ("classify",), asked.input[0].kind)
        manifest = served.manifest
        decision = decide_budget(request, served, asked)
        labels = manifest.labels or ()
        top = _labels_to_list(asked.top_k, served, len(labels))
        _check_count(asked, settings.max_inputs)
        check_kinds(asked.input, manifest)
        refuse_early(request, engine, served, asked, decision, len(asked.input))
        taken = await encoding.run(
            request,
            _characters(asked),
            lambda: read_items(
                asked.input, manifest.input, served.text, asked.truncate is not False
            ),
        )
        event = await labelled(request, engine, served, asked, decision, taken)
        spent = timing(request, engine, event.span)
        response: ClassifyResponse = {
            "id": request_id(request),
            "model": served.name,
            "results": _results(event, taken, labels, top, decision),
            "timing": spent,
        }
        answered = answer(response, server_timing(spent))
        engine.latency.observe_answer(engine.clock() - event.span.ended_s)
        return answered

    return router


def _labels_to_list(top_k: int | None, served: Served, labels: int) -> int:
    if top_k is None:
        return min(labels, _DEFAULT_LABELS)
    if top_k > labels:
        raise InvalidField(
            f"top_k is {top_k}, but {served.name} has {labels} labels: send at most {labels}",
            param="top_k",
        )
    return top_k


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
    event: ClassifiedEvent,
    taken: list[Intake],
    labels: tuple[str, ...],
    top: int,
    decision: Decision,
) -> list[ClassifyResult]:
    results: list[ClassifyResult] = []
    for scores, steps, evaluations, one in zip(
        event.scores, event.steps, event.evaluations, taken, strict=True
    ):
        best: list[LabelScore] = [
            {"label": labels[index], "score": scores[index]} for index in ranked(scores)[:top]
        ]
        results.append(
            {
                **best[0],
                "top": best,
                "truncated": one.truncated,
                "budget": budget_of(decision.served_at(steps), evaluations),
            }
        )
    return results
