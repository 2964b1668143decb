"""Many clients for minutes: errors, the server's memory, and whether its gauges come back to zero.

Each client mixes texts and answers, whole and streamed, at every rung, and some leave before they
are answered. With --hours or --minutes it is an open loop for so long instead, at a share of the
capacity (benchmarks/long_soak.py). It deliberately measures no latency: the load test does.
"""

import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import long_soak
from benchmarks.caller import Callee, Caller, Outcomes
from benchmarks.options import Options, options, parser, run
from benchmarks.pulse import held_mb, settled_gauges
from benchmarks.result import Cell, Provenance, Result, Table, Target
from benchmarks.server import READY_LINE, Memory, Server, running_server

NAME = "soak"
CLIENTS, SECONDS, SETTLE_S = 64, 120.0, 5.0
WANTED_IDLE_MB, WANTED_LOADED_MB, WANTED_GROWTH_MB = 400, 600, 10


@dataclass(frozen=True, slots=True)
class Sample:
    """The memory of the server at a time."""

    at_s: float
    memory: Memory


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--clients", type=int, default=None, help=f"(default: {CLIENTS})")
    made.add_argument("--seconds", type=float, default=None, help=f"(default: {SECONDS:g})")
    lasting = made.add_mutually_exclusive_group()
    lasting.add_argument("--hours", type=float, default=0.0, help="soak in an open loop")
    lasting.add_argument("--minutes", type=float, default=0.0, help="the same, shorter")
    share = long_soak.LOAD
    made.add_argument("--load", type=float, default=share, help=f"of the capacity ({share:g})")
    made.add_argument("--keep", type=Path, metavar="FILE", help="a line a minute, as it comes")
    parsed = made.parse_args(arguments)
    lasting_s = parsed.hours * 3600 + parsed.minutes * 60
    if lasting_s:
        keep = parsed.keep or Path(tempfile.gettempdir()) / f"{long_soak.NAME}.jsonl"
        long = partial(long_soak.measure, options(parsed), lasting_s, parsed.load, keep)
        return run(NAME, arguments, parsed, long)
    clients = parsed.clients or (8 if parsed.quick else CLIENTS)
    seconds = parsed.seconds or (2.0 if parsed.quick else SECONDS)
    return run(NAME, arguments, parsed, partial(measure, options(parsed), clients, seconds))


def measure(chosen: Options, clients: int, seconds: float, provenance: Provenance) -> Result:
    callees = [Callee.of(bundle) for bundle in chosen.read()]
    settle_s = 0.2 if chosen.quick else SETTLE_S
    with running_server(chosen.bundles) as server:
        time.sleep(settle_s)
        idle = server.memory()
        # What a first load leaves behind is kept for the next one; only what a second one adds
        # to it would grow for ever.
        warming, _ = _load(server, callees, clients, seconds / 2)
        warming_gauges = settled_gauges(server)
        time.sleep(settle_s)
        between = server.memory()
        begun_s = time.perf_counter()
        outcomes, samples = _load(server, callees, clients, seconds)
        elapsed_s = time.perf_counter() - begun_s
        gauges = settled_gauges(server)
        time.sleep(settle_s)
        after = server.memory()
        logged = server.logged().partition(READY_LINE)[2].strip().splitlines()
    most = max(samples, key=lambda sample: sample.memory.rss).memory
    errors = warming.errors + outcomes.errors
    tables = [
        Table("The load.", ("what", "measured"), _load_rows(outcomes, elapsed_s, samples)),
        Table(
            f"Memory of the server; a load of {seconds / 2:g} s comes first, so that what the "
            "second one leaves behind can be compared. Peak: the largest RSS since the start.",
            ("when", "RSS MB", "PSS MB", "swapped MB", "peak RSS MB"),
            [
                _memory_row("idle, before", idle),
                _memory_row("idle, after the first load", between),
                _memory_row("most under load", most),
                _memory_row("idle, after the second load", after),
            ],
        ),
    ]
    wrong = [*errors, *(f"the server logged: {line}" for line in logged)]
    if wrong:
        tables.append(Table("What went wrong first.", ("what",), [[one] for one in wrong[:10]]))
    growth_mb = held_mb(after) - held_mb(between)
    targets = [
        Target("errors", len(errors), "==", 0),
        Target("requests answered", outcomes.answered, ">=", clients),
        Target("warnings and errors in the server's log", len(logged), "==", 0),
        Target("RSS idle", held_mb(idle), "<=", WANTED_IDLE_MB, "MB"),
        Target("RSS under load", held_mb(most), "<=", WANTED_LOADED_MB, "MB"),
        Target("RSS added by the second load", growth_mb, "<=", WANTED_GROWTH_MB, "MB"),
        *(
            Target(f"{name} after a load", max(value, warming_gauges[name]), "==", 0)
            for name, value in gauges.items()
        ),
    ]
    return provenance.result(
        NAME,
        f"{clients} clients for {seconds:g} seconds",
        "Texts of all lengths and answers, whole and streamed, at every rung; every twentieth "
        "request is left by its client before it is answered.",
        tables,
        targets,
    )


def _load(
    server: Server, callees: Sequence[Callee], clients: int, seconds: float
) -> tuple[Outcomes, list[Sample]]:
    """Load the server; what came of it, and its memory meanwhile."""
    begun_s = time.perf_counter()
    callers = [Caller(server, callees, seed, begun_s + seconds) for seed in range(clients)]
    threads = [threading.Thread(target=caller.call_on) for caller in callers]
    for thread in threads:
        thread.start()
    samples = []
    for count in itertools.count(1):
        samples.append(Sample(time.perf_counter() - begun_s, server.memory()))
        if not any(thread.is_alive() for thread in threads):
            break
        due_s = begun_s + count * min(1.0, seconds / 10)
        time.sleep(max(0.0, due_s - time.perf_counter()))
    for thread in threads:
        thread.join()
    within = [sample for sample in samples if sample.at_s <= seconds]
    return Outcomes.of(caller.outcomes for caller in callers), within


def _load_rows(
    outcomes: Outcomes, elapsed_s: float, samples: Sequence[Sample]
) -> list[Sequence[Cell]]:
    rows: list[Sequence[Cell]] = [["requests answered", outcomes.answered]]
    rows += [[f"... {kind}", count] for kind, count in sorted(outcomes.kinds.items())]
    rows += [
        ["errors", len(outcomes.errors)],
        ["seconds, the last answers included", elapsed_s],
        ["answers a second", outcomes.answered / elapsed_s],
        ["RSS slope over the second half, MB a minute", _slope_mb_per_s(samples) * 60],
    ]
    return rows


def _memory_row(when: str, memory: Memory) -> list[Cell]:
    sizes = (memory.rss, memory.pss, memory.swapped, memory.peak)
    return [when, *(size / 1e6 for size in sizes)]


def _slope_mb_per_s(samples: Sequence[Sample]) -> float:
    """Of a straight line through the second half of the samples."""
    half = samples[len(samples) // 2 :]
    slope, _ = statistics.linear_regression(
        [sample.at_s for sample in half], [held_mb(sample.memory) for sample in half]
    )
    return slope


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
