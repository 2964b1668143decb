"""GET /v1/models and below: what is served, and what each step costs and brings.

Knows manifests and predictions; deliberately not how either is made.
"""

from collections.abc import Mapping

from fastapi import APIRouter
from starlette.responses import Response

from serve.bundle import ImageInput, Manifest, PointsInput, Rung, TextInput
from serve.catalog import Served
from serve.engine.classify import MARGIN
from serve.engine.engine import Engine
from serve.engine.job import Kind, LaneKey
from serve.routes.shared import answer, problems
from serve.wire.cards import (
    Interval,
    LadderResponse,
    LadderRung,
    ModelCard,
    ModelList,
    TakesImage,
    TakesPoints,
    TakesText,
)

_UNKNOWN = problems(e404="No such model is served.")


def model_routes(engine: Engine) -> APIRouter:
    """The routes, for an engine."""
    router = APIRouter(tags=["models"])

    @router.get(
        "/v1/models",
        summary="All models that are served",
        response_model=ModelList,
        response_description="Every model, in the order in which they were loaded.",
    )
    async def models() -> Response:
        ready = engine.readiness
        return answer(ModelList(data=[_card(served, ready) for served in engine.catalog]))

    @router.get(
        "/v1/models/{name}",
        summary="One model",
        response_model=ModelCard,
        response_description="The model of that name.",
        responses=_UNKNOWN,
    )
    async def model(name: str) -> Response:
        return answer(_card(engine.catalog.find(name), engine.readiness))

    @router.get(
        "/v1/models/{name}/ladder",
        summary="The operating points of a model",
        response_model=LadderResponse,
        response_description="Every rung, with its quality and latency.",
        responses=_UNKNOWN,
    )
    async def ladder(name: str) -> Response:
        served = engine.catalog.find(name)
        manifest = served.manifest
        return answer(
            LadderResponse(
                model=manifest.name,
                task=manifest.task,
                depth=manifest.depth,
                dial=manifest.dial,
                grid_steps=manifest.grid_steps,
                input=_takes(manifest),
                metric=manifest.rungs[0].quality.metric,
                full_steps=manifest.full_steps,
                default_steps=manifest.default_steps,
                caution=round(engine.latency.caution(served.key) * MARGIN, 3),
                answer_ms=round(engine.latency.answer_s * 1000, 3),
                rungs=[_rung(served, rung, engine) for rung in manifest.rungs],
            )
        )

    return router


def _card(served: Served, ready: Mapping[str, bool]) -> ModelCard:
    manifest = served.manifest
    return ModelCard(
        id=manifest.name,
        created=int(served.loaded_at_s),
        ready=ready.get(served.name, False),
        task=manifest.task,
        depth=manifest.depth,
        dial=manifest.dial,
        grid_steps=manifest.grid_steps,
        input=_takes(manifest),
        method=manifest.method,
        steps=list(manifest.steps),
        efforts={rung.effort: rung.steps for rung in manifest.rungs if rung.effort is not None},
        default_steps=manifest.default_steps,
        full_steps=manifest.full_steps,
        max_disagreement=[
            level.max_disagreement
            for level in (manifest.calibration.levels if manifest.calibration else ())
            if level.threshold is not None
        ],
        traces=served.model.single_steps,
        metric=manifest.rungs[0].quality.metric,
        labels=None if manifest.labels is None else list(manifest.labels),
        max_tokens=(manifest.input.max_tokens if isinstance(manifest.input, TextInput) else None),
        target_max_tokens=manifest.target_max_tokens,
        parameters=manifest.shape.parameters,
        precision=manifest.precision,
        cache=manifest.cache,
        card=dict(manifest.card),
    )


def _kind(served: Served) -> Kind:
    return "classify" if served.manifest.labelled else "generate"


def _takes(manifest: Manifest) -> TakesText | TakesImage | TakesPoints:
    match manifest.input:
        case TextInput(max_tokens=max_tokens):
            return TakesText(kind="text", max_tokens=max_tokens)
        case ImageInput(channels=channels, height=height, width=width):
            return TakesImage(kind="image", channels=channels, height=height, width=width)
        case PointsInput(max_points=max_points, dimensions=dimensions):
            return TakesPoints(kind="points", max_points=max_points, dimensions=dimensions)


def _rung(served: Served, rung: Rung, engine: Engine) -> LadderRung:
    measured = served.measured(rung.steps)
    predicted_s = engine.predict_s(LaneKey(served.key, _kind(served), rung.steps), measured)
    quality = rung.quality
    return LadderRung(
        steps=rung.steps,
        method=rung.method,
        nfe=rung.nfe,
        effort=rung.effort,
        quality=Interval(
            value=quality.value,
            low=quality.low,
            high=quality.high,
            samples=quality.samples,
            exact=quality.exact,
        ),
        latency_ms=None if measured is None else measured.median_ms,
        predicted_ms=None if predicted_s is None else round(predicted_s * 1000, 3),
    )
