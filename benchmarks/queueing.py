"""Whether the load test tells the truth: its latencies beside theory and beside other tools.

A queue of known speed is asked by `stepdial loadtest`. What it reports of an open loop is set
beside the same arrivals simulated and beside the formula of that queue (M/D/1), and what other
programs report of the same queue beside ours. It deliberately knows nothing of models.
"""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.awake import awake
from benchmarks.fixed_service import FixedService, running_queue
from benchmarks.load_tools import BODY, Times, ask_ab, ask_hey, ask_httperf
from benchmarks.machine import ROOT
from benchmarks.open_loop import Shot, fire
from benchmarks.options import parser, run
from benchmarks.result import Cell, Provenance, Result, Table, Target
from benchmarks.server import Server

NAME = "queueing"
WANTED = 0.05
SERVICE_S = 0.02
LOADS = (0.5, 0.7)
_USERS, _CLOSED_SERVICE_S = 8, 0.005
_PEER_RATE_PER_S = 35.0
_ROBUST = ("mean", "p50", "p90")  # of which chance leaves little after some minutes


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


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--seconds", type=float, default=600.0, help="of each open loop (600)")
    parsed = made.parse_args(arguments)
    seconds = 6.0 if parsed.quick else parsed.seconds
    return run(NAME, arguments, parsed, partial(measure, seconds))


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
        "arrivals. The formula knows only their rate, so that chance parts it from both."
    )
    about = (
        "`stepdial loadtest` against a queue of known speed, beside theory and beside other tools"
        + "".join(f", {condition}" for condition in conditions)
        + "."
    )
    return provenance.result(
        NAME,
        "Whether the load test tells the truth",
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
        reported = Times.of([latency_s - alone_s + added_s for latency_s in sent.latencies_s])
        simulated = Times.of([wait_s + added_s for wait_s in waits_s])
        for (name, value), (_, exact), (_, formula) in zip(
            reported.items(), simulated.items(), theory.items(), strict=True
        ):
            assert value is not None and exact is not None and formula is not None, "all are known"
            known_s = formula + added_s
            # Half wait little or not at all, so that a ratio of medians would say nothing.
            if what == "wait" and name == "p50":
                rows.append([load, f"{what} {name}", *_ms(known_s, exact, value), None, None])
                continue
            to_formula, to_simulated = value / known_s, value / exact
            ratios = to_formula, to_simulated
            rows.append([load, f"{what} {name}", *_ms(known_s, exact, value), *ratios])
            targets.append(_near(f"load {load}: {what} {name} to simulated", to_simulated))
            if name in _ROBUST and what == "latency":
                targets.append(_near(f"load {load}: {what} {name} to formula", to_formula))
    return rows, targets


def _against_peers(closed_s: float, open_s: float) -> tuple[Table, list[Target]]:
    """Other tools beside ours, closed and open, each against a queue that begins anew."""
    rows: list[list[Cell]] = []
    targets: list[Target] = []

    def add(what: str, tool: str, per_s: float, times: Times, ours: Sent | None) -> None:
        rows.append([what, tool, per_s, *_ms(*(value for _, value in times.items()))])
        if ours:
            theirs = [("req/s", per_s), *times.items()]
            reported = [("req/s", ours.per_s), *ours.times.items()]
            for (name, value), (_, own) in zip(theirs, reported, strict=True):
                if value and own:
                    targets.append(_near(f"{what}, {name}: ours to {tool}", own / value))

    fresh = partial(running_queue, _CLOSED_SERVICE_S, scattered=True)
    what = f"closed, {_USERS} clients"
    with fresh() as queue:
        ours = ask_closed(queue, closed_s)
    add(what, "stepdial loadtest", ours.per_s, ours.times, None)
    count = len(ours.latencies_s)
    for tool, ask in (("ab", ask_ab), ("hey", ask_hey)):
        if shutil.which(tool):
            with fresh() as queue:
                per_s, times = ask(queue, count, _USERS)
            add(what, tool, per_s, times, ours)
    fresh = partial(running_queue, SERVICE_S, scattered=True)
    what = f"open, {_PEER_RATE_PER_S:g}/s"
    with fresh() as queue:
        ours = ask_open(queue, _PEER_RATE_PER_S, open_s, "constant")
    add(what, "stepdial loadtest", ours.per_s, ours.times, None)
    with fresh() as queue:
        shots = [Shot(due_s - ours.due_s[0], BODY) for due_s in ours.due_s]
        server = Server(0, queue.host, queue.port, Path(os.devnull))
        fire(server, "/v1/classify", shots, patience_s=30.0)
    ended_s = max(shot.ended_s or 0.0 for shot in shots)
    times = Times.of([shot.latency_s for shot in shots])
    add(what, "asyncio client", len(shots) / ended_s, times, ours)
    if shutil.which("httperf"):
        with fresh() as queue:
            per_s, times = ask_httperf(queue, _PEER_RATE_PER_S, len(shots))
        add(what, "httperf", per_s, times, ours)
    columns = ("loop", "tool", "req/s", "mean ms", "p50 ms", "p90 ms", "p99 ms")
    caption = (
        "The same queue asked by other tools, with services of exponential length, the same for "
        f"each tool: {_CLOSED_SERVICE_S * 1e3:g} ms in the mean for the closed loop, "
        f"{SERVICE_S * 1e3:g} ms for the open one, whose arrivals are even. Tools that are not "
        "installed are left out. httperf opens a connection for each request, and rounds medians."
    )
    return Table(caption, columns, rows), targets


def ask_open(
    queue: FixedService, rate_per_s: float, seconds: float, shape: str = "poisson"
) -> Sent:
    """Our open loop."""
    flags = ["--shape", shape, "--rate", f"{rate_per_s:g}", "--duration", f"{seconds:.1f}s"]
    return _ask(queue, *flags)


def ask_closed(queue: FixedService, seconds: float) -> Sent:
    """Our closed loop."""
    return _ask(queue, "--users", str(_USERS), "--duration", f"{math.ceil(seconds)}s")


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
