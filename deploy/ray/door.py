"""The port on which a front takes HTTP itself, without Ray Serve's proxy in between.

The connections are those of `stepdial serve`, with the same limits. Knows sockets and uvicorn;
deliberately neither replicas nor what is answered.
"""

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.connection import limited
from serve.connection_limits import ConnectionLimits
from serve.server import allow_files
from serve.settings import Settings

_BACKLOG = 2048
_KEEP_ALIVE_S, _FLUSH_S, _POLL_S = 75, 2, 0.05


class Door:
    """Open from `open` to `close`."""

    def __init__(self, app: ASGIApp, settings: Settings, host: str, port: int) -> None:
        self._app = app
        self._address = (host, port)
        self._drain_s = settings.drain_s
        connections = allow_files(settings.max_connections)
        # A front has no metrics in which to count what it refuses.
        limits = ConnectionLimits.of(settings, connections, lambda code: None)
        self._inside = 0  # requests
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._counted,
                interface="asgi3",
                http=limited(limits),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_FLUSH_S,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._serving is not None and not self._serving.done()

    def open(self) -> None:
        """Take requests; OSError if the address cannot be had."""
        # The next front takes requests on the same port while this one ends what it has.
        listener = socket.create_server(
            self._address,
            family=socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET,
            backlog=_BACKLOG,
            reuse_port=True,
        )
        self._serving = asyncio.create_task(self._server.serve([listener]))

    async def close(self) -> None:
        """Take no more, and wait for what is answered now."""
        if self._serving is None:
            return
        if self._server.started:
            for listening in self._server.servers:
                listening.close()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._drain_s
        while self._inside and loop.time() < end_s:
            await asyncio.sleep(_POLL_S)
        self._server.should_exit = True
        await self._serving

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= 1
