"""Models: cards and step counts, health and metrics, and the admin routes that load and unload."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.responses import Response

from serve.api.body import METRIC, Answer, Health, OpenAIError, Reader, read_json
from serve.api.submission import answer, problems, takes
from serve.budget import efforts_of
from serve.bundle import (
    Cache,
    Depth,
    Dial,
    Effort,
    Method,
    Metric,
    Rung,
    Task,
    TextInput,
)
from serve.catalog import Served
from serve.engine.classify import COST_MARGIN
from serve.engine.engine import Engine
from serve.engine.job import Kind, LaneKey
from serve.errors import AdminOff, NotReady, Unauthorized
from serve.exchange import Exchange, Route, ThisExchange
from serve.keys import Keys, secret_of
from serve.loading import Loading
from serve.settings import ADMIN_KEY_VARIABLE

# Model cards and ladders.


_DIAL = (
    "What `steps` change. `resolution`: all step counts cross the same depth, more steps in "
    "finer detail. `time`: every step has the same size, so fewer steps end earlier."
)
_GRID = "With the dial `time`, the step count that the model was trained with; else null."
_DEPTH = (
    "`ode`: one set of weights for every step count. `chain`: one ODE per block. `fixed`: "
    "weights differ by depth, so there is one step count."
)


class Mirror(Answer):
    """A part of a manifest, as answers show it."""

    model_config = ConfigDict(from_attributes=True)


class TakesText(Mirror):
    """A model for texts."""

    kind: Literal["text"] = Field(description="Always `text`.")
    max_tokens: int = Field(description="Most tokens of a text.")
    exact: bool = Field(description="Whether every text must have `max_tokens` tokens.")


class TakesImage(Mirror):
    """A model for images."""

    kind: Literal["image"] = Field(description="Always `image`.")
    channels: int = Field(description="1: grey, 2: grey and alpha, 3: RGB, 4: RGB and alpha.")
    height: int = Field(description="Height in pixels to which an image is resized.")
    width: int = Field(description="Width in pixels to which an image is resized.")


class TakesPoints(Mirror):
    """A model for clouds of points."""

    kind: Literal["points"] = Field(description="Always `points`.")
    max_points: int = Field(description="Most points of a cloud.")
    dimensions: int = Field(description="Coordinates per point.")


Takes = TakesText | TakesImage | TakesPoints
_TAKES: TypeAdapter[Takes] = TypeAdapter(Takes)


class Interval(Mirror):
    """A measured quality with its confidence interval."""

    value: float = Field(description="Measured on held-out data.")
    low: float = Field(description="Lower end of the interval.")
    high: float = Field(description="Upper end of the interval.")
    samples: int = Field(description="Number of samples that were measured.")
    exact: float | None = Field(
        None,
        description="For a model that labels tokens: the share of texts without a wrong label.",
    )


class LadderRung(Answer):
    """One step count of a model, with its quality and latency."""

    steps: int = Field(description="Value of `steps` in a request.")
    method: Method = Field(description="Integration method of a step.")
    nfe: int = Field(description="Passes through the model's repeated blocks: the true cost.")
    effort: Effort | None = Field(
        description="Value of `effort` in a request, if this step count has a name."
    )
    quality: Interval = Field(description="Quality on held-out data, in `metric`.")
    latency_ms: float | None = Field(
        description="Latency measured when the bundle was made: one input of the greatest "
        "length (classify), or one token after it (generate). Null if it was not "
        "measured."
    )
    predicted_ms: float | None = Field(
        description="Predicted latency on this server now, including the wait in the queue. "
        "Null until the server can tell."
    )


class LadderResponse(Answer):
    """Every step count of a model."""

    model: str = Field(description="Name of the model.")
    task: Task = Field(description="Task of the model.")
    depth: Depth = Field(description=_DEPTH)
    dial: Dial = Field(description=_DIAL)
    grid_steps: int | None = Field(description=_GRID)
    input: Takes = Field(description="Inputs that the model takes.")
    metric: Metric = Field(description=METRIC)
    full_steps: int = Field(description="Largest step count.")
    default_steps: int = Field(description="Step count of a request without budget fields.")
    caution: float = Field(
        description="Safety factor of deadlines: a step count is used for `deadline_ms` only if "
        "predicted_ms times this fits; for a generation, the time of all its "
        "tokens. Some calls take longer than predicted."
    )
    answer_ms: float = Field(
        description="Time from the end of the last model call until the answer is sent. It has "
        "to fit into `deadline_ms` too."
    )
    rungs: list[LadderRung] = Field(description="The step counts, ascending.")


class DialRange(Mirror):
    """What more steps buy: quality at the last step count less that at the first."""

    value: float = Field(description="The mean over held-out rows, in `metric`; above 0 is better.")
    low: float = Field(description="Lower end of its 95 % interval, of paired rows.")
    high: float = Field(description="Upper end of that interval.")


class ModelCard(Answer):
    """A model that is served."""

    id: str = Field(description="Value of `model` in a request.")
    object: Literal["model"] = Field(default="model", description="Always `model`.")
    created: int = Field(description="When this server loaded the model, in Unix seconds.")
    ready: bool = Field(
        description="Whether the model takes requests: its last call did not fail, no call is "
        "stuck, and the server is not shutting down."
    )
    owned_by: Literal["stepdial"] = Field(default="stepdial", description="Always `stepdial`.")
    task: Task = Field(
        description="Task of the model. `classify` and `tag` (a label per token) are served by "
        "/v1/classify, `generate` and `translate` by /v1/generate."
    )
    depth: Depth = Field(description=_DEPTH)
    dial: Dial = Field(description=_DIAL)
    grid_steps: int | None = Field(description=_GRID)
    input: Takes = Field(description="Inputs that the model takes.")
    method: Method = Field(description="Integration method of a step.")
    steps: list[int] = Field(description="Possible values of `steps`.")
    efforts: dict[str, int] = Field(description="The step count that each word of `effort` means.")
    default_steps: int = Field(description="Step count of a request without budget fields.")
    full_steps: int = Field(description="Largest step count.")
    range: DialRange | None = Field(
        description="What more steps buy on held-out data. Null if it was not measured."
    )
    max_disagreement: list[float] = Field(
        description="Values of `max_disagreement` at which answers can stop early; empty if the "
        "model was not calibrated for it."
    )
    traces: bool = Field(description="Whether /v1/classify accepts `trace` for this model.")
    metric: Metric = Field(description="Metric of the quality.")
    labels: list[str] | None = Field(
        description="Labels of a classifier or tagger; null for other tasks."
    )
    max_tokens: int | None = Field(
        description="Most tokens that the model sees at once; for a translator, tokens of the "
        "text to translate. Null for images and points."
    )
    target_max_tokens: int | None = Field(
        description="Most tokens of a translation; null for other tasks."
    )
    parameters: int = Field(description="Number of weights.")
    precision: str = Field(
        description="Number format of the weights, such as `fp32`, `fp16` or `int8`."
    )
    cache: Cache = Field(
        description="How the KV cache is stored: as floating-point numbers of 32 (`kv`) or "
        "16 bits (`kv_fp16`) or as bytes (`kv_int8`); `none` for models that generate no text."
    )
    card: dict[str, Any] = Field(
        description="The model card: facts given by the makers of the model."
    )


class ModelList(Answer):
    """All models that are served."""

    object: Literal["list"] = Field(default="list", description="Always `list`.")
    data: list[ModelCard] = Field(description="The models, in the order in which their names came.")


_NO_MODEL = "No model with this name is served."
_UNKNOWN = problems(OpenAIError, e404=_NO_MODEL)


def model_routes(engine: Engine) -> APIRouter:
    router = APIRouter(tags=["models"], route_class=Route)

    @router.get(
        "/v1/models",
        summary="List the served models",
        response_model=ModelList,
        response_description="Every model, in the order in which their names came.",
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
        summary="Step counts of a model, with quality and latency",
        response_model=LadderResponse,
        response_description="Every step count, with its quality and latency.",
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
                input=_TAKES.validate_python(manifest.input),
                metric=manifest.rungs[0].quality.metric,
                full_steps=manifest.full_steps,
                default_steps=manifest.default_steps,
                caution=round(engine.cost(served).caution * COST_MARGIN, 3),
                answer_ms=round(engine.answer.seconds * 1000, 3),
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
        input=_TAKES.validate_python(manifest.input),
        method=manifest.method,
        steps=list(manifest.steps),
        efforts={word: rung.steps for word, rung in efforts_of(manifest).items()},
        default_steps=manifest.default_steps,
        full_steps=manifest.full_steps,
        range=None if manifest.range is None else DialRange.model_validate(manifest.range),
        max_disagreement=manifest.early_levels,
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


def _rung(served: Served, rung: Rung, engine: Engine) -> LadderRung:
    measured = served.measured(rung.steps)
    predicted_s = engine.predict_s(LaneKey(served.key, _kind(served), rung.steps), measured)
    return LadderRung(
        steps=rung.steps,
        method=rung.method,
        nfe=rung.nfe,
        effort=rung.effort,
        quality=Interval.model_validate(rung.quality),
        latency_ms=None if measured is None else measured.median_ms,
        predicted_ms=None if predicted_s is None else round(predicted_s * 1000, 3),
    )


# Requests and answers of the admin routes.


class LoadRequest(BaseModel):
    """A bundle to load."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    bundle: str = Field(
        min_length=1,
        max_length=4096,
        description="Folder of the bundle on the server, inside one of the folders that it may "
        "load from (--admin-folders). The bundle's manifest gives the model its "
        "name.",
        examples=["/models/topics"],
    )


class LoadedModel(Answer):
    """A model in memory."""

    name: str = Field(description="Name of the model, as requests send it.")
    edition: int = Field(
        description="0 for a model loaded at start; each later load gets a new number."
    )
    task: Task = Field(description="Task of the model.")
    bundle: str = Field(description="Folder that it was loaded from.")
    loaded_at: int = Field(description="When it was loaded, in Unix seconds.")
    state: Literal["serving", "leaving"] = Field(
        description="`serving`, or `leaving`: it gets no new requests and is unloaded when its "
        "last one is answered."
    )
    requests: int = Field(description="Requests that use it now.")

    @classmethod
    def of(cls, served: Served, state: Literal["serving", "leaving"]) -> Self:
        return cls(
            name=served.name,
            edition=served.edition,
            task=served.manifest.task,
            bundle=str(served.bundle.folder),
            loaded_at=int(served.loaded_at_s),
            state=state,
            requests=served.users,
        )


class LoadedModels(Answer):
    """Every model in memory."""

    models: list[LoadedModel] = Field(description="The models, those being served first.")


class LoadResponse(Answer):
    """The model that was loaded."""

    loaded: LoadedModel = Field(description="The new model. It answers every request from now on.")
    replaced: LoadedModel | None = Field(
        None, description="The model that it replaced, if there was one."
    )
    seconds: float = Field(description="Time from reading the bundle to serving it.")


class UnloadResponse(Answer):
    """The model that was unloaded."""

    unloaded: LoadedModel = Field(description="The model. It gets no new requests.")


# The admin routes. They need an admin key, which is not one of the API keys.


_KEY_PROBLEMS = problems(
    e401="The admin key is missing or unknown.",
    e403="The server has no admin key, or a web page of another origin sent the request.",
    e429="The admin key has sent too many requests; `Retry-After` says when to try again.",
)
_LOAD_PROBLEMS = problems(
    e400="The body is not valid JSON.",
    e403="The server has no admin key, or models may not be loaded from this folder.",
    e408="The body did not arrive in time.",
    e413="The body is too large.",
    e415="The body is packed in a way that is not known.",
    e422="The body has an unknown or wrong field, or the bundle cannot be served. Nothing was "
    "changed.",
    e503="The server is shutting down.",
)


def admin_routes(engine: Engine, loading: Loading, keys: Keys, reader: Reader) -> APIRouter:
    router = APIRouter(tags=["admin"], route_class=Route)

    @router.get(
        "/admin/models",
        summary="List the models in memory",
        response_model=LoadedModels,
        response_description="Models that are served, and models that are leaving.",
        responses=_KEY_PROBLEMS,
    )
    async def loaded(exchange: ThisExchange) -> Response:
        _check_key(exchange, keys)
        serving = [LoadedModel.of(served, "serving") for served in engine.catalog]
        leaving = [LoadedModel.of(served, "leaving") for served in engine.leaving]
        return answer(LoadedModels(models=serving + leaving))

    @router.post(
        "/admin/models",
        summary="Load a bundle, replacing the model of the same name",
        response_model=LoadResponse,
        response_description="The model is served. Requests that use the replaced model finish "
        "there.",
        responses={**_KEY_PROBLEMS, **_LOAD_PROBLEMS},
        openapi_extra=takes(LoadRequest),
    )
    async def load(exchange: ThisExchange) -> Response:
        _check_key(exchange, keys)
        asked = await read_json(exchange, LoadRequest, reader)
        change = await loading.load(loading.allowed(asked.bundle))
        return answer(
            LoadResponse(
                loaded=LoadedModel.of(change.loaded, "serving"),
                replaced=(
                    None if change.replaced is None else LoadedModel.of(change.replaced, "leaving")
                ),
                seconds=round(change.seconds, 3),
            )
        )

    @router.delete(
        "/admin/models/{name}",
        summary="Unload a model",
        response_model=UnloadResponse,
        response_description="The model gets no new requests; running ones finish.",
        responses={**_KEY_PROBLEMS, **problems(e404=_NO_MODEL)},
    )
    async def unload(exchange: ThisExchange, name: str) -> Response:
        _check_key(exchange, keys)
        served = await loading.unload(name)
        return answer(UnloadResponse(unloaded=LoadedModel.of(served, "leaving")))

    return router


def _check_key(exchange: Exchange, keys: Keys) -> None:
    """AdminOff if no admin key is set, Unauthorized if the request has none that is known."""
    if not keys.in_use:
        raise AdminOff(
            f"the admin routes are off: set {ADMIN_KEY_VARIABLE} to a key of your own, or name a "
            "file with --admin-keys-file, and start the server again"
        )
    secret = secret_of(exchange.header_list)
    holder = None if secret is None else keys.holder_of(secret)
    if holder is None:
        raise Unauthorized(
            "this needs an admin key, which is not one of the API keys: send it as "
            "`Authorization: Bearer KEY`"
        )
    holder.enter()
    exchange.holder = holder  # who leaves when the request ends


# Health and metrics. They never wait for the engine's thread, so they answer under any load.


_READINESS: dict[str, Any] = {
    "response_model": Health,
    "response_description": "The server takes requests.",
    "responses": problems(
        e503="The server is shutting down, a model call is stuck, or every model fails."
    ),
}


# Older readers refuse a later version, whose only addition is names in quotes.
_PLAIN = "text/plain; version=0.0.4; charset=utf-8"


def health_routes(engine: Engine) -> APIRouter:
    router = APIRouter(tags=["operations"], route_class=Route)

    @router.get(
        "/health/live",
        summary="Liveness probe",
        response_model=Health,
        response_description="The process is alive.",
        responses=problems(e503="The engine has stopped: restart the process."),
    )
    async def live() -> Response:
        if engine.dead:
            raise NotReady("the engine has stopped: restart the server")
        return answer(Health(status="live"))

    @router.get("/health/ready", summary="Readiness probe", **_READINESS)
    async def ready() -> Response:
        check_ready(engine, engine.catalog)
        return answer(Health(status="ready"))

    @router.get(
        "/health",
        summary="The same as /health/ready",
        description="The path that many load balancers check by default.",
        **_READINESS,
    )
    async def health() -> Response:
        return await ready()

    @router.get(
        "/metrics",
        summary="Metrics for Prometheus",
        response_class=Response,
        responses={
            200: {
                "content": {"text/plain": {"schema": {"type": "string"}}},
                "description": "Prometheus text format.",
            }
        },
    )
    async def metrics() -> Response:
        # Takes long enough to make streams pause, so it runs on another thread.
        text = await asyncio.to_thread(engine.metrics.exposition)
        return Response(text, headers={"content-type": _PLAIN})

    return router


def check_ready(engine: Engine, served: Iterable[Served]) -> None:
    """NotReady unless at least one of these models works."""
    engine.check_open()
    names = [one.name for one in served]
    if not names:
        raise NotReady("no model is served: load one with POST /admin/models")
    if set(names) <= {*engine.failing}:
        which = ", ".join(names)
        raise NotReady(f"the last call of {which} failed: it is tried again every second")
