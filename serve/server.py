"""The process: an event loop, a listening socket, and an orderly end on SIGTERM.

Knows uvicorn and signals; deliberately neither routes nor models.
"""

import asyncio
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from types import FrameType

import uvicorn
from fastapi import FastAPI

from serve.connection import limited
from serve.connection_limits import ConnectionLimits
from serve.engine.engine import Engine
from serve.errors import Draining
from serve.settings import Settings

# The exit status of a process in which a call hung for ever.
HUNG = 70

_BACKLOG = 2048
_SEND_BUFFER_BYTES = 128 * 2**10
# Models, their caches, logs and connections that are let in for probes.
_OTHER_FILES = 256
# The share of all files that those may have at most.
_OTHERS_SHARE = 0.5
_POLL_S = 0.02
# For what has been answered to reach clients that read slowly.
_FLUSH_S = 2
_LAST_ANSWERS_S = 1.0
_log = logging.getLogger("stepdial")


class Server(uvicorn.Server):
    """Takes no more requests on the first signal, and ends when those that run have finished.

    It goes on listening meanwhile, so that probes and balancers are told rather than refused.
    """

    def __init__(
        self,
        settings: Settings,
        app: FastAPI,
        engine: Engine,
        listening: Callable[[str], None],
        reload: Callable[[], Coroutine[None, None, None]] | None = None,
    ) -> None:
        """`listening` is told the address; `reload` is run on SIGHUP."""
        limits = ConnectionLimits.of(
            settings,
            allow_files(settings.max_connections),
            lambda code: engine.metrics.rejected.labels(code).inc(),
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=limited(limits),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nothing here depends on them
                lifespan="on",
                ws="none",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_FLUSH_S,
            )
        )
        self._engine = engine
        self._listening = listening
        self._drain_s = settings.drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._reload = reload
        self._reloads: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        self._loop = asyncio.get_running_loop()
        if self._reload is not None:
            self._loop.add_signal_handler(signal.SIGHUP, self._begin_reload)
        self._listening(url_of(sockets[0]))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; a second one ends at once."""
        if self._loop is None or self._engine.draining:
            self.should_exit = True
            self.force_exit = sig == signal.SIGINT
            return
        self._engine.drain()
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._drain = asyncio.get_running_loop().create_task(self._drained())

    def _begin_reload(self) -> None:
        assert self._reload is not None
        task = asyncio.get_running_loop().create_task(self._reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _drained(self) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._drain_s
        while (self._engine.queued or self._engine.running) and loop.time() < end_s:
            await asyncio.sleep(_POLL_S)
        self._engine.abort(
            Draining("the server has shut down before the answer was complete: send it again")
        )
        self.should_exit = True


def allow_files(connections: int) -> int:
    """Let this process open a file for each connection; how many it may have.

    Beyond that a client is told so: where files have run out, it is only cut off.
    """
    wanted = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < wanted:
            _log.warning(
                "this process may open %d files, too few for %d connections: raise `ulimit -n` or "
                "lower --max-connections",
                most,
                connections,
            )
            return most - min(_OTHER_FILES, int(most * _OTHERS_SHARE))
    return connections


def leave() -> None:
    """End the process in a moment, whatever its threads do: one that hangs can never be joined."""
    threading.Timer(_LAST_ANSWERS_S, os._exit, [HUNG]).start()


class AddressError(OSError):
    """An address that cannot be listened on; the message says what to do."""


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, which does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # For every connection; unset, the system holds megabytes for a client that never reads.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise _address_error(host, port, error) from None
    return listener


def listen(listener: socket.socket) -> None:
    """Let clients connect. Another server may have bound the same address, and listened first."""
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _address_error(host, port, error) from None


def url_of(listener: socket.socket) -> str:
    """How to reach a listening socket from this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _address_error(host: str, port: int, error: OSError) -> AddressError:
    return AddressError(
        f"cannot listen on {host} port {port} ({error.strerror or error}): choose another with "
        "--host and --port"
    )
