"""How fast one server is, and what it does when things go wrong."""

import asyncio
import contextlib
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.client import ClosedLoop, Load, Shot, arrivals, fire, load
from benchmarks.lab import percentile
from benchmarks.peers.servers import NotRunning, Running, Work

CLIENTS = 32
_PATIENCE_S, _LONGEST_S = 5.0, 15.0
# The range of rates that is searched, as shares of what many clients got out of it.
_LOWEST, _HIGHEST = 0.2, 1.15


@dataclass(frozen=True, slots=True)
class Pace:
    """How long each part takes, and what is wanted."""

    objective_s: float
    closed_s: float
    trial_s: float
    trials: int


@dataclass(frozen=True, slots=True)
class Speed:
    """What one start of a server was found to do."""

    start_s: float
    one: Load
    many: Load
    in_time_per_s: float | None  # the highest rate that was in time; None if none was
    one_cpu_ms: float  # of all its processes, a request of one client
    cpu_ms: float  # the same, of many clients
    call_rows: float  # a call of the model, under many clients
    rss_mb: float
    pss_mb: float


def measure_speed(running: Running, pace: Pace) -> Speed:
    """All of it, one after the other."""
    _loaded(running, CLIENTS, pace.closed_s)  # all that is made only once
    one, one_cpu_ms, _ = _clocked(running, 1, pace.closed_s)
    many, cpu_ms, call_rows = _clocked(running, CLIENTS, pace.closed_s)
    rss_mb, pss_mb = running.tree.memory_mb()
    return Speed(
        start_s=running.start_s,
        one=one,
        many=many,
        in_time_per_s=highest_in_time(running, many.per_s, pace),
        one_cpu_ms=one_cpu_ms,
        cpu_ms=cpu_ms,
        call_rows=call_rows,
        rss_mb=rss_mb,
        pss_mb=pss_mb,
    )


def highest_in_time(running: Running, guess_per_s: float, pace: Pace) -> float | None:
    """By halving a range of rates."""
    low, high = _LOWEST * guess_per_s, _HIGHEST * guess_per_s
    best = None
    for seed in range(pace.trials):
        rate = (low + high) / 2
        if _slowest_s(running, rate, pace.trial_s, seed) <= pace.objective_s:
            best = low = rate
        else:
            high = rate
    return best


def shots_at(running: Running, per_s: float, seconds: float, seed: int) -> list[Shot]:
    """Requests at random times, the questions in turn; one at least."""
    bodies = itertools.cycle(running.bodies)
    due_s = [*arrivals(per_s, seconds, random.Random(seed))] or [0.0]
    return [Shot(one_s, dict(next(bodies))) for one_s in due_s]


def _slowest_s(running: Running, per_s: float, seconds: float, seed: int) -> float:
    """The latency that 99 % stay below; what was not answered took for ever."""
    shots = shots_at(running, per_s, seconds, seed)
    fire(running.server, running.peer.path, shots, _PATIENCE_S)
    return p99([shot.latency_s if shot.status == 200 else float("inf") for shot in shots])


def p99(values: Sequence[float]) -> float:
    return percentile(values, 0.99)


def _clocked(running: Running, clients: int, seconds: float) -> tuple[Load, float, float]:
    """The load, the processor's milliseconds a request, and the rows a call."""
    before, cpu_s = running.settled_work(), running.tree.cpu_s()
    found = _loaded(running, clients, seconds)
    done = running.settled_work().since(before)
    return found, 1000 * (running.tree.cpu_s() - cpu_s) / done.rows, done.rows / done.calls


def _loaded(running: Running, clients: int, seconds: float) -> Load:
    """For so long, or longer where that is too short for each client to be answered."""
    while True:
        found = load(running.server, running.peer.path, running.payloads, clients, seconds)
        if found.errors:
            raise NotRunning(f"{found.errors} of {found.answers + found.errors} requests failed")
        if found.answers >= clients:
            return found
        if seconds > _LONGEST_S:
            raise NotRunning(f"{clients} clients got {found.answers} answers in {seconds:g} s")
        seconds *= 4


# What one server does when things go wrong: bad JSON, clients that leave, too much, and SIGTERM.


TIMES, LEAVERS, LEAVE_AT = 4, 64, 8
_LOAD_S, _FAULTS_PATIENCE_S, _ANSWER_S, _GONE_S = 0.5, 5.0, 15.0, 15.0
_BROKEN = b'{"text": nope'


@dataclass(frozen=True, slots=True)
class Refusal:
    """What was said to a body that is no JSON."""

    status: int
    said: str


@dataclass(frozen=True, slots=True)
class Departure:
    """Clients that left before they were answered, and rows that were finished afterwards."""

    gone: int
    rows: int


@dataclass(frozen=True, slots=True)
class Overload:
    """What became of several times as many requests as it can answer."""

    offered_per_s: float
    in_time_per_s: float
    answered_s: tuple[float, ...]  # latencies of 200s
    refused: Mapping[int, int]  # by status
    unanswered: int
    refused_s: tuple[float, ...]
    retry_after: bool  # whether a refusal said when to come again


@dataclass(slots=True)
class Ending:
    """What became of those that waited when the signal came."""

    answered: int = 0
    refused: int = 0
    lost: int = 0
    gone_s: float | None = None  # until no process was left; None if some stayed
    stayed: int = 0  # processes


def malformed(running: Running) -> Refusal:
    """Send a body that is no JSON."""
    status, answer = running.ask(_BROKEN)
    return Refusal(status, " ".join(answer.decode(errors="replace").split()))


def left(running: Running) -> Departure:
    """Many ask at once, and all leave when the first few are answered.

    The rows that the model finishes afterwards are for nobody; the call under way is among them.
    """
    running.settled_work()
    answered, at = asyncio.run(_leave(running))
    return Departure(LEAVERS - answered, running.settled_work().since(at).rows)


def overloaded(
    running: Running,
    per_s: float,
    seconds: float,
    objective_s: float,
    more: Mapping[str, Any],
) -> Overload:
    """Ask for several times as much, each request when it is due.

    `more` changes each body; what is None there is left out.
    """
    offered_per_s = TIMES * per_s
    shots = shots_at(running, offered_per_s, seconds, seed=0)
    for shot in shots:
        asked = {**shot.body, **more}
        shot.body = {name: value for name, value in asked.items() if value is not None}
    fire(running.server, running.peer.path, shots, _FAULTS_PATIENCE_S, connections=2 * CLIENTS)
    ended = [shot for shot in shots if shot.ended_s is not None]
    answered_s = tuple(shot.latency_s for shot in ended if shot.status == 200)
    refused = [shot for shot in ended if shot.status != 200]
    running.settled_work()
    return Overload(
        offered_per_s=offered_per_s,
        in_time_per_s=sum(one <= objective_s for one in answered_s) / seconds,
        answered_s=answered_s,
        refused=Counter(shot.status for shot in refused),
        unanswered=len(shots) - len(ended),
        refused_s=tuple(shot.latency_s for shot in refused),
        retry_after=any(b"\r\nretry-after" in shot.head for shot in refused),
    )


def terminated(running: Running) -> Ending:
    """SIGTERM to the process that was started, while many clients wait. It does not run on."""
    running.tree.members()
    ending, told_s = asyncio.run(_terminate(running))
    if running.tree.gone_s(_GONE_S) is None:
        ending.stayed = len(running.tree.members())
    else:
        ending.gone_s = time.perf_counter() - told_s
    return ending


async def _leave(running: Running) -> tuple[int, Work]:
    """How many were answered, and the work that had been done when the others had left."""
    loop = ClosedLoop(running.server, running.peer.path, running.payloads)
    loop.again = False
    await loop.begin(LEAVERS)
    await loop.reached(LEAVE_AT)
    answered = loop.statuses.total()
    await loop.end()
    return answered, running.work()


async def _terminate(running: Running) -> tuple[Ending, float]:
    loop = ClosedLoop(running.server, running.peer.path, running.payloads)
    await loop.begin(CLIENTS)
    await asyncio.sleep(_LOAD_S)
    loop.again, lost = False, loop.lost
    loop.forget()
    running.tree.process.send_signal(signal.SIGTERM)
    told_s = time.perf_counter()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ANSWER_S):
            await loop.reached(CLIENTS)
    ending = Ending(answered=loop.statuses[200], lost=loop.lost - lost + loop.waiting)
    ending.refused = loop.statuses.total() - ending.answered
    await loop.end()
    return ending, told_s
