"""Keeps the port that Serve opens in each replica to one address.

Serve opens it on every address of the machine, has no setting for it, and takes pickled calls
there; our own calls go through Ray's actors and never to it. A test looks at the sockets.
Knows this one port; deliberately nothing of what replicas do.
"""

import importlib
import logging
from typing import Any

import ray

_OPENS = "add_port_to_grpc_server"
_log = logging.getLogger("ray.serve")


def listen_at(host: str) -> None:
    """Have the replica that this process becomes listen there; empty: at its node's address."""
    replica: Any = importlib.import_module("ray.serve._private.replica")
    opened = getattr(replica, _OPENS, None)
    if opened is None:
        _log.warning(
            "Ray %s opens a port of each replica on all addresses: keep it behind a firewall",
            ray.__version__,
        )
        return
    address = host or ray.util.get_node_ip_address()
    if ":" in address:
        address = f"[{address}]"

    def open_at_one(server: Any, everywhere: str) -> int:
        port: int = opened(server, f"{address}:{everywhere.rpartition(':')[2]}")
        return port

    setattr(replica, _OPENS, open_at_one)
