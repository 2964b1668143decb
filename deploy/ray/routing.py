"""Which replica a request goes to: the least busy, where one without the model counts as busier.

So requests stay with replicas that hold their model, and a model spreads to another one when those
are busy. A request, a stream too, stays with its replica until it ends.
"""

import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import MultiplexMixin, PendingRequest, RequestRouter, RunningReplica


class ModelRouter(MultiplexMixin, RequestRouter):
    """Serve makes one in each process that calls replicas."""

    def initialize_state(self, **chosen: Any) -> None:
        self._spill_requests = float(chosen["spill_requests"])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All replicas, best first, each in a rank of its own."""
        model = ""
        if pending_request is not None:
            model = pending_request.metadata.multiplexed_model_id
            pending_request.routing_context.should_backoff = True  # when all have refused
        loads = [
            (self.replica_queue_len_cache.get(one.replica_id) or 0, one.multiplexed_model_ids)
            for one in candidate_replicas
        ]
        order = ranked(loads, model, self._spill_requests)
        return [[candidate_replicas[index]] for index in order]


def ranked(loads: Sequence[tuple[int, set[str]]], model: str, spill_requests: float) -> list[int]:
    """Replicas by how well they suit, given the requests and the models that each has.

    Equal ones come in any order, since otherwise one would get whatever comes first.
    """

    def cost(index: int) -> tuple[float, int, float]:
        requests, models = loads[index]
        if not model or model in models:
            return requests, 0, random.random()
        return requests + spill_requests, len(models), random.random()

    return sorted(range(len(loads)), key=cost)
