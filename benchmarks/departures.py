"""Clients that disconnect at random moments: whether their work goes on, and what is left of it.

    python -m benchmarks.departures

Each opens a connection, sends a request or a part of it, waits a random time and closes the
connection; half of them with a reset (RST), as a process that is killed.
"""

import asyncio
import json
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

from benchmarks.client import Client
from benchmarks.lab import Cell, Options, Provenance, Result, Table, Target, options, parser, run
from benchmarks.server import Server, running_server
from benchmarks.soak import held_mb, settled_gauges
from benchmarks.texts import PARAGRAPHS, PROMPT

NAME = "departures"
CLIENTS, TOGETHER = 10_000, 64
# Where a client leaves: while it sends, at once, soon, or in the middle of a long answer.
MOMENTS = ("half a request", "at once", "soon", "in the middle")
_WAITS_S = {"soon": 0.02, "in the middle": 0.3}
_STILL_S = 2.0
_EVALUATIONS = re.compile(r"^stepdial_velocity_evaluations_total\{[^}]*\} (\S+)$", re.MULTILINE)
_CANCELLED = re.compile(r"^stepdial_cancelled_total (\S+)$", re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    count = 100 if chosen.quick else CLIENTS
    tasks = {one.manifest.task for one in chosen.read()}
    paths = [path for path, task in _PATHS.items() if task in tasks]
    with running_server(chosen.bundles) as server:
        asyncio.run(_leave(server, paths, max(50, count // 10), seed=1))
        settled_gauges(server)
        before_mb = held_mb(server.memory())
        begun_s = time.perf_counter()
        left = asyncio.run(_leave(server, paths, count, seed=2))
        spent_s = time.perf_counter() - begun_s
        gauges = settled_gauges(server)
        settled_s = time.perf_counter() - begun_s - spent_s
        evaluations = _evaluations(server)
        time.sleep(_STILL_S)
        more = _evaluations(server) - evaluations
        with Client.of(server) as client:
            cancelled = sum(map(float, _CANCELLED.findall(client.get("/metrics"))))
        growth_mb = held_mb(server.memory()) - before_mb
    rows: list[Sequence[Cell]] = [[f"left {moment}", left[moment]] for moment in MOMENTS]
    rows += [
        ["answered before they left", left["answered"]],
        ["refused with 429", left["refused"]],
        ["cancelled in the engine", int(cancelled)],
        ["seconds", spent_s],
        ["seconds until every gauge was zero", settled_s],
        ["RSS added, MB; a tenth as many came before", growth_mb],
    ]
    targets = [
        Target("clients that left", sum(left[moment] for moment in MOMENTS), ">=", count),
        Target(f"evaluations in {_STILL_S:g} s after the last had left", more, "==", 0),
        *(Target(f"{name} afterwards", value, "==", 0) for name, value in gauges.items()),
    ]
    return provenance.result(
        NAME,
        f"{count} clients that leave at random moments",
        f"{TOGETHER} at a time, over HTTP, classifications and long answers, whole and streamed. "
        "Half of them reset their connection (RST).",
        [Table("", ("what", "measured"), rows)],
        targets,
    )


_PATHS = {"/v1/classify": "classify", "/v1/generate": "generate"}


def _body(path: str, draw: random.Random) -> dict[str, object]:
    if path == "/v1/classify":
        return {"input": draw.choices(PARAGRAPHS, k=draw.randint(1, 8))}
    stream = draw.random() < 0.5
    return {"prompt": PROMPT, "max_tokens": draw.randint(1, 400), "stream": stream}


async def _leave(server: Server, paths: Sequence[str], count: int, seed: int) -> Counter[str]:
    draw, kept = random.Random(seed), Counter[str]()
    turns = asyncio.Semaphore(TOGETHER)

    async def one(seed: int) -> None:
        async with turns:
            await _client(server, paths, random.Random(seed), kept)

    await asyncio.gather(*(one(draw.getrandbits(32)) for _ in range(count)))
    return kept


async def _client(
    server: Server, paths: Sequence[str], draw: random.Random, kept: Counter[str]
) -> None:
    path, moment = draw.choice(paths), draw.choice(MOMENTS)
    body = json.dumps(_body(path, draw)).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    sent = head + body
    if moment == "half a request":
        sent = sent[: draw.randrange(1, len(sent))]
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(sent)
    await writer.drain()
    if moment in _WAITS_S:
        wait_s = draw.random() * _WAITS_S[moment]
        try:
            got = await asyncio.wait_for(reader.readuntil(b"\r\n"), wait_s)
            kept["refused" if b" 429 " in got else "answered"] += 1
        except TimeoutError:
            pass
    if draw.random() < 0.5:  # as a process that is killed
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    kept[moment] += 1


def _evaluations(server: Server) -> float:
    with Client.of(server) as client:
        return sum(map(float, _EVALUATIONS.findall(client.get("/metrics"))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
