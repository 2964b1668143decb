"""Load shedding: how many of the full steps requests get while a queue is long."""

from collections.abc import Sequence

# The wait at which steps were cut, times this, is the wait at which they rise again, so that they
# do not flap.
_BACK = 0.5


class LoadShedder:
    """Load shedding of one queue: the share of the full steps that requests get.

    The share falls as soon as the wait is too long, and rises only when the wait has halved.
    """

    def __init__(self, begin_s: float | None) -> None:
        self._begin_s = begin_s  # None: steps are never cut
        self._share = 1.0

    def share(self, wait_s: float) -> float:
        """The share for what starts now, given the wait of the whole queue at full steps."""
        self._share = self._next(self._share, wait_s)
        return self._share

    def drain_s(self, wait_s: float, costs: Sequence[float]) -> float:
        """The time to drain the queue if nothing more comes, with the shares it will get."""
        if self._begin_s is None:
            return wait_s
        least, total_s = min(costs), 0.0
        share = self._next(self._share, wait_s)
        while wait_s > 0:
            # The wait at which the share rises next; near the end of the queue it stays as it is.
            below_s = _BACK * self._begin_s / share if share < 1 else 0.0
            below_s = below_s if below_s < wait_s * (1 - 1e-9) else 0.0
            cost = max((one for one in costs if one <= share), default=least)
            total_s += (wait_s - below_s) * cost
            wait_s = below_s
            share = self._next(share, wait_s)
        return total_s

    def _next(self, share: float, wait_s: float) -> float:
        if self._begin_s is None:
            return 1.0
        wanted = min(1.0, self._begin_s / wait_s) if wait_s > 0 else 1.0
        if wanted < share or wait_s <= _BACK * self._begin_s / share:
            return wanted
        return share
