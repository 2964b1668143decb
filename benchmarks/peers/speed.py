"""How fast one server is: one client, many, and the highest rate whose slowest answers are in time.

Knows loads; deliberately nothing of who serves.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.client import Load, Shot, fire, load
from benchmarks.lab import percentile
from benchmarks.peers.running import NotRunning, Running

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


def arrivals(running: Running, per_s: float, seconds: float, seed: int) -> list[Shot]:
    """Requests at random times, as of people who do not know of each other."""
    draw, bodies, due_s = random.Random(seed), running.bodies, 0.0
    shots: list[Shot] = []
    while not shots or due_s < seconds:
        shots.append(Shot(due_s, dict(bodies[len(shots) % len(bodies)])))
        due_s += draw.expovariate(per_s)
    return shots


def _slowest_s(running: Running, per_s: float, seconds: float, seed: int) -> float:
    """The latency that 99 % stay below; what was not answered took for ever."""
    shots = arrivals(running, per_s, seconds, seed)
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
