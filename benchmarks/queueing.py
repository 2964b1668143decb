"""Latencies that the load test reports, beside theory and beside other tools.

    python -m benchmarks.queueing

A queue of known speed is asked by `stepdial loadtest`. What it reports of an open loop is set
beside the same arrivals simulated and beside the formula of that queue (M/D/1), and what other
programs report of the same queue beside ours.
"""

import csv
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.client import Shot, fire
from benchmarks.fixed_service import MODEL, FixedService, running_queue
from benchmarks.lab import (
    ROOT,
    Cell,
    Provenance,
    Result,
    Table,
    Target,
    awake,
    median_ratio,
    parser,
    percentile,
    run,
)
from benchmarks.server import Server

# Load tools, ours and others, asked for the same: what each reports, in one form.


BODY = {"model": MODEL, "input": "A text.", "steps": 1}


@dataclass(frozen=True, slots=True)
class Times:
    """Latencies in seconds, summed up; None where a tool does not say."""

    mean: float
    p50: float
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, latencies_s: Sequence[float]) -> "Times":
        shares = (percentile(latencies_s, share) for share in (0.5, 0.9, 0.99))
        return cls(statistics.fmean(latencies_s), *shares)

    def items(self) -> Iterator[tuple[str, float | None]]:
        yield from (("mean", self.mean), ("p50", self.p50), ("p90", self.p90), ("p99", self.p99))


@dataclass(frozen=True, slots=True)
class Sent:
    """What our load test kept: when each request was due, and how long it took."""

    due_s: Sequence[float]
    latencies_s: Sequence[float]
    per_s: float
    saturated: bool

    @property
    def times(self) -> Times:
        return Times.of(self.latencies_s)


def ask_open(
    queue: FixedService, rate_per_s: float, seconds: float, shape: str = "poisson"
) -> Sent:
    """Our open loop."""
    flags = ["--shape", shape, "--rate", f"{rate_per_s:g}", "--duration", f"{seconds:.1f}s"]
    return _ask(queue, *flags)


def ask_closed(queue: FixedService, users: int, seconds: float) -> Sent:
    """Our closed loop."""
    return _ask(queue, "--users", str(users), "--duration", f"{math.ceil(seconds)}s")


def _ask(queue: FixedService, *flags: str) -> Sent:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "loadtest", "--url", queue.url, *flags]
        report = Path(folder, "report.json")
        command += ["--out", str(report), "--keep-requests"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        record = json.loads(report.read_text(encoding="utf-8"))
        with Path(folder, "requests.csv").open(encoding="utf-8", newline="") as file:
            lines = [*csv.DictReader(file)]
    due_s = [float(line["started_s"]) for line in lines]
    latencies_s = [float(line["total_ms"]) / 1e3 for line in lines]
    return Sent(due_s, latencies_s, len(lines) / record["elapsed_s"], record["saturated"])


def ask_ab(queue: FixedService, count: int, users: int) -> tuple[float, Times]:
    """ApacheBench, a closed loop."""
    with tempfile.TemporaryDirectory() as folder:
        body, shares = Path(folder, "body.json"), Path(folder, "shares.csv")
        body.write_text(json.dumps(BODY), encoding="utf-8")
        flags = ["-k", "-q", "-c", str(users), "-n", str(count), "-e", str(shares)]
        flags += ["-T", "application/json", "-p", str(body)]
        printed = _printed(["ab", *flags, f"{queue.url}/v1/classify"])
        with shares.open(encoding="utf-8", newline="") as file:
            served = {row[0]: float(row[1]) / 1e3 for row in [*csv.reader(file)][1:]}
    mean_s = _number(r"Time per request:\s+([\d.]+) \[ms\] \(mean\)", printed) / 1e3
    times = Times(mean_s, served["50"], served["90"], served["99"])
    return _number(r"Requests per second:\s+([\d.]+)", printed), times


def ask_hey(queue: FixedService, count: int, users: int) -> tuple[float, Times]:
    """hey, a closed loop."""
    flags = ["-c", str(users), "-n", str(count // users * users), "-m", "POST"]
    flags += ["-T", "application/json", "-d", json.dumps(BODY), "-o", "csv"]
    printed = _printed(["hey", *flags, f"{queue.url}/v1/classify"])
    lines = [*csv.DictReader(printed.splitlines())]
    latencies_s = [float(line["response-time"]) for line in lines]
    ended_s = max(float(line["offset"]) + float(line["response-time"]) for line in lines)
    return len(lines) / ended_s, Times.of(latencies_s)


def ask_httperf(queue: FixedService, rate_per_s: float, count: int) -> tuple[float, Times]:
    """httperf, an open loop of even arrivals; each request has a connection of its own."""
    flags = ["--server", queue.host, "--port", str(queue.port), "--hog"]
    flags += [f"--period={1 / rate_per_s:.6f}"]
    body = json.dumps(BODY).replace('"', '\\"')
    with tempfile.TemporaryDirectory() as folder:
        session = Path(folder, "session")
        session.write_text(f'/v1/classify method=POST contents="{body}"\n', encoding="utf-8")
        flags.append(f"--wsesslog={count},0,{session}")
        printed = _printed(["httperf", *flags])
    mean_ms = _number(r"Connection time \[ms\]: min [\d.]+ avg ([\d.]+)", printed)
    median_ms = _number(r"Connection time \[ms\]: .* median ([\d.]+)", printed)
    per_s = _number(r"Request rate: ([\d.]+) req/s", printed)
    return per_s, Times(mean_ms / 1e3, median_ms / 1e3, None, None)


def _printed(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


NAME = "queueing"
WANTED = 0.05
SERVICE_S = 0.02
SECONDS = 600.0  # of each open loop
LOADS = (0.5, 0.7)
_USERS, _CLOSED_SERVICE_S = 8, 0.005
_PEER_RATE_PER_S = 35.0
_STRETCH_S = 30.0  # a machine that was taken away for a while disturbs some of them, not all
_ROUNDS = 5
_OURS = "stepdial loadtest"
_ROBUST = ("mean", "p50", "p90")  # of which chance leaves little after some minutes


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, 6.0 if parsed.quick else SECONDS))


def measure(seconds: float, provenance: Provenance) -> Result:
    ahead = _go_ahead_of_others()
    with awake() as kept:
        return _measure(seconds, provenance, [*ahead, *["on cores kept awake"] * kept])


def _measure(seconds: float, provenance: Provenance, conditions: Sequence[str]) -> Result:
    # All at a time, in the same noise; each takes a small share of a core.
    with ThreadPoolExecutor(len(LOADS) + 1) as pool:
        alone = pool.submit(_alone_s, seconds)
        sent = [*pool.map(partial(_at_load, seconds=seconds), LOADS)]
        alone_s = alone.result()
    theory = [_against_theory(*pair, alone_s) for pair in zip(LOADS, sent, strict=True)]
    peers, peer_targets = _against_peers(seconds / 20, seconds / 10)
    columns = ("load", "", "formula", "simulated", "reported", "to formula", "to simulated")
    caption = (
        f"Milliseconds, {seconds:g} s of Poisson arrivals, services of {SERVICE_S * 1e3:g} ms. "
        f"Latency counts from when a request was due; one that is alone takes "
        f"{alone_s * 1e3:.2f} ms, and what it takes longer is its wait. Simulated: the same "
        "arrivals. The formula knows only their rate, so that chance parts it from both. To "
        f"simulated: the median over stretches of {_STRETCH_S:g} s, so that a machine that was "
        "taken away now and then does not count; to formula: that of what was simulated."
    )
    about = (
        "`stepdial loadtest` against a queue of known speed, beside theory and beside other tools"
        + "".join(f", {condition}" for condition in conditions)
        + "."
    )
    return provenance.result(
        NAME,
        "The load test beside theory and other tools",
        about,
        [Table(caption, columns, [row for rows, _ in theory for row in rows]), peers],
        [*(target for _, found in theory for target in found), *peer_targets],
    )


def _go_ahead_of_others() -> list[str]:
    """So that what else runs on the machine is not measured; nothing if the system forbids it."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, PermissionError):
        return []
    return ["all with real-time priority"]


def _alone_s(seconds: float) -> float:
    """What a request takes that meets no other: its service, HTTP, and the client."""
    with running_queue(SERVICE_S) as queue:
        return ask_open(queue, 10.0, seconds, "constant").times.p50


def _at_load(load: float, seconds: float) -> Sent:
    with running_queue(SERVICE_S) as queue:
        return ask_open(queue, load / SERVICE_S, seconds)


def _against_theory(
    load: float, sent: Sent, alone_s: float
) -> tuple[list[list[Cell]], list[Target]]:
    waits_s = simulate(sent.due_s, SERVICE_S)
    theory = wait_formula(load / SERVICE_S, SERVICE_S)
    rows: list[list[Cell]] = []
    targets = [Target(f"load {load}: the sender kept up", float(not sent.saturated), "==", 1.0)]
    for what, added_s in (("wait", 0.0), ("latency", alone_s)):
        reported_s = [latency_s - alone_s + added_s for latency_s in sent.latencies_s]
        simulated_s = [wait_s + added_s for wait_s in waits_s]
        ratios = undisturbed(sent.due_s, reported_s, simulated_s)
        for (name, value), (_, exact), (_, formula) in zip(
            Times.of(reported_s).items(),
            Times.of(simulated_s).items(),
            theory.items(),
            strict=True,
        ):
            assert value is not None and exact is not None and formula is not None, "all are known"
            known_s = formula + added_s
            # Half wait little or not at all, so that a ratio of medians would say nothing.
            if what == "wait" and name == "p50":
                rows.append([load, f"{what} {name}", *_ms(known_s, exact, value), None, None])
                continue
            to_simulated = ratios[name]
            to_formula = to_simulated * exact / known_s
            rows.append(
                [load, f"{what} {name}", *_ms(known_s, exact, value), to_formula, to_simulated]
            )
            targets.append(_near(f"load {load}: {what} {name} to simulated", to_simulated))
            if name in _ROBUST and what == "latency":
                targets.append(_near(f"load {load}: {what} {name} to formula", to_formula))
    return rows, targets


def undisturbed(
    due_s: Sequence[float], reported_s: Sequence[float], simulated_s: Sequence[float]
) -> dict[str, float]:
    """By figure, the median over stretches of what was reported to what was simulated there."""
    stretches: dict[int, list[tuple[float, float]]] = {}
    for moment_s, *pair in zip(due_s, reported_s, simulated_s, strict=True):
        stretches.setdefault(int((moment_s - due_s[0]) / _STRETCH_S), []).append((pair[0], pair[1]))
    whole = [pairs for number, pairs in sorted(stretches.items()) if number + 1 < len(stretches)]
    found: dict[str, list[float]] = {}
    for pairs in whole or stretches.values():  # the last is shorter
        ours, exact = (Times.of(values) for values in zip(*pairs, strict=True))
        for (name, value), (_, known) in zip(ours.items(), exact.items(), strict=True):
            if value is not None and known:
                found.setdefault(name, []).append(value / known)
    return {name: median(ratios) for name, ratios in found.items()}


def _against_peers(closed_s: float, open_s: float) -> tuple[Table, list[Target]]:
    """Other tools beside ours, closed and open, turn by turn, against queues that begin anew."""
    rows: list[list[Cell]] = []
    targets: list[Target] = []
    for what, loops in (
        (f"closed, {_USERS} clients", _closed_loops(closed_s / _ROUNDS)),
        (f"open, {_PEER_RATE_PER_S:g}/s", _open_loops(open_s / _ROUNDS)),
    ):
        seen: dict[str, dict[str, list[float]]] = {tool: {} for tool in loops}
        for _ in range(_ROUNDS):
            for tool, ask in loops.items():
                answers_per_s, times = ask()
                for name, value in (("req/s", answers_per_s), *times.items()):
                    seen[tool].setdefault(name, []).extend([value] if value else [])
        ours = seen[_OURS]
        for tool, figures in seen.items():
            per_s, *times_s = (median(found) if found else None for found in figures.values())
            rows.append([what, tool, per_s, *_ms(*times_s)])
            targets += [
                _near(f"{what}, {name}: ours to {tool}", median_ratio(ours[name], found))
                for name, found in figures.items()
                if tool != _OURS and found
            ]
    columns = ("loop", "tool", "req/s", "mean ms", "p50 ms", "p90 ms", "p99 ms")
    caption = (
        "The same queue asked by other tools, with services of exponential length, the same for "
        f"each tool: {_CLOSED_SERVICE_S * 1e3:g} ms in the mean for the closed loop, "
        f"{SERVICE_S * 1e3:g} ms for the open one, whose arrivals are even. Medians of {_ROUNDS} "
        "rounds, and of the ratios in each. Tools that are not installed are left out. httperf "
        "opens a connection for each request, and rounds medians."
    )
    return Table(caption, columns, rows), targets


def _closed_loops(seconds: float) -> dict[str, Callable[[], tuple[float, Times]]]:
    fresh = partial(running_queue, _CLOSED_SERVICE_S, scattered=True)
    count = 0

    def ours() -> tuple[float, Times]:
        nonlocal count
        with fresh() as queue:
            sent = ask_closed(queue, _USERS, seconds)
        count = len(sent.latencies_s)
        return sent.per_s, sent.times

    def other(
        ask: Callable[[FixedService, int, int], tuple[float, Times]],
    ) -> tuple[float, Times]:
        with fresh() as queue:
            return ask(queue, count, _USERS)

    others = {"ab": ask_ab, "hey": ask_hey}
    return {_OURS: ours} | {
        tool: partial(other, ask) for tool, ask in others.items() if shutil.which(tool)
    }


def _open_loops(seconds: float) -> dict[str, Callable[[], tuple[float, Times]]]:
    fresh = partial(running_queue, SERVICE_S, scattered=True)
    due_s: Sequence[float] = ()

    def ours() -> tuple[float, Times]:
        nonlocal due_s
        with fresh() as queue:
            sent = ask_open(queue, _PEER_RATE_PER_S, seconds, "constant")
        due_s = sent.due_s
        return sent.per_s, sent.times

    def client() -> tuple[float, Times]:
        shots = [Shot(moment_s - due_s[0], BODY) for moment_s in due_s]
        with fresh() as queue:
            server = Server(0, queue.host, queue.port, Path(os.devnull))
            fire(server, "/v1/classify", shots, patience_s=30.0)
        ended_s = max(shot.ended_s or 0.0 for shot in shots)
        return len(shots) / ended_s, Times.of([shot.latency_s for shot in shots])

    def httperf() -> tuple[float, Times]:
        with fresh() as queue:
            return ask_httperf(queue, _PEER_RATE_PER_S, len(due_s))

    found = {_OURS: ours, "asyncio client": client}
    return found | ({"httperf": httperf} if shutil.which("httperf") else {})


def simulate(due_s: Sequence[float], service_s: float) -> list[float]:
    """How long each of these arrivals waits before one server, by Lindley's recursion."""
    free_s, waits_s = 0.0, []
    for moment_s in due_s:
        begin_s = max(free_s, moment_s)
        waits_s.append(begin_s - moment_s)
        free_s = begin_s + service_s
    return waits_s


def wait_formula(rate_per_s: float, service_s: float) -> Times:
    """Waits of M/D/1: Pollaczek and Khinchine's mean, and Erlang's distribution."""
    load = rate_per_s * service_s

    def waited_less(wait_s: float) -> float:
        terms = []
        for served in range(int(wait_s / service_s) + 1):
            behind = rate_per_s * (served * service_s - wait_s)  # at most 0
            terms.append(math.exp(-behind) * behind**served / math.factorial(served))
        return (1 - load) * math.fsum(terms)

    # Beyond, the terms are so great that what is left of their sum is no longer exact.
    most_s = 20 * service_s
    quantiles = [_solve(waited_less, share, most_s) for share in (0.5, 0.9, 0.99)]
    return Times(load * service_s / (2 * (1 - load)), *quantiles)


def _solve(share_of: Callable[[float], float], share: float, most: float) -> float:
    """Where a distribution reaches a share, by halving."""
    low, high = 0.0, most
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share_of(middle) < share else (low, middle)
    return high


def _ms(*values_s: float | None) -> list[Cell]:
    return [None if value_s is None else value_s * 1e3 for value_s in values_s]


def _near(what: str, ratio: float) -> Target:
    return Target(f"{what}: off by", abs(ratio - 1), "<=", WANTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
