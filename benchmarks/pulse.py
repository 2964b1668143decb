"""What a server holds while it runs: memory, files, threads, and what its gauges say.

Knows /proc and /metrics; deliberately nothing of the load.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.client import Client
from benchmarks.server import Memory, Server

GAUGES = ("stepdial_queue_depth", "stepdial_in_flight", "stepdial_cache_bytes")
GAUGES_S = 15.0


@dataclass(frozen=True, slots=True)
class Pulse:
    """One look at a server."""

    at_s: float
    held_mb: float
    pss_mb: float
    files: int
    threads: int
    queue_depth: float
    in_flight: float
    cache_mb: float

    @classmethod
    def of(cls, server: Server, at_s: float) -> "Pulse":
        memory, process = server.memory(), Path(f"/proc/{server.pid}")
        with Client.of(server) as client:
            gauges = read_gauges(client.get("/metrics"))
        return cls(
            at_s,
            held_mb(memory),
            memory.pss / 1e6,
            len(list((process / "fd").iterdir())) - 1,  # less the connection that asks
            len(list((process / "task").iterdir())),
            gauges["stepdial_queue_depth"],
            gauges["stepdial_in_flight"],
            gauges["stepdial_cache_bytes"] / 1e6,
        )

    def to_json(self) -> dict[str, Any]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


def held_mb(memory: Memory) -> float:
    """RSS, with what the machine swapped out: it would be in RSS on another one."""
    return (memory.rss + memory.swapped) / 1e6


def settled_gauges(server: Server) -> dict[str, float]:
    """The gauges once they are zero, or as they are when they take too long for that."""
    end_s = time.perf_counter() + GAUGES_S
    with Client.of(server) as client:
        while True:
            found = read_gauges(client.get("/metrics"))
            if not any(found.values()) or time.perf_counter() > end_s:
                return found
            time.sleep(0.1)


def read_gauges(exposition: str) -> dict[str, float]:
    """The gauges in what /metrics says; SystemExit if one is missing."""
    lines = (line.split(" ") for line in exposition.splitlines())
    values = {parts[0]: float(parts[1]) for parts in lines if parts[0] in GAUGES}
    missing = set(GAUGES) - set(values)
    if missing:
        raise SystemExit(f"/metrics has no {', '.join(sorted(missing))}")
    return values
