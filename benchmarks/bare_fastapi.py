"""What the server adds to HTTP: requests a second and latency beside a bare FastAPI handler.

    python -m benchmarks.bare_fastapi

Both are processes with the same request and response, and a model that answers at once. They take
turns: 32 clients that ask again at once, then one alone.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks.client import Load, load
from benchmarks.lab import (
    Cell,
    Options,
    Provenance,
    Result,
    Table,
    Target,
    interleave,
    median_ratio,
    options,
    parser,
    percentile,
    run,
)
from benchmarks.server import Server, process_cpu_s, running_stub, started
from serve.bundle import Bundle

NAME = "bare_fastapi"
CLIENTS = 32
WANTED_RATIO, WANTED_MS = 0.8, 1.0
_PATH = "/v1/classify"
_BODY = b'{"input":"A film that stays with you."}'
_ROUND_S, _QUICK_ROUND_S = 2.0, 0.2
_SECONDS, _LEAST = 30.0, 5


@dataclass(frozen=True, slots=True)
class Round:
    """A load, and the processor time that the server took for it and for what came before."""

    load: Load
    cpu_s: float

    @property
    def cpu_ms(self) -> float:
        """Of one request; a tenth of the time was not counted, but worked for as well."""
        return 1000 * self.cpu_s / (1.1 * self.load.answers)


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    bundle = chosen.read("classify")[0]
    with both(bundle) as servers:
        many = rounds(servers, CLIENTS, chosen.quick)
        one = rounds(servers, 1, chosen.quick)
    ratio = median_ratio(
        [found.load.per_s for found in many["stepdial"]],
        [found.load.per_s for found in many["bare"]],
    )
    added_ms = median(
        [
            _median_ms(ours) - _median_ms(bare)
            for ours, bare in zip(one["stepdial"], one["bare"], strict=True)
        ]
    )
    columns = ("server", "clients", "rounds", "requests/s", "CPU ms", "p50 ms", "p99 ms")
    rows = [
        _row(name, clients, found[name])
        for clients, found in ((CLIENTS, many), (1, one))
        for name in ("stepdial", "bare")
    ]
    return provenance.result(
        NAME,
        "What the server adds to HTTP",
        "A stub that answers at once in place of the model, behind the whole server, against a "
        "bare FastAPI handler that checks the same request and returns a constant answer of the "
        "same shape, under the same uvicorn settings. Rounds of both take turns; medians of "
        "rounds, and of what is compared within each round. The bare handler also lacks the "
        "thread of an engine, deadlines, limits, metrics, request ids and security headers.",
        [Table("", columns, rows)],
        [
            Target(f"requests/s of {CLIENTS} clients, over bare", ratio, ">=", WANTED_RATIO),
            Target("added at the median, one client", added_ms, "<=", WANTED_MS, "ms"),
        ],
    )


@contextmanager
def both(bundle: Bundle) -> Iterator[dict[str, Server]]:
    """The server with a stub, and the bare one."""
    labels = bundle.manifest.labels or ()
    with (
        running_stub(bundle.folder, 0.0, 0.0) as ours,
        started("benchmarks.bare_app", *labels) as theirs,
    ):
        yield {"stepdial": ours, "bare": theirs}


def rounds(servers: Mapping[str, Server], clients: int, quick: bool) -> dict[str, list[Round]]:
    """Loads of both in turn."""
    round_s = _QUICK_ROUND_S if quick else _ROUND_S

    def one(server: Server) -> Round:
        before_s = process_cpu_s(server.pid)
        found = load(server, _PATH, [_BODY], clients, round_s)
        if found.errors or not found.answers:
            raise SystemExit(f"{found.errors} of {found.answers} requests failed")
        return Round(found, process_cpu_s(server.pid) - before_s)

    calls = {name: partial(one, server) for name, server in servers.items()}
    return interleave(calls, 0 if quick else _SECONDS, 2 if quick else _LEAST)


def _median_ms(found: Round) -> float:
    return 1000 * median(found.load.latencies_s)


def _row(name: str, clients: int, found: Sequence[Round]) -> list[Cell]:
    latencies_s = [latency_s for one in found for latency_s in one.load.latencies_s]
    return [
        *(name, clients, len(found)),
        median([one.load.per_s for one in found]),
        median([one.cpu_ms for one in found]),
        1000 * median(latencies_s),
        1000 * percentile(latencies_s, 0.99),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
