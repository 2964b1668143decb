"""A replica: one engine, its application, and the models that it has been asked for.

The same engine and the same routes as `stepdial serve`, without its socket. Knows how these are put
together, and what Ray Serve asks of a replica; deliberately nothing of where requests come from.
"""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

from ray import serve
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deploy.ray.arguments import Arguments, catalog_of
from deploy.ray.exchange import MODEL_KEY, SIGNATURE, Asked, Head, Part, Whole, exchanged, whole_of
from deploy.ray.listening import listen_at
from deploy.ray.scaling import reported
from deploy.ray.shelf import Shelf
from serve.app import create_app
from serve.catalog import Served
from serve.engine.engine import Engine
from serve.errors import BrokenBundle, NotReady, ServeError
from serve.loading import Loading
from serve.malloc import keep_memory_low
from serve.metrics import Metrics
from serve.routes.health import check_ready
from serve.server import leave
from serve.wire.error_shapes import error_body, error_status
from serve.wire.gate import secret_of

# The engine's thread and the event loop take turns at the interpreter, as in `stepdial serve`.
_SWITCH_S = 0.0005


class Held:
    """A model that this replica holds. Ray Serve calls `__del__` when another takes its place."""

    def __init__(self, engine: Engine, served: Served) -> None:
        self._engine = engine
        self._served: Served | None = served

    def __del__(self) -> None:
        served, self._served = self._served, None
        if served is not None:  # what it is asked now goes on; then it is closed
            self._engine.dismiss(served)


class Engines:
    """One replica."""

    async def __init__(self, arguments: Arguments) -> None:  # type: ignore[misc]  # as Serve allows
        listen_at(arguments.replica_host)
        keep_memory_low()
        sys.setswitchinterval(_SWITCH_S)
        settings = arguments.read_settings()
        cards = arguments.read_cards(settings)
        self._folders = {card.name: card.bundle.folder for card in catalog_of(cards)}
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        shelf = Shelf()
        self._engine = Engine(
            shelf,
            settings.limits,
            Metrics(),
            patience=settings.patience,
            leave=leave,
            recheck_share=settings.recheck_share,
        )
        self._loading = Loading(self._engine, settings)
        shelf.stock(cards)
        self._app = create_app(settings, self._engine, self._loading)
        self._life = AsyncExitStack()
        await self._life.enter_async_context(self._app.router.lifespan_context(self._app))

        async def load(name: str) -> Held:
            return await self._load(name)

        most = arguments.models_per_replica
        self._hold = serve.multiplexed(load, max_num_models_per_replica=most)
        for name in list(self._folders)[:most] if arguments.preload else ():
            await self._hold(name)

    # What the fronts ask.

    async def answer(self, asked: Asked) -> AsyncIterator[list[Part]]:
        """The answer in pieces as they come, each of which is a message of its own."""
        async for parts in exchanged(self._run, asked):
            yield [self._signed(part) if isinstance(part, Head) else part for part in parts]

    async def whole(self, asked: Asked) -> Whole:
        """The answer in one."""
        answer = await whole_of(self._run, asked)
        return replace(answer, head=self._signed(answer.head))

    # What Ray Serve asks.

    async def check_health(self) -> None:
        """Raises while this replica is not ready; Ray Serve replaces one that stays so."""
        check_ready(self._engine)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy looks at."""
        return reported(self._engine)

    async def __del__(self) -> None:
        """The last request has been answered, or its time is over."""
        await self._life.aclose()

    # A request.

    def _signed(self, head: Head) -> Head:
        return replace(head, headers=(*head.headers, (SIGNATURE, self._name)))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope[MODEL_KEY]
        try:
            if name is not None and self._knows(scope):
                # Nothing is awaited between this and the route's look at the catalog, so that no
                # other request can have the model replaced meanwhile.
                await self._hold(name)
        except ServeError as error:
            await _refusal(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        """Whether whoever asks may have a model loaded; the application refuses all others."""
        keys = self._app.state.keys
        secret = secret_of(scope["headers"])
        return not keys or (secret is not None and keys.holder_of(secret) is not None)

    async def _load(self, name: str) -> Held:
        try:
            change = await self._loading.load(self._folders[name])
        except BrokenBundle as error:
            raise NotReady(f"{name} cannot be loaded by this replica: {error}") from None
        return Held(self._engine, change.loaded)


def _refusal(error: ServeError, path: str) -> Response:
    return Response(
        json.dumps(error_body(error, path)),
        status_code=error_status(error, path),
        headers=error.headers(),
        media_type="application/json",
    )
