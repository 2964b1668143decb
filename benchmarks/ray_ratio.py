"""How much two replicas on Ray do of what one does, beside what the machine allows at all.

Each replica is pinned to a core; the cluster that is not asked stands still, since even an idle one
takes a tenth of a core. The same calls in two bare processes say what two cores of this
machine are worth; a model that only waits says what Ray costs. Knows processes and cores;
deliberately nothing of nodes that die.
"""

import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.closed_clients import load
from benchmarks.ray_cluster import RayCluster, running_cluster
from benchmarks.server import Server
from benchmarks.texts import text_of, window_of
from serve.bundle import Bundle, read_bundle
from serve.inputs.text import TextCodec
from serve.runtime import open_model

ROWS, CLIENTS_EACH = 16, 3
PAIRS, SECONDS = 7, 10.0
WAIT_S = 0.02  # a call of the model that only waits


@dataclass(frozen=True, slots=True)
class Ratio:
    """Throughput of two over that of one."""

    what: str
    call_ms: float
    pairs: Sequence[tuple[float, float]]  # calls a second, of one and of two

    @property
    def one_per_s(self) -> float:
        return statistics.median(one for one, _ in self.pairs)

    @property
    def two_per_s(self) -> float:
        return statistics.median(two for _, two in self.pairs)

    @property
    def ratio(self) -> float:
        return statistics.median(self._each)

    @property
    def low(self) -> float:
        return min(self._each)

    @property
    def high(self) -> float:
        return max(self._each)

    @property
    def _each(self) -> list[float]:
        return [two / one for one, two in self.pairs]


def ratios(bundle: Bundle, quick: bool) -> list[Ratio]:
    """The engine on Ray; bare processes with the same calls; a model that waits, on Ray."""
    pairs, seconds = (2, 2.0) if quick else (PAIRS, SECONDS)
    manifest = bundle.manifest
    text = text_of(TextCodec(bundle), window_of(manifest))
    asked = {"model": manifest.name, "steps": manifest.steps[0]}
    full = json.dumps(asked | {"input": [text] * ROWS}).encode()
    short = json.dumps(asked | {"input": "a good film"}).encode()
    bare = _bare(bundle, pairs, seconds)
    call_ms = 1000 / statistics.median(one for one, _ in bare)
    return [
        Ratio("replicas on Ray", call_ms, _on_ray(bundle, full, pairs, seconds)),
        Ratio("bare processes, the same calls", call_ms, bare),
        Ratio(
            "replicas on Ray, calls that wait",
            WAIT_S * 1000,
            _on_ray(bundle, short, pairs, seconds, "benchmarks.ray_stub"),
        ),
    ]


def _on_ray(
    bundle: Bundle,
    body: bytes,
    pairs: int,
    seconds: float,
    module: str = "deploy.ray.local",
) -> list[tuple[float, float]]:
    """Requests a second, each of which is one call: of one replica, and of two."""
    rows = ROWS if module == "deploy.ray.local" else 1
    patient = {"stall_s": 30, "stall_unknown_s": 60}
    chosen = json.dumps({"settings": {"batch_rows": rows, "degrade": False, **patient}})
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(
                running_cluster(
                    [bundle.folder],
                    *("--nodes", str(nodes), "--arguments", chosen),
                    module=module,
                )
            )
            for nodes in (1, 2)
        )
        for cluster in (one, two):
            _pin(cluster)
        return [
            (
                _alone(one, two, body, CLIENTS_EACH, seconds),
                _alone(two, one, body, 2 * CLIENTS_EACH, seconds),
            )
            for _ in range(pairs)
        ]


def _alone(
    cluster: RayCluster, other: RayCluster, body: bytes, clients: int, seconds: float
) -> float:
    with other.halted():
        return _asked(cluster, body, clients, seconds)


def _asked(cluster: RayCluster, body: bytes, clients: int, seconds: float) -> float:
    server = Server(0, cluster.host, cluster.port, cluster.log)
    done = load(server, "/v1/classify", [body], clients, seconds)
    if done.errors:
        raise SystemExit(f"{done.errors} requests failed: see {cluster.log}")
    if not done.answers:
        raise SystemExit(f"no answer came within {seconds:g} s: this machine does too much else")
    return done.per_s


def _pin(cluster: RayCluster) -> None:
    """Each replica, with all its threads, to a core of its own."""
    for core, node in enumerate(cluster.nodes()):
        for process in node.replicas():
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})


def _bare(bundle: Bundle, pairs: int, seconds: float) -> list[tuple[float, float]]:
    """Calls a second without HTTP and without Ray: of one process, and of two."""
    spawn = multiprocessing.get_context("spawn")
    ends = []
    for core in (0, 1):
        here, there = spawn.Pipe()
        child = spawn.Process(target=_call, args=(there, core, bundle.folder), daemon=True)
        child.start()
        assert here.recv() == "ready"
        ends.append((child, here))

    def together(count: int) -> float:
        for _, end in ends[:count]:
            end.send(seconds)
        return float(sum(end.recv() for _, end in ends[:count]))

    measured = [(together(1), together(2)) for _ in range(pairs)]
    for child, end in ends:
        end.send(None)
        child.join()
    return measured


def _call(end: Connection, core: int, folder: Path) -> None:
    """A process that calls the model for as long as it is told, again and again."""
    os.sched_setaffinity(0, {core})
    bundle = read_bundle(folder)
    rung = open_model(bundle, threads=1).classifier(bundle.manifest.steps[0])
    high = bundle.manifest.text_tokenizer.vocab_size
    shape = (ROWS, window_of(bundle.manifest))
    tokens = np.random.default_rng(0).integers(1, high, shape)  # (B, N)
    rung.run(tokens)
    end.send("ready")
    while (seconds := end.recv()) is not None:
        calls, begun_s = 0, time.perf_counter()
        while time.perf_counter() - begun_s < seconds:
            rung.run(tokens)
            calls += 1
        end.send(calls / (time.perf_counter() - begun_s))
