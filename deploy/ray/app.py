"""Stepdial on Ray Serve: replicas run the application of `stepdial serve` behind Serve's proxy.

serve run deploy/ray/serve.yaml
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.ray.scaling import reported
from serve.api.models import check_ready
from serve.app import create_app
from serve.bundle import Bundle, Task, read_bundle
from serve.catalog import Catalog, InputKind, Served, find_bundles
from serve.engine.engine import Engine
from serve.errors import BrokenBundle, ModelGone
from serve.exchange import EXCHANGE_KEY
from serve.loading import Loading
from serve.metrics import Metrics
from serve.middleware import RequestMiddleware
from serve.runtime import Device, Model
from serve.server import keep_memory_low, leave
from serve.settings import Settings

REPLICA = "replica"  # the label of a metric
SIGNATURE = b"x-stepdial-replica"
# Serve queues nothing in front of a replica: the engine's own queue knows deadlines and says 429.
_RUNNING = 256
_METRICS_S, _LOOK_BACK_S, _PAGES_S = 2.0, 10.0, 5.0
_HEALTH_S, _HEALTH_TIMEOUT_S = 2.0, 10.0
_DRAIN_POLL_S = 0.5
_LAST_S = 5.0  # beyond drain_s: for the application to end when nothing runs any more
_SWITCH_S = 0.0005  # as in `stepdial serve`
_OF_A_SERVER = {  # settings
    *("host", "port", "health_host", "health_port", "admin_folders"),
    *("max_connections", "max_address_connections", "trusted_proxies"),
    *("max_headers", "max_header_bytes", "header_timeout_s", "send_timeout_s"),
    *("access_log", "log_format", "log_level", "engine_nice"),
}


class Arguments(BaseModel):
    """The `args` of a Serve config."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bundles: Annotated[
        tuple[Path, ...],
        Field(description="folders of bundles, the same on every node; none: those of the zoo"),
    ] = ()
    settings: Annotated[
        Mapping[str, Any], Field(description="settings of the server, as in its settings file")
    ] = Field(default_factory=dict)
    models_per_replica: Annotated[
        int | None,
        Field(ge=1, le=1000, description="models that a replica holds at a time; none: all"),
    ] = None
    cpus: Annotated[float, Field(gt=0, le=1024, description="cores of a replica")] = 1.0
    gpus: Annotated[float, Field(ge=0, le=64, description="GPUs of a replica")] = 0.0
    min_replicas: Annotated[int, Field(ge=1, le=1000, description="replicas when idle")] = 1
    max_replicas: Annotated[int, Field(ge=1, le=1000, description="replicas at most")] = 4
    queue_depth: Annotated[
        float, Field(gt=0, description="waiting requests a replica before another is started")
    ] = 4.0
    attainment: Annotated[
        float, Field(gt=0, le=1, description="share of deadlines met below which one is started")
    ] = 0.999
    busy: Annotated[
        float, Field(gt=0, le=1, description="busy share up to which the others take one's work")
    ] = 0.7
    scale_up_s: Annotated[
        float, Field(ge=0, le=3600, description="time that more must be wanted for")
    ] = 5.0
    scale_down_s: Annotated[
        float, Field(ge=0, le=86400, description="time that fewer must be wanted for")
    ] = 300.0
    spill_requests: Annotated[
        float, Field(ge=0, description="requests more that a replica with the model may have")
    ] = 4.0

    @model_validator(mode="after")
    def _usable(self) -> "Arguments":
        if self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas must be at least min_replicas")
        if "admin_keys_file" in self.settings:
            raise ValueError(
                "admin_keys_file means nothing on Ray, where a request reaches one replica only: "
                "to change the bundles, change the config and deploy it again"
            )
        if idle := sorted(_OF_A_SERVER & self.settings.keys()):
            raise ValueError(
                f"{', '.join(idle)}: no effect on Ray, which has its own logs, ports, connections "
                "and processes"
            )
        return self

    def read_settings(self) -> Settings:
        """The server's settings; a replica takes no more threads than it has cores."""
        settings = Settings.read(config=self.settings)
        if self.gpus and settings.device == "cpu":
            raise ValueError("gpus would be reserved and not used: set settings.device to cuda")
        if settings.threads is None:
            settings = settings.model_copy(update={"threads": max(1, int(self.cpus))})
        return settings

    def read_bundles(self, settings: Settings) -> list[Bundle]:
        """What the folders hold, none of it open; ValueError where two have the same name."""
        folders = self.bundles or find_bundles(settings.zoo)
        bundles = [read_bundle(folder, verify=False) for folder in folders]
        names = [bundle.manifest.name for bundle in bundles]
        if len(set(names)) < len(names):
            raise ValueError(f"two bundles have the same name, of {', '.join(names)}: serve one")
        return bundles


_CPU = Device()


class Unloaded:
    """Stands for the model of a bundle that is listed and not loaded."""

    def __init__(self, single_steps: bool) -> None:
        self.single_steps = single_steps


class Shelf(Catalog):
    """A catalog that lists every bundle, whether this replica holds its model or not."""

    def __init__(self) -> None:
        super().__init__(())
        self._cards: dict[str, Served] = {}

    def stock(self, bundles: Iterable[Bundle], device: Device = _CPU) -> None:
        """List these from now on, as they are on this device."""
        self._cards = {
            bundle.manifest.name: Served(
                bundle,
                cast(Model, Unloaded(device.runs_single_steps(bundle.manifest))),
                None,
            )
            for bundle in bundles
        }

    def __iter__(self) -> Iterator[Served]:
        return iter([self.get(name) or card for name, card in self._cards.items()])

    def find(self, name: str) -> Served:
        return self.get(name) or self._cards.get(name) or super().find(name)

    def pick(
        self, name: str | None, tasks: tuple[Task, ...], kind: InputKind | None = None
    ) -> Served:
        picked = super().pick(name, tasks, kind)
        if self.get(picked.name) is None:
            raise ModelGone(
                f"{picked.name} is not loaded by the replica that was asked: name it in the header "
                f"serve_multiplexed_model_id: {picked.name}"
            )
        return picked


class Held:
    """A model of this replica. Serve calls `__del__` when another takes its place."""

    def __init__(self, engine: Engine, served: Served) -> None:
        self._engine = engine
        self._served: Served | None = served

    def __del__(self) -> None:
        served, self._served = self._served, None
        if served is not None:  # what it is asked now goes on; then it is closed
            self._engine.dismiss(served)


class FleetMetrics(Metrics):
    """Metrics whose page has those of all replicas, told apart by a label."""

    def exposition(self) -> bytes:
        handle = serve.get_deployment_handle("Replica")
        told = handle.broadcast("metrics_page").results(timeout_s=_PAGES_S, return_exceptions=True)
        return one_page(dict(page for page in told if isinstance(page, tuple)))

    def own_page(self) -> str:
        """The page of this replica alone."""
        return super().exposition().decode()


@serve.ingress()
class Replica:
    """One engine with its application, and the models that it holds."""

    async def __init__(self, arguments: Arguments) -> None:  # type: ignore[misc]  # as Serve allows
        keep_memory_low()
        sys.setswitchinterval(_SWITCH_S)
        settings = arguments.read_settings()
        bundles = arguments.read_bundles(settings)
        self._folders = {bundle.manifest.name: bundle.folder for bundle in bundles}
        self._most = min(arguments.models_per_replica or len(bundles), len(bundles))
        self._name = serve.get_replica_context().replica_id.unique_id
        self._metrics = FleetMetrics()
        shelf = Shelf()
        self._engine = Engine(
            shelf,
            settings.limits,
            self._metrics,
            patience=settings.patience,
            leave=leave,
            recheck_share=settings.recheck_share,
        )
        self._loading = Loading(self._engine, settings)
        # Behind the engine, which takes what is listed for loaded.
        shelf.stock(bundles, settings.runs_on)
        self._app = create_app(settings, self._engine, self._loading)

        middleware = cast(RequestMiddleware, self._app.build_middleware_stack())
        self._app.middleware_stack = replace(middleware, app=self._holding(middleware))

        async def load(name: str) -> Held:
            return await self._load(name)

        self._hold = serve.multiplexed(load, max_num_models_per_replica=self._most)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await self._app(scope, receive, self._loading_first(send))
                return
            await self._app(scope, receive, self._signing(send))

        return run

    async def _load(self, name: str) -> Held:
        try:
            change = await self._loading.load(self._folders[name])
        except BrokenBundle as error:
            raise ModelGone(
                f"{name} cannot be loaded by the replica that was asked: its log says why"
            ) from error
        return Held(self._engine, change.loaded)

    def _holding(self, middleware: RequestMiddleware) -> ASGIApp:
        """The routes, behind loading the model that the request names in Ray's header."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                wanted = serve.get_multiplexed_model_id()
                # With keys, only for the holder of one: a probe needs none.
                allowed = not middleware.keys.in_use or scope[EXCHANGE_KEY].holder is not None
                if wanted in self._folders and allowed:
                    await self._hold(wanted)
            await middleware.app(scope, receive, send)

        return run

    def _loading_first(self, send: Send) -> Send:
        """Says that the replica has started once the first models are loaded."""

        async def sent(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                for name in list(self._folders)[: self._most]:
                    await self._hold(name)
            await send(message)

        return sent

    def _signing(self, send: Send) -> Send:
        """Adds the replica to an answer; the request id is added by Serve's proxy."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                message["headers"] = [*kept, (SIGNATURE, self._name.encode())]
            await send(message)

        return sent

    async def metrics_page(self) -> tuple[str, str]:
        """This replica and its metrics."""
        return self._name, self._metrics.own_page()

    async def check_health(self) -> None:
        """Raises while this replica is not ready; Serve replaces one that stays so."""
        listed = self._engine.catalog
        held = [one for one in listed if listed.get(one.name) is not None]
        check_ready(self._engine, held or listed)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy looks at."""
        return reported(self._engine)


def build(arguments: Arguments) -> Application:
    """The application, for the `args` of a Serve config."""
    settings = arguments.read_settings()
    scaling = AutoscalingConfig(
        min_replicas=arguments.min_replicas,
        max_replicas=arguments.max_replicas,
        metrics_interval_s=_METRICS_S,
        look_back_period_s=_LOOK_BACK_S,
        upscale_delay_s=arguments.scale_up_s,
        downscale_delay_s=arguments.scale_down_s,
        policy=AutoscalingPolicy(
            policy_function="deploy.ray.scaling:QueueAndDeadlines",
            policy_kwargs={
                "queue_depth": arguments.queue_depth,
                "attainment": arguments.attainment,
                "busy": arguments.busy,
            },
        ),
    )
    deployment = serve.deployment(
        name="Replica",
        max_ongoing_requests=settings.queue_limit + _RUNNING,
        autoscaling_config=scaling,
        request_router_config={
            "request_router_class": "deploy.ray.routing:ModelRouter",
            "request_router_kwargs": {"spill_requests": arguments.spill_requests},
        },
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
        graceful_shutdown_timeout_s=settings.drain_s + _LAST_S,
    )(Replica)
    return deployment.bind(arguments)


class _Families(Collector):
    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families.values())


def one_page(pages: Mapping[str, str]) -> bytes:
    """The metrics pages of these replicas as one."""
    families: dict[str, Metric] = {}
    for replica, page in sorted(pages.items()):
        for family in text_string_to_metric_families(page):
            merged = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            merged.samples += [
                sample._replace(labels={**sample.labels, REPLICA: replica})
                for sample in family.samples
            ]
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)
