"""Hours at a share of the measured capacity: does memory grow, does latency, does anything fail?

An open loop: requests are due at random moments, and latency counts from when they were due. Every
answer is checked. A line a minute is kept as it comes, so that one that is cut short has its data.
"""

import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.caller import LEFT, Callee, Caller, Outcomes
from benchmarks.options import Options
from benchmarks.pulse import Pulse, settled_gauges
from benchmarks.result import Cell, Provenance, Result, Table, Target
from benchmarks.server import READY_LINE, Server, running_server
from benchmarks.trend import Trend, floors, trend

NAME = "long_soak"
CLIENTS, LOAD, CAPACITY_S, PULSE_S, MINUTE_S = 64, 0.7, 30.0, 10.0, 60.0
WARM_SHARE, WARM_S = 0.1, 600.0  # of the whole, and at most: left out of all trends
WANTED_MB_PER_HOUR, WANTED_P99_RATIO, WANTED_MORE = 1.0, 1.2, 2
KINDS = ("classify", "generate", "generate, streamed")


class Served(NamedTuple):
    """A request that was answered, and when it was due."""

    kind: str
    due_s: float
    latency_ms: float


class Arrivals:
    """When requests are due: at random, at a steady rate, until the end. For several threads."""

    def __init__(self, rate_per_s: float, seconds: float, seed: int) -> None:
        self._rate, self._seconds, self._random = rate_per_s, seconds, random.Random(seed)
        self._due_s, self._lock = 0.0, threading.Lock()
        self.over = threading.Event()

    def next_s(self) -> float | None:
        """The next moment that nobody has taken; None when it is over."""
        with self._lock:
            self._due_s += self._random.expovariate(self._rate)
            due_s = self._due_s
        return None if due_s > self._seconds or self.over.is_set() else due_s


@dataclass(slots=True)
class Run:
    """What was seen, and where each minute of it is kept."""

    keep: Path
    begun_s: float
    served: list[Served] = field(default_factory=list)
    pulses: list[Pulse] = field(default_factory=list)
    minutes: list[dict[str, Any]] = field(default_factory=list)

    def look(self, server: Server) -> None:
        self.pulses.append(Pulse.of(server, time.perf_counter() - self.begun_s))

    def end_minute(self, number: int, errors: int) -> None:
        """Sum up the answers that were due in a minute, and write it down."""
        within = [one for one in self.served if number <= one.due_s / MINUTE_S < number + 1]
        line: dict[str, Any] = {"minute": number, "errors": errors}
        for kind in KINDS:
            ms = sorted(one.latency_ms for one in within if one.kind == kind)
            line[kind] = [len(ms), *(round(quantile(ms, share), 2) for share in (0.5, 0.99))]
        line["pulse"] = self.pulses[-1].to_json()
        self.minutes.append(line)
        with self.keep.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def measure(
    chosen: Options, seconds: float, load: float, keep: Path, provenance: Provenance
) -> Result:
    callees = [Callee.of(bundle) for bundle in chosen.read()]
    keep.write_text("", encoding="utf-8")
    print(f"a line a minute is kept in {keep}", flush=True)
    with running_server(chosen.bundles) as server:
        capacity_s = min(CAPACITY_S, seconds / 4)
        capacity = _capacity(server, callees, capacity_s)
        settled_gauges(server)
        before = Pulse.of(server, 0.0)
        rate = load * capacity
        print(f"{capacity:.1f} answers a second at most; now {rate:.1f} are asked", flush=True)
        run, outcomes = _load(server, callees, rate, seconds, keep)
        gauges = settled_gauges(server)
        after = Pulse.of(server, time.perf_counter() - run.begun_s)
        logged = server.logged().partition(READY_LINE)[2].strip().splitlines()
    wrong = [*outcomes.errors[:8], *(f"the server logged: {line}" for line in logged[:8])]
    lasted_s = run.pulses[-1].at_s if run.pulses else 0.0
    warm_s = min(WARM_S, WARM_SHARE * lasted_s)
    held = [(one.at_s, one.held_mb) for one in run.pulses if one.at_s >= warm_s]
    memory = trend(floors(held))
    slow = {kind: _halves(run, kind, warm_s) for kind in KINDS}
    tables = [
        Table("The load.", ("what", "measured"), _load_rows(capacity, rate, lasted_s, outcomes)),
        Table(
            "Held by the server, every 10 s; what comes first, as long as caches fill, is left "
            f"out of the slopes ({warm_s:.0f} s). Intervals are of 95 %. Caches come and go with "
            "requests, so the slope that counts is that of the least in each twentieth.",
            ("what", "idle, before", "median", "most", "idle, after", "an hour", "from", "to"),
            [*_held_rows(before, run.pulses, after, warm_s), _least_row(held, memory)],
        ),
        Table(
            "Milliseconds from when a request was due; the halves are medians of the p99 of "
            "their minutes.",
            ("request", "p50", "p99, first half", "p99, second half", "ratio"),
            [[kind, *cells] for kind, cells in slow.items()],
        ),
    ]
    if wrong:
        tables.append(Table("What went wrong first.", ("what",), [[one] for one in wrong]))
    return provenance.result(
        NAME,
        f"{lasted_s / 3600:.2g} hours at {load:.0%} of capacity",
        "An open loop of texts and answers, whole and streamed, of all lengths, at every rung; "
        "every twentieth request is left by its client before it is answered.",
        tables,
        _targets(outcomes, logged, memory, slow, before, after, gauges),
    )


def _targets(
    outcomes: Outcomes,
    logged: Sequence[str],
    memory: Trend,
    slow: dict[str, list[float]],
    before: Pulse,
    after: Pulse,
    gauges: dict[str, float],
) -> list[Target]:
    more = "more than before"
    return [
        Target("errors", len(outcomes.errors), "==", 0),
        Target("warnings and errors in the server's log", len(logged), "==", 0),
        Target(
            "memory, slope of the least", memory.per_hour, "<=", WANTED_MB_PER_HOUR, "MB an hour"
        ),
        *(
            Target(f"p99 of {kind}, second half over first", cells[3], "<=", WANTED_P99_RATIO)
            for kind, cells in slow.items()
        ),
        Target(f"files, {more}", after.files - before.files, "<=", WANTED_MORE),
        Target(f"threads, {more}", after.threads - before.threads, "<=", WANTED_MORE),
        *(Target(f"{name} afterwards", value, "==", 0) for name, value in gauges.items()),
    ]


def _capacity(server: Server, callees: Sequence[Callee], seconds: float) -> float:
    """Answers a second when all clients ask again as soon as they are answered."""
    begun_s = time.perf_counter()
    callers = [Caller(server, callees, 1000 + n, begun_s + seconds) for n in range(CLIENTS // 2)]
    threads = [threading.Thread(target=caller.call_on) for caller in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcomes = Outcomes.of(caller.outcomes for caller in callers)
    if outcomes.errors:
        raise SystemExit(f"while the capacity was measured: {outcomes.errors[0]}")
    return outcomes.answered / (time.perf_counter() - begun_s)


def _load(
    server: Server, callees: Sequence[Callee], rate: float, seconds: float, keep: Path
) -> tuple[Run, Outcomes]:
    """Load the server until the time is over, or somebody presses Ctrl-C."""
    arrivals = Arrivals(rate, seconds, seed=1)
    run = Run(keep, time.perf_counter())
    callers = [Caller(server, callees, seed, float("inf")) for seed in range(CLIENTS)]
    threads = [
        threading.Thread(target=_ask_on, args=(caller, arrivals, run), daemon=True)
        for caller in callers
    ]
    for thread in threads:
        thread.start()
    try:
        _watch(server, threads, callers, run, min(PULSE_S, seconds / 40))
    except KeyboardInterrupt:
        print("stopped; the result is that of the time until now", file=sys.stderr)
        arrivals.over.set()
    for thread in threads:
        thread.join()
    return run, Outcomes.of(caller.outcomes for caller in callers)


def _ask_on(caller: Caller, arrivals: Arrivals, run: Run) -> None:
    while (due_s := arrivals.next_s()) is not None:
        time.sleep(max(0.0, run.begun_s + due_s - time.perf_counter()))
        kind = caller.ask()
        if kind is not None and kind != LEFT:
            latency_ms = (time.perf_counter() - run.begun_s - due_s) * 1000
            run.served.append(Served(kind, due_s, latency_ms))
    caller.close()


def _watch(
    server: Server,
    threads: Sequence[threading.Thread],
    callers: Sequence[Caller],
    run: Run,
    pulse_s: float,
) -> None:
    """Look at the server again and again, and end minutes once their answers have come."""
    looks = minutes = 0
    while any(thread.is_alive() for thread in threads):
        run.look(server)
        looks += 1
        if run.pulses[-1].at_s >= (minutes + 1.5) * MINUTE_S:
            run.end_minute(minutes, sum(len(caller.outcomes.errors) for caller in callers))
            minutes += 1
        time.sleep(max(0.0, run.begun_s + looks * pulse_s - time.perf_counter()))
    run.end_minute(minutes, sum(len(caller.outcomes.errors) for caller in callers))


def _load_rows(
    capacity: float, rate: float, lasted_s: float, outcomes: Outcomes
) -> list[Sequence[Cell]]:
    rows: list[Sequence[Cell]] = [
        ["answers a second, closed loop: the capacity", capacity],
        ["requests a second, asked", rate],
        ["seconds", lasted_s],
        ["answers a second", outcomes.answered / lasted_s if lasted_s else None],
    ]
    return rows + [[f"... {kind}", count] for kind, count in sorted(outcomes.kinds.items())]


def _held_rows(
    before: Pulse, pulses: Sequence[Pulse], after: Pulse, warm_s: float
) -> list[Sequence[Cell]]:
    names = {"held_mb": "RSS, MB", "pss_mb": "PSS, MB", "files": "files", "threads": "threads"}
    names |= {"in_flight": "requests", "queue_depth": "waiting", "cache_mb": "caches, MB"}
    rows: list[Sequence[Cell]] = []
    for name, shown in names.items():
        values = [(one.at_s, float(getattr(one, name))) for one in pulses if one.at_s >= warm_s]
        found = trend(values)
        middle, most = statistics.median(v for _, v in values), max(v for _, v in values)
        cells = (getattr(before, name), middle, most, getattr(after, name))
        rows.append([shown, *cells, found.per_hour, found.low, found.high])
    return rows


def _least_row(held: Sequence[tuple[float, float]], memory: Trend) -> Sequence[Cell]:
    least = [value for _, value in floors(held)]
    cells = (None, statistics.median(least), max(least), None)
    return ["RSS, least of each twentieth, MB", *cells, memory.per_hour, memory.low, memory.high]


def _halves(run: Run, kind: str, warm_s: float) -> list[float]:
    """The p50 of all, the p99 of each half, and the second over the first."""
    served = [one for one in run.served if one.kind == kind and one.due_s >= warm_s]
    ms = sorted(one.latency_ms for one in served)
    middle_s = (warm_s + max((one.due_s for one in served), default=0.0)) / 2
    halves = []
    for half in (False, True):
        by_minute: dict[int, list[float]] = {}
        for one in served:
            if (one.due_s >= middle_s) == half:
                by_minute.setdefault(int(one.due_s // MINUTE_S), []).append(one.latency_ms)
        each = [quantile(sorted(latencies), 0.99) for latencies in by_minute.values()]
        halves.append(statistics.median(each) if each else 0.0)
    return [quantile(ms, 0.5), *halves, halves[1] / halves[0] if halves[0] else 0.0]


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in order; 0 of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
