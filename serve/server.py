"""The process: event loop, sockets, memory and thread priority, and a graceful shutdown."""

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
from serve.connection import LimitedProtocol, limited
from serve.engine.engine import Engine
from serve.errors import Draining
from serve.settings import Settings

# Exit status after a model call hung for ever.
HUNG = 70

_BACKLOG = 2048
_SEND_BUFFER_BYTES = 128 * 2**10
# Open files besides connections: models, caches, logs, and connections for probes.
_OTHER_FILES = 256
# The largest share of all files for those.
_OTHERS_SHARE = 0.5
_POLL_S = 0.02
# How long answers may take to reach slow clients.
_FLUSH_S = 2
_LAST_ANSWERS_S = 1.0
# After the grace period, time for routes to answer requests that were given up.
_GIVEN_UP_S = 0.5
# Then, time for threads that cannot be told to end; includes _FLUSH_S.
_LEAVE_S = 4.0
_log = logging.getLogger("stepdial")


class Server(uvicorn.Server):
    """A uvicorn server that drains on the first signal and ends when running requests are done.

    Meanwhile it keeps listening, so that probes and load balancers get an answer.
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
        """`listening` is called with the address; `reload` runs on SIGHUP.

        `leave` ends the process with this status after some seconds, whatever still runs.
        """
        self._connection = limited(
            settings,
            allow_files(settings.max_connections),
            lambda code: engine.metrics.rejected.labels(code).inc(),
            engine.metrics.evicted.inc,
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=self._connection,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # not needed here
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
        self._grace_over = False
        self._reload = reload
        self._leave = leave
        self._reloads: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening. The second socket, if there is one, is for probes."""
        assert sockets
        if len(sockets) > 1:
            self._connection.health_port = sockets[1].getsockname()[1]
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self._reload is not None:
            # Not through the loop: after it is closed the signal would end the process.
            signal.signal(signal.SIGHUP, self._hang_up)
        self._listening(url_of(sockets[0]))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends the grace period, the third exits at once."""
        if self._loop is None or self._grace_over:
            self.should_exit = True
            self.force_exit = sig == signal.SIGINT
        elif self._engine.draining:
            self._grace_over = True
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
        await self._answered(begun_s, lambda: self._grace_over or loop.time() >= end_s)
        self._engine.close(late)
        # Routes know best what became of their requests, but those still reading a body cannot
        # answer.
        end_s = loop.time() + _GIVEN_UP_S
        await self._answered(begun_s, lambda: loop.time() >= end_s)
        for connection in self._connections():
            connection.end(late)
        for task in self.server_state.tasks:
            task.cancel()
        self._leave(0, _LEAVE_S)
        self.should_exit = True

    async def _answered(self, begun_s: float, too_late: Callable[[], bool]) -> None:
        """Wait for every request that had begun at this time, until the grace period is over."""
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
    """Raise the limit of open files to one per connection; returns the possible number of
    connections.

    Above that a client gets an error, while without files it would only be cut off.
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
    """End the process soon, whatever its threads do: a stuck thread cannot be joined."""

    def end() -> None:
        logs.flush()
        os._exit(status)

    timer = threading.Timer(in_s, end)
    timer.daemon = True
    timer.start()


class AddressError(OSError):
    """An address that cannot be bound. The message says what to do."""


def bind(host: str, port: int, flags: str = "--host and --port") -> socket.socket:
    """A bound socket that does not listen yet; `flags` name the settings of the address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Inherited by every connection. Otherwise the system buffers megabytes for a client
            # that never reads.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise _address_error(host, port, error, flags) from None
    return listener


def listen(listener: socket.socket, flags: str = "--host and --port") -> None:
    """Start listening. Another server may have bound the same address and listened first."""
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _address_error(host, port, error, flags) from None


def url_of(listener: socket.socket) -> str:
    """The URL of a listening socket, for this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _address_error(host: str, port: int, error: OSError, flags: str) -> AddressError:
    return AddressError(
        f"cannot listen on {host} port {port} ({error.strerror or error}): choose another with "
        f"{flags}"
    )


# Memory: glibc's settings before a server allocates, and returning freed memory while it runs.
# Cache buffers of megabytes come and go in all sizes. By default glibc soon takes them from its
# heap, where they leave holes, in one arena per thread: three models and 64 clients took 532 MB,
# and take 442 with these settings; each load kept 33 MB more, and now keeps none
# (benchmarks/soak.py). Smaller buffers still leave holes: after a burst, 250 MB became 270 to 374,
# and 249 to 258 where holes are returned.


_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # from glibc's malloc.h
MAPPED_BYTES = 256 * 1024
ARENAS = 2
GIVE_BACK_S = 10.0  # between two rounds; each may hold up a request by some milliseconds


def keep_memory_low() -> bool:
    """Map large buffers, so that freeing returns them; False if that cannot be set."""
    if any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX")):
        return False  # set by the user
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False  # not glibc
    both_set = all([mallopt(_MMAP_THRESHOLD, MAPPED_BYTES), mallopt(_ARENA_MAX, ARENAS)])
    if both_set:  # only glibc can return holes
        threading.Thread(target=_give_back, name="memory", daemon=True).start()
    return both_set


def _give_back() -> None:
    """Again and again, return free memory between buffers in use."""
    trim = ctypes.CDLL(None).malloc_trim
    while True:
        time.sleep(GIVE_BACK_S)
        trim(0)


# Thread priority. While models run they keep every core busy, and the thread that answers HTTP has
# to wait for one. With niceness for computing threads it goes first. In a container, or another
# group of processes with a CPU share of its own, computing loses nothing, because requests take
# little time. Elsewhere every other program goes first too, so it is a setting.


_THREADS = Path("/proc/self/task")


def answer_first(nice: int) -> None:
    """Add this niceness to all current threads except the main one; Linux only."""
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
