"""What is served: model cards and ladders, health and metrics, and the admin routes that change
it.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Literal, Self

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from serve.api.body import Reader, read_json
from serve.api.fields import METRIC, Answer, Health
from serve.api.submission import answer, problems, takes
from serve.budget import efforts_of
from serve.bundle import (
    Cache,
    Depth,
    Dial,
    Effort,
    ImageInput,
    Manifest,
    Method,
    Metric,
    PointsInput,
    Rung,
    Task,
    TextInput,
)
from serve.catalog import Served
from serve.engine.classify import MARGIN
from serve.engine.engine import Engine
from serve.engine.job import Kind, LaneKey
from serve.errors import AdminOff, NotReady, Unauthorized
from serve.keys import Keys
from serve.loading import Loading
from serve.middleware import secret_of
from serve.settings import ADMIN_KEY_VARIABLE

# What clients learn of the models: their cards and their ladders, every field documented.


_DIAL = (
    "What `steps` turn: `resolution`, as all steps cross the same depth, more of them more finely; "
    "or `time`, as each step is of one size, so that fewer steps end earlier."
)
_GRID = "With the dial `time`, the steps that the model was trained with; null otherwise."
_DEPTH = (
    "`ode`: one set of weights for every number of steps; `chain`: one ODE for each block; "
    "`fixed`: weights that differ by depth, so that there is one rung."
)


class TakesText(Answer):
    """A model of texts."""

    kind: Literal["text"] = Field(description="Always `text`.")
    max_tokens: int = Field(description="The most tokens.")


class TakesImage(Answer):
    """A model of images."""

    kind: Literal["image"] = Field(description="Always `image`.")
    channels: int = Field(description="1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha.")
    height: int = Field(description="Rows that an image is resized to.")
    width: int = Field(description="Pixels a row that an image is resized to.")


class TakesPoints(Answer):
    """A model of clouds of points."""

    kind: Literal["points"] = Field(description="Always `points`.")
    max_points: int = Field(description="The most points of a cloud.")
    dimensions: int = Field(description="Numbers that each point has.")


class Interval(Answer):
    """A measured quality with its confidence interval."""

    value: float = Field(description="Measured on held-out data.")
    low: float = Field(description="Lower end of the interval.")
    high: float = Field(description="Upper end of the interval.")
    samples: int = Field(description="How many samples were measured.")
    exact: float | None = Field(
        None,
        description="Of a model that labels each token: the share of texts without a wrong label.",
    )


class LadderRung(Answer):
    """One operating point."""

    steps: int = Field(description="What to send as `steps`.")
    method: Method = Field(description="How a step uses the velocity.")
    nfe: int = Field(description="Velocity evaluations: the true cost.")
    effort: Effort | None = Field(description="What to send as `effort`, if the rung has a name.")
    quality: Interval = Field(description="On held-out data, in the metric of the ladder.")
    latency_ms: float | None = Field(
        description="Measured when the bundle was made: one input of the greatest length "
        "(classify), or one token after it (generate). Null if it was not measured."
    )
    predicted_ms: float | None = Field(
        description="The same as this server would do it now, waiting included. Null while "
        "nothing is known."
    )


class LadderResponse(Answer):
    """All operating points of a model."""

    model: str = Field(description="Name of the model.")
    task: Task = Field(description="What the model does.")
    depth: Depth = Field(description=_DEPTH)
    dial: Dial = Field(description=_DIAL)
    grid_steps: int | None = Field(description=_GRID)
    input: TakesText | TakesImage | TakesPoints = Field(description="What the model takes.")
    metric: Metric = Field(description=METRIC)
    full_steps: int = Field(description="The most steps there are.")
    default_steps: int = Field(description="What a request without a budget gets.")
    caution: float = Field(
        description="A deadline_ms has room for predicted_ms times this, since some calls take "
        "longer; a generation's for that of all its tokens."
    )
    answer_ms: float = Field(
        description="And for this beside it: until an answer has left, once its last call is over."
    )
    rungs: list[LadderRung] = Field(description="By steps, ascending.")


class ModelCard(Answer):
    """A model that is served."""

    id: str = Field(description="What to send as `model`.")
    object: Literal["model"] = Field(default="model", description="Always `model`.")
    created: int = Field(description="When this server loaded it, in Unix seconds.")
    ready: bool = Field(
        description="Whether requests of it are welcome: its last call did not fail, no call "
        "hangs, and the server is not shutting down."
    )
    owned_by: Literal["stepdial"] = Field(default="stepdial", description="Always `stepdial`.")
    task: Task = Field(
        description="`classify` and `tag` (a label for each token) are answered by /v1/classify, "
        "`generate` and `translate` by /v1/generate."
    )
    depth: Depth = Field(description=_DEPTH)
    dial: Dial = Field(description=_DIAL)
    grid_steps: int | None = Field(description=_GRID)
    input: TakesText | TakesImage | TakesPoints = Field(description="What the model takes.")
    method: Method = Field(description="How a step uses the velocity.")
    steps: list[int] = Field(description="What `steps` may be.")
    efforts: dict[str, int] = Field(description="The steps that each word of `effort` means.")
    default_steps: int = Field(description="What a request without a budget gets.")
    full_steps: int = Field(description="The most steps there are.")
    max_disagreement: list[float] = Field(
        description="The levels of max_disagreement at which answers come early; none where the "
        "model was not calibrated for it."
    )
    traces: bool = Field(description="Whether /v1/classify takes `trace` for this model here.")
    metric: Metric = Field(description="What the quality of a rung is measured in.")
    labels: list[str] | None = Field(
        description="What a classifier or tagger answers; null for generators."
    )
    max_tokens: int | None = Field(
        description="Tokens that the model sees at once; of a translator, tokens of the text to "
        "translate. Null for images and points."
    )
    target_max_tokens: int | None = Field(
        description="The most tokens of a translation; null for other tasks."
    )
    parameters: int = Field(description="Number of weights.")
    precision: str = Field(description="Of the weights.")
    cache: Cache = Field(
        description="How keys and values are kept while text is written: as float numbers (`kv`) "
        "or as bytes (`kv_int8`); `none` where no text is."
    )
    card: dict[str, Any] = Field(description="What its makers say of it.")


class ModelList(Answer):
    """All models that are served."""

    object: Literal["list"] = Field(default="list", description="Always `list`.")
    data: list[ModelCard] = Field(description="In the order in which they were loaded.")


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
        efforts={word: rung.steps for word, rung in efforts_of(manifest).items()},
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


# What the admin routes take and give: which models are in the server, and what changed.


class LoadRequest(BaseModel):
    """A bundle to serve."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    bundle: str = Field(
        min_length=1,
        max_length=4096,
        description="Folder of the bundle, on the server, in one of the folders that it may load "
        "from. Its manifest says how the model is named.",
        examples=["/models/topics"],
    )


class LoadedModel(Answer):
    """A model in the server."""

    name: str = Field(description="What requests call it.")
    edition: int = Field(description="0 since the start; every later load has a number of its own.")
    task: Task = Field(description="What it does.")
    bundle: str = Field(description="The folder that it was loaded from.")
    loaded_at: int = Field(description="When it was loaded, in seconds since 1970.")
    state: Literal["serving", "leaving"] = Field(
        description="`leaving`: it gets no new requests, and is gone when its last one is answered."
    )
    requests: int = Field(description="Requests that are with it now.")

    @classmethod
    def of(cls, served: Served, state: Literal["serving", "leaving"]) -> Self:
        return cls(
            name=served.name,
            edition=served.edition,
            task=served.manifest.task,
            bundle=str(served.bundle.folder),
            loaded_at=int(served.loaded_at_s),
            state=state,
            requests=served.guests.count,
        )


class LoadedModels(Answer):
    """Every model in the server."""

    models: list[LoadedModel] = Field(description="Those that are served first.")


class LoadResponse(Answer):
    """What was loaded."""

    loaded: LoadedModel = Field(description="It answers every request from now on.")
    replaced: LoadedModel | None = Field(
        None, description="The model whose place it took, if there was one."
    )
    seconds: float = Field(description="From reading the bundle to serving it.")


class UnloadResponse(Answer):
    """What was unloaded."""

    unloaded: LoadedModel = Field(description="It gets no new requests.")


# GET and POST /admin/models, DELETE /admin/models/{name}: what is served, changed while it is.
# Only for whoever has an admin key, which is another than the API keys.


_KEY_PROBLEMS = problems(
    e401="No admin key, or one that is not known.",
    e403="The server was started without an admin key, or a page of another address asks.",
    e429="The admin key has sent too many requests.",
)
_LOAD_PROBLEMS = problems(
    e400="The body is not JSON that can be read.",
    e403="There is no admin key, or the folder is not one that may be loaded from.",
    e408="The body did not arrive in time.",
    e413="The body is too large.",
    e422="The body is not as documented, or the bundle cannot be served; nothing has changed.",
    e503="The server is shutting down.",
)


def admin_routes(engine: Engine, loading: Loading, keys: Keys, reader: Reader) -> APIRouter:
    """The routes, for an engine."""
    router = APIRouter(tags=["admin"])

    @router.get(
        "/admin/models",
        summary="Every model in the server",
        response_model=LoadedModels,
        response_description="What is served, and what leaves.",
        responses=_KEY_PROBLEMS,
    )
    async def loaded(request: Request) -> Response:
        _check_key(request, keys)
        serving = [LoadedModel.of(served, "serving") for served in engine.catalog]
        leaving = [LoadedModel.of(served, "leaving") for served in engine.leaving]
        return answer(LoadedModels(models=serving + leaving))

    @router.post(
        "/admin/models",
        summary="Load a bundle, or swap it for the one of its name",
        response_model=LoadResponse,
        response_description="It is served; requests that were with another finish there.",
        responses={**_KEY_PROBLEMS, **_LOAD_PROBLEMS},
        openapi_extra=takes(LoadRequest),
    )
    async def load(request: Request) -> Response:
        _check_key(request, keys)
        asked = await read_json(request, LoadRequest, reader)
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
        response_description="It gets no new requests; those that it has go on.",
        responses={**_KEY_PROBLEMS, **_UNKNOWN},
    )
    async def unload(request: Request, name: str) -> Response:
        _check_key(request, keys)
        served = await loading.unload(name)
        return answer(UnloadResponse(unloaded=LoadedModel.of(served, "leaving")))

    return router


def _check_key(request: Request, keys: Keys) -> None:
    """AdminOff where nobody may, Unauthorized for whoever may not."""
    if not keys:
        raise AdminOff(
            f"the admin routes are off: set {ADMIN_KEY_VARIABLE} to a key of your own, or name a "
            "file with --admin-keys-file, and start the server again"
        )
    secret = secret_of(request.scope["headers"])
    holder = None if secret is None else keys.holder_of(secret)
    if holder is None:
        raise Unauthorized(
            "this needs an admin key, which is not one of the API keys: send it as "
            "`Authorization: Bearer KEY`"
        )
    holder.enter()
    holder.leave()


# GET /health, /health/live, /health/ready and /metrics: for whoever watches over this process.
# They never wait for the engine's thread, so they answer under any load.


def health_routes(engine: Engine) -> APIRouter:
    """The routes, for an engine."""
    router = APIRouter(tags=["operations"])

    @router.get(
        "/health/live",
        summary="Whether the process should go on",
        response_model=Health,
        response_description="It should.",
        responses=problems(e503="The engine has stopped for good: restart the process."),
    )
    async def live() -> Response:
        if engine.dead:
            raise NotReady("the engine has stopped: restart the server")
        return answer(Health(status="live"))

    @router.get(
        "/health/ready",
        summary="Whether to send requests here",
        response_model=Health,
        response_description="Requests are welcome.",
        responses=problems(e503="Starting, shutting down, a model hangs, or every model fails."),
    )
    async def ready() -> Response:
        check_ready(engine)
        return answer(Health(status="ready"))

    @router.get(
        "/health",
        summary="The same as /health/ready",
        description="Where load balancers, and users of other servers, look first.",
        response_model=Health,
        response_description="Requests are welcome.",
        responses=problems(e503="Starting, shutting down, a model hangs, or every model fails."),
    )
    async def health() -> Response:
        return await ready()

    @router.get(
        "/metrics",
        summary="Metrics for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}, "description": "Prometheus text format."}},
    )
    async def metrics() -> Response:
        # Long enough to write that streams would be seen to halt meanwhile.
        text = await asyncio.to_thread(engine.metrics.exposition)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    return router


def check_ready(engine: Engine) -> None:
    """Raises unless some model that is served answers."""
    engine.check_open()
    served, failing = list(engine.catalog), engine.failing
    if not served:
        raise NotReady("no model is served: load one with POST /admin/models")
    if all(one.name in failing for one in served):
        names = ", ".join(failing)
        raise NotReady(f"the last call of {names} failed: it is tried again every second")
