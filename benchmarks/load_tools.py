"""Load tools, ours and others, asked for the same: what each reports, in one form.

It deliberately knows nothing of what they are compared with.
"""

import csv
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fixed_service import MODEL, FixedService
from benchmarks.machine import ROOT

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
        ordered = sorted(latencies_s)
        ranks = [ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99)]
        return cls(statistics.fmean(ordered), *ranks)

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
