"""How quickly /health/live answers while ten times as much is asked as the server can do.

Requests come when they are due, whatever became of those before, and a process of its own asks for
liveness every 20 ms; a probe counts from when it was due as well. It deliberately knows nothing of
why an answer takes as long as it does.
"""

import multiprocessing
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from benchmarks.open_loop import Shot, fire
from benchmarks.options import Options, options, parser, run
from benchmarks.result import Cell, Provenance, Result, Table, Target
from benchmarks.rounds import median
from benchmarks.server import Server, running_server
from benchmarks.texts import PROMPT, answer_tokens
from serve.bundle import Bundle

NAME = "liveness"
TIMES, WANTED_MS = 10.0, 50.0
EVERY_S = 0.02
_AT_ONCE = 16  # generations that decode together by default
_ANSWER_TOKENS = 64
_SECONDS, _QUICK_SECONDS = 20.0, 2.0
_AHEAD_S = 0.5  # for the process of the probes to start
_PATIENCE_S = 0.5
_PROBE = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
_LIVE = b'{"status":"live"}'


@dataclass(frozen=True, slots=True)
class Overload:
    """What came of the requests, and how long each probe took meanwhile."""

    answered: int
    refused: int
    probes_ms: Sequence[float]

    @property
    def p99_ms(self) -> float:
        return percentile(self.probes_ms, 0.99)


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    bundle = chosen.read("generate")[0]
    seconds = _QUICK_SECONDS if chosen.quick else _SECONDS
    with running_server([bundle.folder]) as server:
        idle_ms = _probed(server.host, server.port, time.monotonic(), seconds / 2)
        per_s = _capacity_per_s(server, bundle)
        found = overload(server, bundle, per_s, seconds)
    rows: list[Sequence[Cell]] = [
        ["at rest", 0.0, None, None, len(idle_ms), *_percentiles(idle_ms)],
        [
            "overload",
            TIMES,
            found.answered,
            found.refused,
            len(found.probes_ms),
            *_percentiles(found.probes_ms),
        ],
    ]
    columns = ("", "load", "answered", "refused", "probes", "p50 ms", "p99 ms", "most ms")
    what = f"p99 of /health/live at {TIMES:g} times overload"
    return provenance.result(
        NAME,
        "Liveness under overload",
        f"{bundle.manifest.name} at all its steps does {per_s:.1f} answers of {_ANSWER_TOKENS} "
        f"tokens a second; for {seconds:g} s it is asked for {TIMES:g} times as many, at the times "
        "that they are due. Liveness is asked for every 20 ms over one connection, by a process "
        "of its own, and a probe counts from when it is due. Everything shares one machine.",
        [Table("", columns, rows)],
        [Target(what, found.p99_ms, "<=", WANTED_MS, "ms")],
    )


def overload(server: Server, bundle: Bundle, per_s: float, seconds: float) -> Overload:
    """Ask for ten times this much, and probe meanwhile."""
    asked_per_s = TIMES * per_s
    shots = [
        Shot(_AHEAD_S + number / asked_per_s, _body(bundle, number))
        for number in range(max(1, round(seconds * asked_per_s)))
    ]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(time.monotonic).result()  # it has started
        begun_s = time.monotonic() + _AHEAD_S
        probes = pool.submit(_probed, server.host, server.port, begun_s, seconds)
        fire(server, "/v1/generate", shots, _PATIENCE_S)
        probes_ms = probes.result()
    statuses = [shot.status for shot in shots]
    if set(statuses) - {0, 200, 429}:
        raise SystemExit(f"requests were answered with {sorted(set(statuses))}")
    return Overload(statuses.count(200), statuses.count(429), probes_ms)


def _capacity_per_s(server: Server, bundle: Bundle) -> float:
    """Answers a second of a full batch, in the best of three."""
    taken_s = []
    for _ in range(3):
        shots = [Shot(0.0, _body(bundle, number)) for number in range(_AT_ONCE)]
        fire(server, "/v1/generate", shots, patience_s=120, connections=_AT_ONCE)
        taken_s.append(max(shot.latency_s for shot in shots))
    return _AT_ONCE / min(taken_s)


def _body(bundle: Bundle, seed: int) -> dict[str, object]:
    manifest = bundle.manifest
    return {
        "model": manifest.name,
        "prompt": PROMPT,
        "max_tokens": answer_tokens(bundle, _ANSWER_TOKENS),
        "steps": manifest.full_steps,
        "seed": seed,
    }


def _probed(host: str, port: int, begun_s: float, seconds: float) -> list[float]:
    """Milliseconds of each probe, from when it was due."""
    taken_ms = []
    with socket.create_connection((host, port), 30) as connection:
        for number in range(round(seconds / EVERY_S)):
            due_s = begun_s + number * EVERY_S
            time.sleep(max(0.0, due_s - time.monotonic()))
            connection.sendall(_PROBE)
            answer = b""
            while not answer.endswith(_LIVE):
                piece = connection.recv(65536)
                answer += piece
                if not piece or not answer.startswith(b"HTTP/1.1 200"):
                    raise SystemExit(f"a probe was answered with {answer[:100]!r}")
            taken_ms.append(1000 * (time.monotonic() - due_s))
    return taken_ms


def _percentiles(values_ms: Sequence[float]) -> list[Cell]:
    return [median(values_ms), percentile(values_ms, 0.99), max(values_ms)]


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that this share of all is at most."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
