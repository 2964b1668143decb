"""How fast the machine runs the calls of one model now, beside what is known of them.

A moment's slowness need not meet all calls alike: where something else takes half of a core, calls
in several parts take half as long again, and those in one part as long as before. So each kind has
a speed of its own, which moves the other a little. What is off beyond that is met with caution.
Knows errors of predictions; not of what.
"""

_MOST_SURPRISE = 0.35  # a call that took longer or shorter by more counts as if by this much
_WEIGHT = 0.12  # of the newest call in the speed of its kind
_OTHER_WEIGHT = 0.03  # and of the other
_LASTING_WEIGHT = 0.02  # of the speed of now in the one that lasts beyond a moment
_LATE_SHARE, _LATE_STEP = 0.05, 0.02
_MOST_CAUTION = 2.0
_RELENT = 0.9


class MachineSpeed:
    """What to multiply predictions by: more than 1 where calls take longer than they did."""

    def __init__(self) -> None:
        self.now = [1.0, 1.0]  # of calls in one part, in several
        self._lasting = [1.0, 1.0]
        self.caution = 1.1  # what to multiply them by beside that, so that few calls take longer

    def lasting(self, parted: bool) -> float:
        """What to multiply predictions of a long time by: a moment's slowness passes."""
        return self._lasting[parted] / self.now[parted]

    def be_wary(self, error: float) -> None:
        """A call has taken longer than was predicted, by this share."""
        late = 1 + error > self.caution
        change = _LATE_STEP * ((1 - _LATE_SHARE) if late else -_LATE_SHARE)
        self.caution = min(_MOST_CAUTION, max(1.0, self.caution + change))

    def observe(self, parted: bool, error: float) -> None:
        """The same where it is the machine that is to blame."""
        surprise = min(_MOST_SURPRISE, max(-_MOST_SURPRISE, error))
        self.now[parted] *= 1 + _WEIGHT * surprise
        self.now[not parted] *= 1 + _OTHER_WEIGHT * surprise
        for kind, speed in enumerate(self.now):
            self._lasting[kind] += _LASTING_WEIGHT * (speed - self._lasting[kind])

    def relent(self) -> None:
        """Believe a little less in what is slow."""
        self.caution = max(1.0, self.caution * _RELENT)
        self.now = [max(min(1.0, speed), speed * _RELENT) for speed in self.now]
