"""What one server does when things go wrong: bad JSON, clients that leave, too much, and SIGTERM.

Knows the wire; deliberately nothing of what the answers mean.
"""

import asyncio
import itertools
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.client import fire
from benchmarks.peers.running import Running, Work
from benchmarks.peers.speed import CLIENTS, arrivals

TIMES, LEAVERS, LEAVE_AT = 4, 64, 8
_LOAD_S, _PATIENCE_S, _ANSWER_S, _GONE_S = 0.5, 5.0, 15.0, 15.0
_BROKEN = b'{"text": nope'
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


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
    statuses: Counter[int] = field(default_factory=Counter)


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
    shots = arrivals(running, offered_per_s, seconds, seed=0)
    for shot in shots:
        wished = {**shot.body, **more}
        shot.body = {name: value for name, value in wished.items() if value is not None}
    fire(running.server, running.peer.path, shots, _PATIENCE_S, connections=2 * CLIENTS)
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


def _request(running: Running, number: int) -> bytes:
    payloads = running.payloads
    payload = payloads[number % len(payloads)]
    head = (
        f"POST {running.peer.path} HTTP/1.1\r\nhost: {running.server.host}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


async def _leave(running: Running) -> tuple[int, Work]:
    """How many were answered, and the work that had been done when the others had left."""
    pairs = [
        await asyncio.open_connection(running.server.host, running.server.port)
        for _ in range(LEAVERS)
    ]
    waiting = [asyncio.create_task(_status(reader)) for reader, _ in pairs]
    for number, (_, writer) in enumerate(pairs):
        writer.write(_request(running, number))
    for done in itertools.islice(asyncio.as_completed(waiting), LEAVE_AT):
        await done
    answered = sum(one.done() for one in waiting)
    for (_, writer), one in zip(pairs, waiting, strict=True):
        one.cancel()
        writer.transport.abort()
    await asyncio.gather(*waiting, return_exceptions=True)
    return answered, running.work()


async def _terminate(running: Running) -> tuple[Ending, float]:
    ending, told = Ending(), asyncio.Event()

    async def client(number: int) -> None:
        request = _request(running, number)
        reader, writer = await asyncio.open_connection(running.server.host, running.server.port)
        try:
            while True:
                writer.write(request)
                async with asyncio.timeout(_ANSWER_S):
                    status = await _status(reader)
                if told.is_set():
                    ending.statuses[status] += 1
                    break
        except (OSError, EOFError, TimeoutError):
            if told.is_set():
                ending.lost += 1
        finally:
            writer.close()

    clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
    await asyncio.sleep(_LOAD_S)
    told.set()
    running.tree.process.send_signal(signal.SIGTERM)
    told_s = time.perf_counter()
    await asyncio.gather(*clients)
    ending.answered = ending.statuses[200]
    ending.refused = sum(ending.statuses.values()) - ending.answered
    return ending, told_s


async def _status(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    found = _LENGTH.search(head)
    assert found is not None, head
    await reader.readexactly(int(found[1]))
    return int(head[9:12])
