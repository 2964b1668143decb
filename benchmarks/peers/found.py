"""What was found of each server, and where ours is not the best of them, and why.

Knows figures; deliberately nothing of how they were measured. A reason is made of other figures of
the same run, never of what was expected.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.lab import median
from benchmarks.peers.faults import Departure, Ending, Overload, Refusal
from benchmarks.peers.peer import STEPDIAL, Peer
from benchmarks.peers.speed import Speed, p99


@dataclass(slots=True)
class Found:
    """Of one server; `why` says what is missing, if something is."""

    peer: Peer
    why: str = ""
    speeds: list[Speed] = field(default_factory=list)  # one a start
    processes: int = 0
    refusal: Refusal | None = None
    departure: Departure | None = None
    overloads: dict[str, Overload] = field(default_factory=dict)  # by what was asked
    ending: Ending | None = None

    def middle(self, value: Callable[[Speed], float]) -> float:
        """Of all starts."""
        return median([value(one) for one in self.speeds])


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure that servers are compared by: one for each start, or one."""

    name: str
    values: Callable[[Found], Sequence[float]]
    larger: bool
    reason: Callable[[Found, Found], str]  # ours, and who is better

    def middle(self, found: Found) -> float | None:
        values = self.values(found)
        return median(values) if values else None

    def best(self, founds: Sequence[Found]) -> Found | None:
        """Who is first; ours if it shares the place."""
        known = [one for one in founds if self.values(one)]
        if not known:
            return None
        sign = -1 if self.larger else 1
        return min(known, key=lambda one: (sign * self._known(one), one.peer.name != STEPDIAL))

    def _known(self, found: Found) -> float:
        value = self.middle(found)
        assert value is not None
        return value

    def why(self, ours: Found, first: Found) -> str:
        """The reason, or that the starts of both do not tell them apart."""
        own, theirs = self.values(ours), self.values(first)
        if len(own) > 1 and max(min(own), min(theirs)) <= min(max(own), max(theirs)):
            return (
                f"not told apart: starts of Stepdial gave {min(own):.4g} to {max(own):.4g}, of "
                f"{first.peer.name} {min(theirs):.4g} to {max(theirs):.4g}"
            )
        return self.reason(ours, first)


def in_time(found: Found) -> float:
    """The highest rate in time; 0 where none was."""
    return found.middle(lambda one: one.in_time_per_s or 0.0)


def measures(rungs: int) -> list[Measure]:
    """All of them; ours serves so many rungs where the others serve one graph."""

    def speed(value: Callable[[Speed], float]) -> Callable[[Found], Sequence[float]]:
        return lambda found: [value(one) for one in found.speeds]

    def loaded(ours: Found, first: Found) -> str:
        return (
            f"{_cpu(ours):.2f} ms of processor time a request against {_cpu(first):.2f}, and "
            f"{_rows(ours):.1f} rows a call against {_rows(first):.1f}"
        )

    def alone(ours: Found, first: Found) -> str:
        own, theirs = (one.middle(lambda it: it.one_cpu_ms) for one in (ours, first))
        return f"{own:.2f} ms of processor time a request against {theirs:.2f}, one client"

    def held(ours: Found, first: Found) -> str:
        return (
            f"{ours.processes} processes against {first.processes}; Stepdial has {rungs} rungs "
            "ready, the others one graph"
        )

    def waited(ours: Found, first: Found) -> str:
        own, theirs = ours.overloads[PLAIN], first.overloads[PLAIN]
        better = {name: one.in_time_per_s for name, one in ours.overloads.items() if name != PLAIN}
        said = "; ".join(f"{rate:.0f}/s where it asks for {name}" for name, rate in better.items())
        return (
            f"no request said when it needed its answer: {_share(own)} of Stepdial's were "
            f"refused, {_share(theirs)} of {first.peer.name}'s; Stepdial's {said}"
        )

    def finished(ours: Found, first: Found) -> str:
        return f"the call under way, of up to {_rows(ours):.0f} rows, was finished"

    def ended(ours: Found, first: Found) -> str:
        own, theirs = ours.ending, first.ending
        assert own is not None and theirs is not None
        return (
            f"{own.answered} answered and {own.lost} lost before it ended, against "
            f"{theirs.answered} and {theirs.lost}"
        )

    return [
        Measure("requests/s in time", speed(lambda one: one.in_time_per_s or 0.0), True, loaded),
        Measure("32 clients, requests/s", speed(lambda one: one.many.per_s), True, loaded),
        Measure("32 clients, p50 ms", speed(lambda one: _p50_ms(one, True)), False, loaded),
        Measure("32 clients, p99 ms", speed(lambda one: _p99_ms(one, True)), False, loaded),
        Measure("1 client, p50 ms", speed(lambda one: _p50_ms(one, False)), False, alone),
        Measure("1 client, p99 ms", speed(lambda one: _p99_ms(one, False)), False, alone),
        Measure("CPU ms a request", speed(lambda one: one.cpu_ms), False, loaded),
        Measure("RSS MB", speed(lambda one: one.rss_mb), False, held),
        Measure("PSS MB", speed(lambda one: one.pss_mb), False, held),
        Measure("start s", speed(lambda one: one.start_s), False, held),
        Measure(
            "rows for clients that left",
            lambda found: [] if found.departure is None else [found.departure.rows],
            False,
            finished,
        ),
        Measure(
            "overload, in time a second",
            lambda found: [found.overloads[PLAIN].in_time_per_s] if found.overloads else [],
            True,
            waited,
        ),
        Measure("lost at SIGTERM", lambda found: _of_ending(found, "lost"), False, ended),
        Measure("gone after SIGTERM, s", lambda found: _of_ending(found, "gone_s"), False, ended),
    ]


PLAIN = "the same as of others"


def not_first(founds: Sequence[Found], rungs: int) -> list[tuple[Measure, Found, Found]]:
    """Each measure in which another is first, ours, and the first."""
    by_name: Mapping[str, Found] = {one.peer.name: one for one in founds}
    ours = by_name.get(STEPDIAL)
    if ours is None:
        return []
    rows = []
    for measure in measures(rungs):
        first = measure.best(founds)
        if first is not None and first is not ours and measure.values(ours):
            rows.append((measure, ours, first))
    return rows


def _of_ending(found: Found, name: str) -> list[float]:
    value = getattr(found.ending, name, None)
    return [] if value is None else [float(value)]


def _p50_ms(one: Speed, many: bool) -> float:
    return 1000 * median((one.many if many else one.one).latencies_s)


def _p99_ms(one: Speed, many: bool) -> float:
    return 1000 * p99((one.many if many else one.one).latencies_s)


def _cpu(found: Found) -> float:
    return found.middle(lambda one: one.cpu_ms)


def _rows(found: Found) -> float:
    return found.middle(lambda one: one.call_rows)


def _share(found: Overload) -> str:
    refused = sum(found.refused.values())
    return f"{refused / (refused + len(found.answered_s) + found.unanswered):.0%}"
