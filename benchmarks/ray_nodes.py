"""Stepdial on Ray: nodes killed under load, and how much two replicas do of what one does.

The cluster's nodes are on this machine. A node is killed with every process on it at once, while
streams run on all of them; what ends how is counted. It deliberately knows nothing of Ray itself.
"""

import json
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import httpx

from benchmarks.options import NOTHING_TO_MEASURE, Options, options, parser, run
from benchmarks.ray_cluster import RayCluster, running_cluster
from benchmarks.ray_ratio import Ratio, ratios
from benchmarks.result import Cell, Provenance, Result, Table, Target
from benchmarks.texts import PROMPT
from serve.bundle import Manifest

NAME = "ray_nodes"
KILLS, STREAMS, TOKENS = 20, 8, 2000
WANTED_BACK_S, WANTED_RATIO = 10.0, 1.8
_WHOLE_S, _BEAT_S = 180.0, 0.05
# A machine that starts nodes while it answers may well pause a call for seconds.
_PATIENT = {"settings": {"stall_s": 30, "stall_unknown_s": 60}}
_LEAST_BACK = 20  # answers in a row before the service counts as back


@dataclass(slots=True)
class Seen:
    """What came of the streams, over all kills."""

    lost: Counter[str] = field(default_factory=Counter)  # ends of streams on killed nodes
    others: Counter[str] = field(default_factory=Counter)  # ends of all other streams
    refused: Counter[str] = field(default_factory=Counter)  # requests sent after the kill
    first_s: list[float] = field(default_factory=list)  # from the kill to the first answer
    longest_s: list[float] = field(default_factory=list)  # that one answer took meanwhile
    full_s: list[float] = field(default_factory=list)  # until all replicas were there again


class Stream(threading.Thread):
    """Reads one stream to its end, and keeps how it ended."""

    def __init__(self, cluster: RayCluster, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.replica = self.end = ""
        self._url = f"{cluster.url}/v1/generate"
        self._body = body

    def run(self) -> None:
        try:
            self.end = self._read()
        except httpx.HTTPError as error:
            self.end = f"broken: {type(error).__name__}"
        self.begun.set()

    def _read(self) -> str:
        name = last = ""
        with httpx.stream("POST", self._url, json=self._body, timeout=120) as answer:
            if answer.status_code != 200:
                return f"status {answer.status_code}"
            self.replica = answer.headers["x-stepdial-replica"]
            for line in answer.iter_lines():
                self.begun.set()
                last = line or last
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
        if name == "error":
            return str(json.loads(last.removeprefix("data: "))["error"]["code"])
        return name or "broken: no last event"


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--kills", type=int, default=None, help=f"(default: {KILLS})")
    parsed = made.parse_args(arguments)
    if find_spec("ray") is None:
        print("Ray is not installed: pip install -e '.[ray]'", file=sys.stderr)
        return NOTHING_TO_MEASURE
    kills = parsed.kills or (2 if parsed.quick else KILLS)
    return run(NAME, arguments, parsed, partial(measure, options(parsed), kills))


def measure(chosen: Options, kills: int, provenance: Provenance) -> Result:
    writer, classifier = chosen.read("generate")[0], chosen.read("classify")[0]
    seen = Seen()
    streams = 4 if chosen.quick else STREAMS
    folders = [writer.folder, classifier.folder]
    with running_cluster(folders, "--arguments", json.dumps(_PATIENT)) as cluster:
        for number in range(kills):
            _kill_one(cluster, writer.manifest, classifier.manifest, streams, number, seen)
    measured = ratios(classifier, chosen.quick)
    return provenance.result(
        NAME,
        "Stepdial on Ray Serve",
        f"Two nodes with a replica each, of which one is killed while {streams} streams of "
        f"{writer.manifest.name} run, {kills} times; a node is replaced after 2 s. A request is "
        "sent as soon as the one before is answered. Then what clients get from two replicas, "
        "over what they get from one, each pinned to a core, in turns.",
        [_kill_table(seen), _ratio_table(measured)],
        [
            Target("streams of killed nodes without a structured error", _but(seen.lost), "==", 0),
            Target("other streams that failed", seen.others.total() - seen.others["done"], "==", 0),
            Target("requests after a kill that failed", seen.refused.total(), "==", 0),
            Target("service back after", max(seen.first_s), "<=", WANTED_BACK_S, "s"),
            Target(
                "two replicas over one, calls of 20 ms and more",
                measured[0].ratio,
                ">=",
                WANTED_RATIO,
            ),
        ],
    )


def _kill_one(
    cluster: RayCluster,
    writer: Manifest,
    classifier: Manifest,
    streams: int,
    number: int,
    seen: Seen,
) -> None:
    body = {"model": writer.name, "prompt": PROMPT, "steps": writer.full_steps, "stream": True}
    readers = [Stream(cluster, body | {"max_tokens": TOKENS}) for _ in range(streams)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.begun.wait(60)
    nodes = cluster.nodes()
    victim = nodes[number % len(nodes)]
    names = victim.replica_names()
    victim.kill()
    _watch(cluster, classifier, len(nodes), seen)
    for reader in readers:
        reader.join()
        (seen.lost if reader.replica in names else seen.others)[reader.end] += 1


def _watch(cluster: RayCluster, classifier: Manifest, replicas: int, seen: Seen) -> None:
    """Ask again and again, until all replicas are there again."""
    killed_s = time.perf_counter()
    body = {"model": classifier.name, "input": "a good film", "steps": classifier.steps[0]}
    first_s: float | None = None
    taken_s: list[float] = []
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        while True:
            asked_s = time.perf_counter()
            status = client.post("/v1/classify", json=body).status_code
            now_s = time.perf_counter()
            taken_s.append(now_s - asked_s)
            if status != 200:
                seen.refused[str(status)] += 1
            elif first_s is None:
                first_s = now_s - killed_s
            if len(taken_s) % _LEAST_BACK == 0 and _replicas(client) >= replicas:
                break
            if now_s - killed_s > _WHOLE_S:
                raise SystemExit(f"{replicas} replicas were not there again in {_WHOLE_S:g} s")
            time.sleep(_BEAT_S)
    seen.first_s.append(_WHOLE_S if first_s is None else first_s)
    seen.longest_s.append(max(taken_s))
    seen.full_s.append(time.perf_counter() - killed_s)


def _replicas(client: httpx.Client) -> int:
    """How many tell their metrics."""
    lines = client.get("/metrics").text.splitlines()
    return sum(line.startswith("stepdial_in_flight{") for line in lines)


def _but(ends: Counter[str]) -> int:
    """Streams that ended neither with the error that tells, nor before their node did."""
    return ends.total() - ends["replica_lost"] - ends["done"]


def _kill_table(seen: Seen) -> Table:
    rows: list[list[Cell]] = [
        [
            name,
            ends.total(),
            ends["done"],
            ends["replica_lost"],
            ends.total() - ends["done"] - ends["replica_lost"],
        ]
        for name, ends in (("killed", seen.lost), ("other", seen.others))
    ]
    for name, taken in (
        ("s to the first answer", seen.first_s),
        ("s that the longest answer took", seen.longest_s),
        ("s until all replicas were back", seen.full_s),
    ):
        rows.append([f"{name}: median, most", len(taken), statistics.median(taken), max(taken), ""])
    columns = ("streams on nodes", "count", "whole", "ended by an error", "broken")
    return Table("Nodes killed under load.", columns, rows)


def _ratio_table(measured: Sequence[Ratio]) -> Table:
    rows: list[list[Cell]] = [
        [one.what, one.call_ms, one.one_per_s, one.two_per_s, one.ratio, one.low, one.high]
        for one in measured
    ]
    columns = ("", "ms a call", "one, a second", "two, a second", "two over one", "least", "most")
    return Table("Two on two cores over one on one: medians over interleaved pairs.", columns, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
