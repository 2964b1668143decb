"""What no queue, batch or cache may exceed. Plain numbers; who keeps to them is elsewhere."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What no queue, batch or cache may exceed."""

    queue_requests: int = 256
    batch_rows: int = 16
    batch_tokens: int = 8192  # rows times the longest, in one classification call
    decode_rows: int = 16
    cache_bytes: int = 128 * 2**20
    run_ahead: bool = True  # whether a row that decodes alone may
    max_wait_s: float = 0.0  # how long a classification may wait for company
    queue_wait_s: float = math.inf  # predicted, of a request that would be queued
    degrade_wait_s: float | None = None  # predicted, at which steps fall; None: they never do

    def __post_init__(self) -> None:
        for name in ("queue_requests", "batch_rows", "batch_tokens", "decode_rows", "cache_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_wait_s < 0:
            raise ValueError("max_wait_s must not be negative")
        if self.queue_wait_s <= 0:
            raise ValueError("queue_wait_s must be greater than 0")
        if self.degrade_wait_s is not None and self.degrade_wait_s <= 0:
            raise ValueError("degrade_wait_s must be greater than 0, or None")
