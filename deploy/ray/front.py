"""Takes HTTP, from its own port or from Ray Serve's proxy, and has a replica answer.

A request whose replica is lost before the client has been sent anything goes to another; a stream
that has begun ends with an error of ours. It stands on other nodes than the replicas, so that it
outlives them. Knows requests and replicas; deliberately nothing of what is asked but the model.
"""

import asyncio
import json
import logging
import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deploy.ray.arguments import Arguments, catalog_of
from deploy.ray.choice import Choice, choice_of
from deploy.ray.door import Door
from deploy.ray.exchange import SIGNATURE, Asked, Whole
from deploy.ray.gathered import one_page
from deploy.ray.listening import listen_at
from deploy.ray.losses import CUT_OFF, ReplicaLost
from deploy.ray.reply import Reply, response_of, whole
from serve.errors import AdminOff, Crowded, InternalError, NotReady, ServeError
from serve.wire.body import read_body
from serve.wire.departure import DEPARTURE_KEY
from serve.wire.envelope import ARRIVED_KEY, CROWDED_KEY, SECURITY_HEADERS, request_id_of
from serve.wire.error_shapes import error_body, error_status
from serve.wire.gate import PROBES
from serve.wire.mailbox import ClientGone

_LIVE = {"/health/live": {"status": "live"}, "/v2/health/live": {"live": True}}
_READY = ("/health", "/health/ready", "/v2/health/ready")
_READY_S, _PAGES_S = 5.0, 5.0
_ATTEMPTS = 4
_CLIENT_GONE = 499
_log = logging.getLogger("ray.serve")


class Front:
    """The ingress."""

    async def __init__(  # type: ignore[misc]  # as Serve allows
        self, engines: DeploymentHandle[Any], arguments: Arguments
    ) -> None:
        listen_at(arguments.replica_host)
        self._arguments = arguments
        self._settings = arguments.read_settings()
        self._catalog = catalog_of(arguments.read_cards(self._settings))
        self._engines = engines
        # One for each way to ask, since making one for each request takes longer than asking.
        self._handles: dict[Choice, DeploymentHandle[Any]] = {}
        self._door: Door | None = None
        if arguments.port is not None:
            self._door = Door(self._at_door, self._settings, arguments.host, arguments.port)
            self._door.open()

    async def __call__(self, request: Request) -> Response:
        """From Serve's proxy, which cancels this when the client leaves."""
        response = await self._respond(request)
        del response.headers["x-request-id"]  # the proxy adds its own
        return response

    async def check_health(self) -> None:
        """Raises once nothing can come in; Ray Serve replaces a front that stays so."""
        if self._door is not None and not self._door.is_open:
            raise RuntimeError(f"port {self._arguments.port} is closed: see the log before this")

    async def __del__(self) -> None:
        """Another takes what comes from now on."""
        if self._door is not None:
            await self._door.close()

    async def _at_door(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        gone = False

        def leave() -> None:
            nonlocal gone
            gone = True
            task.cancel()

        unwatch = scope[DEPARTURE_KEY].watch(leave)
        try:
            response = await self._respond(Request(scope, receive))
            if "x-request-id" not in response.headers:  # it is an answer of ours
                added = ((b"x-request-id", request_id_of(scope).encode()), *SECURITY_HEADERS)
                response.raw_headers += added
            await response(scope, receive, send)
        except asyncio.CancelledError:
            if not gone:
                raise
        finally:
            unwatch()

    async def _respond(self, request: Request) -> Response:
        path = request.scope["path"]
        try:
            return await self._answer(request, path)
        except ClientGone:
            return Response(status_code=_CLIENT_GONE)
        except ServeError as error:
            shown = error
        except Exception:
            _log.exception("a bug of ours at %s", path)
            shown = InternalError("this is our bug; please report it")
        return Response(
            json.dumps(error_body(shown, path)),
            status_code=error_status(shown, path),
            headers=shown.headers(),
            media_type="application/json",
        )

    async def _answer(self, request: Request, path: str) -> Response:
        if path in _LIVE:
            return Response(json.dumps(_LIVE[path]), media_type="application/json")
        if CROWDED_KEY in request.scope and path not in PROBES:
            raise Crowded("too many connections are open: try again in a moment")
        if path.startswith("/admin/"):
            raise AdminOff(
                "on Ray the replicas load what is asked for: change the bundles in the config, "
                "and deploy it again"
            )
        choice, asked = await self._read(request, path)
        if path == "/metrics":
            return await self._pages(asked)
        limit_s = _READY_S if path in _READY else self._arguments.first_answer_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._of_one(choice, asked)
        except TimeoutError:
            raise NotReady(
                f"no replica has answered within {limit_s:g} s: send the request again later"
            ) from None

    async def _read(self, request: Request, path: str) -> tuple[Choice, Asked]:
        settings, scope = self._settings, request.scope
        arrived_s = scope.get(ARRIVED_KEY, time.perf_counter())
        body = await read_body(request, settings.max_body_bytes, settings.body_timeout_s)
        choice = choice_of(self._catalog, request.method, path, body)
        return choice, Asked(
            method=request.method,
            scheme=scope["scheme"],
            path=path,
            raw_path=scope.get("raw_path") or path.encode(),
            query=scope["query_string"],
            headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            client=scope.get("client"),
            body=body,
            model=choice.model,
            age_s=time.perf_counter() - arrived_s,
        )

    def _handle(self, choice: Choice) -> DeploymentHandle[Any]:
        if choice not in self._handles:
            method = "answer" if choice.streams else "whole"
            handle = self._engines.options(method_name=method, stream=choice.streams)
            if choice.model is not None:
                handle = handle.options(multiplexed_model_id=choice.model)
            self._handles[choice] = handle
        return self._handles[choice]

    async def _of_one(self, choice: Choice, asked: Asked) -> Response:
        """The answer of whichever replica lives to give it."""
        for _ in range(_ATTEMPTS):
            call = self._handle(choice).remote(asked)
            try:
                if choice.streams:
                    return await Reply(call).response(asked.path)
                return response_of(await whole(call))
            except CUT_OFF as error:
                _log.warning("a replica was lost before it answered: %r", error)
            except BackPressureError:
                raise NotReady("all replicas are full: send the request again later") from None
            except DeploymentUnavailableError as error:
                raise NotReady(f"no replica can be started: {error}") from None
        raise ReplicaLost(f"{_ATTEMPTS} replicas were lost one after another: try again later")

    async def _pages(self, asked: Asked) -> Response:
        """The metrics of all replicas; a refusal if one of them refuses."""
        try:
            told = await self._engines.broadcast("whole", asked).results_async(
                timeout_s=_PAGES_S, return_exceptions=True
            )
        except (TimeoutError, DeploymentUnavailableError):
            raise NotReady(f"the replicas did not answer within {_PAGES_S:g} s") from None
        pages = [one for one in told if isinstance(one, Whole)]
        for one in pages:
            if one.head.status != 200:
                return response_of(one)
        merged = one_page({_signature(one): one.body.decode() for one in pages})
        return Response(merged, headers={"content-type": CONTENT_TYPE_LATEST})


def _signature(answer: Whole) -> str:
    return dict(answer.head.headers)[SIGNATURE].decode()
