"""Takes HTTP from Ray Serve's proxy, and has a replica answer.

A request whose replica is lost before the client has been sent anything goes to another; a stream
that has begun ends with an error of ours. It stands on other nodes than the replicas, so that it
outlives them. Knows requests and replicas; deliberately nothing of what is asked but the model.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from ray.exceptions import RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from deploy.ray.arguments import Arguments, catalog_of
from deploy.ray.choice import model_of
from deploy.ray.engines import Whole
from deploy.ray.exchange import Asked, Head, Headers, Part, Piece
from deploy.ray.gathered import one_page
from deploy.ray.listening import listen_at
from deploy.ray.losses import CUT_OFF, BrokenOff, ReplicaLost, lost_stream
from serve.errors import AdminOff, InternalError, NotReady, ServeError
from serve.wire.body import read_body
from serve.wire.error_shapes import error_body, error_status
from serve.wire.mailbox import ClientGone

_LIVE = {"/health/live": {"status": "live"}, "/v2/health/live": {"live": True}}
_READY = ("/health/ready", "/v2/health/ready")
_READY_S, _PAGES_S = 5.0, 5.0
_ATTEMPTS = 4
_CLIENT_GONE = 499
_log = logging.getLogger("ray.serve")


class Front:
    """The ingress."""

    def __init__(self, engines: DeploymentHandle[Any], arguments: Arguments) -> None:
        listen_at(arguments.replica_host)
        self._arguments = arguments
        self._settings = arguments.read_settings()
        self._catalog = catalog_of(arguments.read_cards(self._settings))
        self._engines = engines
        # By model, since making one for each request takes longer than asking.
        self._handles: dict[str | None, DeploymentHandle[Any]] = {}

    async def __call__(self, request: Request) -> Response:
        path = request.url.path
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
        if path.startswith("/admin/"):
            raise AdminOff(
                "on Ray the replicas load what is asked for: change the bundles in the config, "
                "and deploy it again"
            )
        asked = await self._read(request, path)
        if path == "/metrics":
            return await self._pages(asked)
        limit_s = _READY_S if path in _READY else self._arguments.first_answer_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._of_one(asked)
        except TimeoutError:
            raise NotReady(
                f"no replica has answered within {limit_s:g} s: send the request again later"
            ) from None

    async def _read(self, request: Request, path: str) -> Asked:
        arrived_s = time.perf_counter()
        settings, scope = self._settings, request.scope
        body = await read_body(request, settings.max_body_bytes, settings.body_timeout_s)
        return Asked(
            method=request.method,
            scheme=scope["scheme"],
            path=path,
            raw_path=scope.get("raw_path") or path.encode(),
            query=scope["query_string"],
            headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            client=scope.get("client"),
            body=body,
            model=model_of(self._catalog, request.method, path, body),
            age_s=time.perf_counter() - arrived_s,
        )

    def _handle(self, model: str | None) -> DeploymentHandle[Any]:
        if model not in self._handles:
            handle = self._engines.options(method_name="answer", stream=True)
            if model is not None:
                handle = handle.options(multiplexed_model_id=model)
            self._handles[model] = handle
        return self._handles[model]

    async def _of_one(self, asked: Asked) -> Response:
        """The answer of whichever replica lives to give it."""
        for _ in range(_ATTEMPTS):
            reply = Reply(self._handle(asked.model).remote(asked))
            try:
                return await reply.response(asked.path)
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
                return _response(one.head, one.body)
        merged = one_page({one.replica: one.body.decode() for one in pages})
        return Response(merged, headers={"content-type": CONTENT_TYPE_LATEST})


class Reply:
    """What one replica answers to one request."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._batches = aiter(stream)

    async def response(self, path: str) -> Response:
        """Whole, or as a stream that has begun; whatever goes wrong before is raised."""
        try:
            head, *pieces = await self._some()
            assert isinstance(head, Head), "an answer without a head"
            while not pieces or not (head.streams or _over(pieces)):
                pieces += await self._some()
        except BaseException:
            self._stream.cancel()
            raise
        if not head.streams:
            return _response(head, _joined(pieces))
        streamed = StreamingResponse(self._rest(pieces, path), status_code=head.status)
        streamed.raw_headers = _shown(head.headers)
        return streamed

    async def _some(self) -> list[Part]:
        try:
            together: list[Part] = await anext(self._batches)
        except StopAsyncIteration:
            raise BrokenOff from None
        return together

    async def _rest(self, pieces: list[Part], path: str) -> AsyncIterator[bytes]:
        """The body from its first pieces on; always with one last event."""
        try:
            while True:
                yield _joined(pieces)
                if _over(pieces):
                    return
                pieces = await self._some()
        except CUT_OFF as error:
            _log.warning("a replica was lost while it streamed: %r", error)
            yield lost_stream(path)
        except RayTaskError:
            _log.exception("a bug of ours at %s", path)
            yield lost_stream(path)
        finally:
            self._stream.cancel()


def _over(pieces: list[Part]) -> bool:
    last = pieces[-1]
    return isinstance(last, Piece) and last.over


def _joined(pieces: list[Part]) -> bytes:
    return b"".join(piece.body for piece in pieces if isinstance(piece, Piece))


def _response(head: Head, body: bytes) -> Response:
    whole = Response(body, status_code=head.status)
    whole.raw_headers = _shown(head.headers)
    return whole


def _shown(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers of a replica, but for the id, which the proxy adds too."""
    return [(name, value) for name, value in headers if name.lower() != b"x-request-id"]
