"""A Ray cluster of several nodes on this machine, with Stepdial on it: to try, and for tests.

    python -m deploy.ray.local zoo/topics zoo/shakespeare --nodes 2

The first node runs Serve's proxy; the others run the replicas, one core each. A node that dies is
replaced after a while.
"""

import argparse
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from pydantic import ValidationError
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.schema import LoggingConfig

from deploy.ray.app import Arguments, build

_ADDRESS = "127.0.0.1"
_STORE_BYTES = 100 * 2**20
_BEAT_S = 0.2
# How soon the cluster sees that a node has died; by default it takes its time.
_SYSTEM = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}


class Nodes:
    """The nodes that run replicas; those that die are replaced."""

    def __init__(self, cluster: Cluster, wanted: int, cpus: float, replace_s: float) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._cpus = cpus
        self._replace_s = replace_s
        self._running: list[Any] = []
        self._made = 0

    def fill(self) -> None:
        """Start those that are missing."""
        while len(self._running) < self._wanted:
            node = self._cluster.add_node(
                wait=False,  # several start together
                num_cpus=self._cpus,
                object_store_memory=_STORE_BYTES,
                node_ip_address=_ADDRESS,
            )
            self._running.append(node)
            self._made += 1
            print(f"node {self._made}: process {_raylet(node).pid}", flush=True)

    def keep(self, ended: threading.Event) -> None:
        """Until it is ended, replace those that die."""
        while not ended.wait(_BEAT_S):
            gone = [node for node in self._running if _raylet(node).poll() is not None]
            if gone and not ended.wait(self._replace_s):
                for node in gone:
                    self._running.remove(node)
                    self._cluster.remove_node(node, allow_graceful=False)
                self.fill()


@contextmanager
def local_cluster(
    arguments: Arguments,
    nodes: int,
    port: int,
    replace_s: float,
) -> Iterator[tuple[str, Nodes]]:
    """A cluster that serves at the address it gives."""
    held = _held_port(port)
    port = held.getsockname()[1]
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "object_store_memory": _STORE_BYTES,
            "include_dashboard": False,
            "include_log_monitor": False,
            "no_monitor": True,
            "node_ip_address": _ADDRESS,
            "_system_config": _SYSTEM,
        },
    )
    try:
        # Otherwise it looks for a loopback address on the machine's network.
        ray._private.worker._global_node = cluster.head_node
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.WARNING)
        running = Nodes(cluster, nodes, arguments.cpus, replace_s)
        running.fill()
        serve.start(
            proxy_location=ProxyLocation.HeadOnly,
            http_options=HTTPOptions(host=_ADDRESS, port=port),
            logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        )
        held.close()
        serve.run(
            build(arguments),
            name="stepdial",
            route_prefix="/",
            logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        )
        yield f"http://{_ADDRESS}:{port}", running
    finally:
        ray.shutdown()
        cluster.shutdown()


def main(argv: Sequence[str]) -> int:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.ray.local",
        description="Serve bundles on a Ray cluster of several nodes on this machine.",
    )
    parser.add_argument("bundles", nargs="*", type=Path, metavar="BUNDLE")
    parser.add_argument("--nodes", type=int, default=2, help="that run replicas (default: 2)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument(
        "--replace-s", type=float, default=2.0, help="time after which a dead node is replaced"
    )
    parser.add_argument(
        "--arguments",
        default="{}",
        metavar="JSON",
        help="more of those in docs/deploying.md; by default a replica a node, and no fewer",
    )
    parsed = parser.parse_args(list(argv))
    try:
        arguments = arguments_of(parsed.arguments, parsed.bundles, parsed.nodes)
    except ValueError as error:
        parser.error(f"--arguments {parsed.arguments}: {error}")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    cluster = local_cluster(arguments, parsed.nodes, parsed.port, parsed.replace_s)
    with cluster as (url, nodes):
        print(f"on {url} through Ray Serve, {parsed.nodes} nodes. Ctrl-C ends it.", flush=True)
        nodes.keep(ended)
    return 0


def arguments_of(text: str, bundles: Sequence[Path], nodes: int) -> Arguments:
    """Those of this JSON, with the bundles if any are named; by default a replica a node."""
    given = json.loads(text)
    if not isinstance(given, dict):
        raise ValueError('expected an object, such as {"models_per_replica": 2}')
    if bundles:
        given["bundles"] = [str(folder.resolve()) for folder in bundles]
    least, most = given.get("min_replicas", nodes), given.get("max_replicas", nodes)
    given.setdefault("min_replicas", min(nodes, most) if isinstance(most, int) else nodes)
    given.setdefault("max_replicas", max(nodes, least) if isinstance(least, int) else nodes)
    try:
        return Arguments.model_validate(given)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise ValueError("; ".join(faults)) from None


def _raylet(node: Any) -> Any:
    """The process whose end is the node's."""
    return node.all_processes["raylet"][0].process


def _held_port(wanted: int) -> socket.socket:
    """A socket on this port, or on a free one for 0.

    The cluster takes seconds to start; until its proxy listens there, nobody else gets the port.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((_ADDRESS, wanted))  # if somebody listens there, this says so
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return held


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
