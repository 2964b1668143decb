"""Relief: how much of the usual work is spent on a request while too much waits.

Told the predicted wait, it says the share of the work; down at once, up only when the wait has
halved, so that it does not flap. Knows no steps, rows or clocks.
"""

from collections.abc import Sequence

_BACK = 0.5  # of the wait at which the share fell: where it rises again


class Relief:
    """The share of work for one queue."""

    def __init__(self, begin_s: float | None) -> None:
        self._begin_s = begin_s  # None: never less than all
        self._share = 1.0

    def share(self, wait_s: float) -> float:
        """The share for what starts now, if all that waits would take so long in full."""
        self._share = self._next(self._share, wait_s)
        return self._share

    def drain_s(self, wait_s: float, costs: Sequence[float]) -> float:
        """How long all that waits will take, with nothing new, where work comes in these shares."""
        if self._begin_s is None:
            return wait_s
        least, total_s = min(costs), 0.0
        share = self._next(self._share, wait_s)
        while wait_s > 0:
            # Where the share rises next; at the bottom of the queue it stays.
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
