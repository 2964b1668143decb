"""What clients are told when the replica that works for them is gone, in the shape of their path.

Knows Ray's errors and ours; deliberately not how requests are sent.
"""

import json

from ray.exceptions import (
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)

from serve.errors import Unavailable
from serve.wire.error_shapes import error_body
from serve.wire.stream import event_of

# Of calls whose replica, or the machine it ran on, has ended or cannot be reached.
LOST: tuple[type[Exception], ...] = (
    RayActorError,
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    WorkerCrashedError,
)


class ReplicaLost(Unavailable):
    """The replica ended while it answered; another answers the next request."""

    code = "replica_lost"

    def headers(self) -> dict[str, str]:
        return {"retry-after": "1"}


class BrokenOff(Exception):
    """An answer ended before its end."""


CUT_OFF: tuple[type[Exception], ...] = (*LOST, BrokenOff)


def lost_stream(path: str) -> bytes:
    """The last event of a stream whose replica is gone."""
    error = ReplicaLost("the replica that wrote this answer has gone: send the request again")
    event = event_of(json.dumps(error_body(error, path)))
    # OpenAI's streams have no names of events.
    return event if path.startswith(("/v1/completions", "/v1/chat/")) else b"event: error\n" + event
