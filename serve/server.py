"""The process: an event loop, a listening socket, memory and priority, an orderly end on
SIGTERM.
"""

import asyncio
import ctypes
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from serve import logs
from serve.connection import ConnectionLimits, LimitedProtocol, limited
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
# When the grace is over: for routes to answer what the engine has given up.
_GIVEN_UP_S = 0.5
# Then, for threads that cannot be told to end; with _FLUSH_S in it.
_LEAVE_S = 4.0
_log = logging.getLogger("stepdial")


class Server(uvicorn.Server):
    """Takes no more requests on the first signal, and ends when those that had begun are answered.

    It goes on listening meanwhile, so that probes and balancers are told rather than refused.
    """

    def __init__(
        self,
        settings: Settings,
        app: FastAPI,
        engine: Engine,
        listening: Callable[[str], None],
        reload: Callable[[], Coroutine[None, None, None]] | None = None,
        leave: Callable[[int, float], None] = lambda status, in_s: None,
    ) -> None:
        """`listening` is told the address; `reload` is run on SIGHUP.

        `leave` is to end the process with this status in so many seconds, whatever still runs.
        """
        limits = ConnectionLimits.of(
            settings,
            allow_files(settings.max_connections),
            lambda code: engine.metrics.rejected.labels(code).inc(),
            engine.metrics.evicted.inc,
        )
        self._connection = limited(limits)
        super().__init__(
            uvicorn.Config(
                app,
                http=self._connection,
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
        self._hurried = False
        self._reload = reload
        self._leave = leave
        self._reloads: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """The second socket, if there is one, is for probes."""
        assert sockets
        if len(sockets) > 1:
            self._connection.health_port = sockets[1].getsockname()[1]
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self._reload is not None:
            # Not by the loop, which would have the signal end the process once it is closed.
            signal.signal(signal.SIGHUP, self._hang_up)
        self._listening(url_of(sockets[0]))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; a second one ends the grace; a third one waits for nothing."""
        if self._loop is None or self._hurried:
            self.should_exit = True
            self.force_exit = sig == signal.SIGINT
        elif self._engine.draining:
            self._hurried = True
        else:
            self._engine.drain()
            self._loop.call_soon_threadsafe(self._begin_drain)

    def _hang_up(self, sig: int, frame: FrameType | None) -> None:
        assert self._loop is not None
        if not self._engine.draining:
            self._loop.call_soon_threadsafe(self._begin_reload)

    def _begin_drain(self) -> None:
        self._drain = asyncio.get_running_loop().create_task(self._drained())

    def _begin_reload(self) -> None:
        assert self._reload is not None
        task = asyncio.get_running_loop().create_task(self._reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _drained(self) -> None:
        loop, begun_s = asyncio.get_running_loop(), self._engine.clock()
        late = Draining("the server has shut down before the answer was complete: send it again")
        end_s = loop.time() + self._drain_s
        await self._answered(begun_s, lambda: self._hurried or loop.time() >= end_s)
        self._engine.close(late)
        # Routes say best what became of their requests. Those that are still reading one cannot.
        end_s = loop.time() + _GIVEN_UP_S
        await self._answered(begun_s, lambda: loop.time() >= end_s)
        for connection in self._connections():
            connection.end(late)
        for task in self.server_state.tasks:
            task.cancel()
        self._leave(0, _LEAVE_S)
        self.should_exit = True

    async def _answered(self, begun_s: float, too_late: Callable[[], bool]) -> None:
        """Wait for every request that had begun at this time, until it is too late."""
        while (
            self._engine.queued
            or self._engine.running
            or any(one.unfinished(begun_s) for one in self._connections())
        ):
            if too_late():
                return
            await asyncio.sleep(_POLL_S)

    def _connections(self) -> Iterator[LimitedProtocol]:
        for connection in [*self.server_state.connections]:
            assert isinstance(connection, LimitedProtocol)
            yield connection


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


def leave(status: int = HUNG, in_s: float = _LAST_ANSWERS_S) -> None:
    """End the process soon, whatever its threads do: one that hangs can never be joined."""

    def end() -> None:
        logs.flush()
        os._exit(status)

    timer = threading.Timer(in_s, end)
    timer.daemon = True
    timer.start()


class AddressError(OSError):
    """An address that cannot be listened on; the message says what to do."""


def bind(host: str, port: int, flags: str = "--host and --port") -> socket.socket:
    """A socket at this address, which does not listen yet; `flags` say where it came from."""
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
        raise _address_error(host, port, error, flags) from None
    return listener


def listen(listener: socket.socket, flags: str = "--host and --port") -> None:
    """Let clients connect. Another server may have bound the same address, and listened first."""
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _address_error(host, port, error, flags) from None


def url_of(listener: socket.socket) -> str:
    """How to reach a listening socket from this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _address_error(host: str, port: int, error: OSError, flags: str) -> AddressError:
    return AddressError(
        f"cannot listen on {host} port {port} ({error.strerror or error}): choose another with "
        f"{flags}"
    )


# How the C library keeps freed memory: set before a server allocates, given back while it runs.
# Cache buffers of megabytes come and go in all sizes. Left alone, glibc soon takes them from its
# heap instead of mapping each, where they leave holes, and spreads them over an arena a thread:
# three models and 64 clients took 532 MB where they take 442 with these settings, and kept 33 MB
# more after each load where they now keep none (benchmarks/soak.py). What is smaller leaves holes
# all the same: after a burst 250 MB stayed 270 to 374, and 249 to 258 where holes are given back.


_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # of glibc's malloc.h
MAPPED_BYTES = 256 * 1024
ARENAS = 2
GIVE_BACK_S = 10.0  # between two times; each takes a millisecond or two


def keep_memory_low() -> bool:
    """Map large buffers, so that freeing them gives them back; False where it cannot be set."""
    if any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX")):
        return False  # somebody has chosen otherwise
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False  # not glibc
    both_set = all([mallopt(_MMAP_THRESHOLD, MAPPED_BYTES), mallopt(_ARENA_MAX, ARENAS)])
    if both_set:  # by glibc, which alone can give back
        threading.Thread(target=_give_back, name="memory", daemon=True).start()
    return both_set


def _give_back() -> None:
    """Again and again, whatever lies free between what is in use."""
    trim = ctypes.CDLL(None).malloc_trim
    while True:
        time.sleep(GIVE_BACK_S)
        trim(0)


# Which threads the system runs first: the one that answers, before those that compute. While
# models run they keep every core busy, and whoever asks waits until the system takes one away
# from them. In a container, or another group of processes with a share of its own, what computes
# loses nothing by it: requests take little time. Elsewhere every other program of the machine
# goes before it as well, so that whoever runs the server says it.


_THREADS = Path("/proc/self/task")


def answer_first(nice: int) -> None:
    """Let all threads that there are now but the main one be nicer by so much; on Linux only."""
    own = os.getpid()
    if not nice or not _THREADS.is_dir():
        return
    wanted = min(19, os.getpriority(os.PRIO_PROCESS, own) + nice)
    for thread in (int(path.name) for path in _THREADS.iterdir()):
        try:
            if thread != own and os.getpriority(os.PRIO_PROCESS, thread) < wanted:
                os.setpriority(os.PRIO_PROCESS, thread, wanted)
        except ProcessLookupError:
            pass  # it has ended
