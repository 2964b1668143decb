"""Other load tools, asked for the same as ours: what each reports, in one form.

It deliberately knows nothing of what they are compared with.
"""

import csv
import json
import math
import re
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fixed_service import MODEL, FixedService

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
