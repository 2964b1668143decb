"""What was found of each server as tables, and where ours is not the best of them, and why."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.client import Load
from benchmarks.lab import Cell, Table, Target
from benchmarks.peers.generation import ALONE, SERVED, Way
from benchmarks.peers.servers import MOSEC, STEPDIAL, Peer
from benchmarks.peers.speed import (
    CLIENTS,
    LEAVE_AT,
    LEAVERS,
    TIMES,
    Departure,
    Ending,
    Overload,
    Refusal,
    Speed,
    p99,
)

# What was found of each server, and where ours is not the best of them, and why. A reason is made
# of other figures of the same run, never of what was expected.


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
        Measure("32 clients, p50 ms", speed(lambda it: _p50_ms(it.many)), False, loaded),
        Measure("32 clients, p99 ms", speed(lambda it: _p99_ms(it.many)), False, loaded),
        Measure("1 client, p50 ms", speed(lambda it: _p50_ms(it.one)), False, alone),
        Measure("1 client, p99 ms", speed(lambda it: _p99_ms(it.one)), False, alone),
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


def _p50_ms(load: Load) -> float:
    return 1000 * median(load.latencies_s)


def _p99_ms(load: Load) -> float:
    return 1000 * p99(load.latencies_s)


def _cpu(found: Found) -> float:
    return found.middle(lambda one: one.cpu_ms)


def _rows(found: Found) -> float:
    return found.middle(lambda one: one.call_rows)


def _share(found: Overload) -> str:
    refused = sum(found.refused.values())
    return f"{refused / (refused + len(found.answered_s) + found.unanswered):.0%}"


# Of mosec's rate: what counts as level with it.
LEVEL = 0.95
_SAID = 90  # characters


def compared(founds: Sequence[Found]) -> Table:
    """Who, and how it was set up."""
    rows = [
        [
            one.peer.name,
            one.peer.packages[0] if one.peer.packages else "this commit",
            one.peer.tuned,
            f"no: {one.why}" if one.why else "yes",
        ]
        for one in founds
    ]
    return Table("What is compared.", ("server", "package", "set up", "measured"), rows)


def speeds(founds: Sequence[Found], objective_ms: float) -> Table:
    """A row for each server."""
    known = [one for one in founds if one.speeds]
    ours = next((in_time(one) for one in known if one.peer.name == STEPDIAL), 0.0)
    rows: list[Sequence[Cell]] = []
    for found in sorted(known, key=in_time, reverse=True):
        rate = in_time(found)
        rows.append(
            [
                *(found.peer.name, rate, rate / ours if ours else None),
                found.middle(lambda it: _p50_ms(it.one)),
                found.middle(lambda it: _p99_ms(it.one)),
                found.middle(lambda it: it.many.per_s),
                found.middle(lambda it: _p50_ms(it.many)),
                found.middle(lambda it: _p99_ms(it.many)),
                found.middle(lambda it: it.call_rows),
                found.middle(lambda it: it.cpu_ms),
                found.middle(lambda it: it.rss_mb),
                found.middle(lambda it: it.pss_mb),
                found.middle(lambda it: it.start_s),
            ]
        )
    columns = (
        *("server", "requests/s in time", "of Stepdial's", "1 client: p50 ms", "p99 ms"),
        *(f"{CLIENTS} clients: requests/s", "p50 ms", "p99 ms", "rows a call", "CPU ms a request"),
        *("RSS MB", "PSS MB", "start s"),
    )
    caption = (
        f"In time: the highest rate tried of requests at random times at which 99 % are answered "
        f"within {objective_ms:g} ms of when they were due. Memory is that of all its processes, "
        "after the load; start is to the first right answer. Medians of the starts."
    )
    return Table(caption, columns, rows)


def faults(founds: Sequence[Found]) -> Table:
    """A row for each server."""
    rows: list[Sequence[Cell]] = []
    for found in founds:
        refusal, left, ending = found.refusal, found.departure, found.ending
        if refusal is None or left is None or ending is None:
            continue
        said = refusal.said if len(refusal.said) <= _SAID else f"{refusal.said[:_SAID]}..."
        gone: Cell = ending.gone_s
        if ending.stayed:
            gone = f"never: {ending.stayed} processes stay"
        rows.append(
            [
                *(found.peer.name, refusal.status, said.replace("|", "\\|"), left.gone, left.rows),
                *(ending.answered, ending.refused, ending.lost, gone),
            ]
        )
    columns = (
        *("server", "malformed JSON", "says", "clients that left", "rows for them"),
        *("SIGTERM: answered", "refused", "lost", "gone after s"),
    )
    caption = (
        f"{LEAVERS} clients ask at once, and all leave when {LEAVE_AT} are answered: rows that the "
        "model finished after that, the call under way included. SIGTERM: what became of the "
        f"requests of {CLIENTS} clients that waited when it came, and how long until no process "
        "was left."
    )
    return Table(caption, columns, rows)


def overload(founds: Sequence[Found], objective_ms: float) -> Table:
    """A row for each server, and for each way to ask ours."""
    rows: list[Sequence[Cell]] = []
    for found in founds:
        for asked, one in found.overloads.items():
            refused = ", ".join(f"{count} x {status}" for status, count in one.refused.items())
            answered_s = one.answered_s
            rows.append(
                [
                    *(found.peer.name, asked, one.offered_per_s, one.in_time_per_s),
                    *(len(answered_s), refused or "none", one.unanswered),
                    1000 * median(answered_s) if answered_s else None,
                    1000 * p99(answered_s) if answered_s else None,
                    1000 * p99(one.refused_s) if one.refused_s else None,
                    "yes" if one.retry_after else "no",
                ]
            )
    columns = (
        *("server", "asked for", "offered/s", "in time/s", "answered", "refused", "no answer"),
        *("p50 ms", "p99 ms", "refused in ms, p99", "Retry-After"),
    )
    caption = (
        f"{TIMES} times as many requests as {CLIENTS} clients got answered. In time: within "
        f"{objective_ms:g} ms; p50 and p99 are of answers. Queues are bounded as each is shipped."
    )
    return Table(caption, columns, rows)


def generation(rates: Mapping[Way, float]) -> Table:
    """A row for each way and number of rows, fastest first among those of as many rows."""
    rows: list[Sequence[Cell]] = []
    for (way, count), rate in sorted(rates.items(), key=lambda it: (it[0][1], -it[1])):
        ours = rates[f"{STEPDIAL} fp32{SERVED}", count]
        why = _why_ahead(rates, way, count) if rate > ours and STEPDIAL not in way else ""
        rows.append([count, way, rate, rate / ours, why])
    caption = (
        "Tokens a second of a decoder of random weights, greedy, one thread. Ours over HTTP has "
        "one request a row, which come and go by themselves; the others are called as libraries, "
        "without a server, all rows in step. One velocity evaluation is one pass through as many "
        "layers as theirs have; ours takes one step of one evaluation a token."
    )
    columns = ("rows", "what writes", "tokens/s", "of ours, fp32 over HTTP", "why it is ahead")
    return Table(caption, columns, rows)


def losses(founds: Sequence[Found], rungs: int) -> Table:
    """Where ours is not first."""
    rows: list[Sequence[Cell]] = [
        [
            *(measure.name, measure.middle(ours), first.peer.name, measure.middle(first)),
            measure.why(ours, first),
        ]
        for measure, ours, first in not_first(founds, rungs)
    ]
    columns = ("measure", "Stepdial", "first", "which has", "why, by the figures of this run")
    return Table("Where Stepdial is not first.", columns, rows)


def targets(founds: Sequence[Found]) -> list[Target]:
    """Those whose servers were measured."""
    by_name = {one.peer.name: one for one in founds if one.speeds}
    ours = by_name.pop(STEPDIAL, None)
    if ours is None:
        return []
    made = []
    python = [in_time(one) for one in by_name.values() if one.peer.python_front]
    best = max(python, default=0.0)
    if best:
        ratio = in_time(ours) / best
        made.append(Target("in time, of the best with a Python front", ratio, ">=", 1.0))
    if MOSEC in by_name and in_time(by_name[MOSEC]):
        ratio = in_time(ours) / in_time(by_name[MOSEC])
        made.append(Target("in time, of mosec's", ratio, ">=", LEVEL))
    others = [one.departure.rows for one in by_name.values() if one.departure is not None]
    if others and ours.departure is not None:
        what = "rows for clients that left, beyond the least of others"
        made.append(Target(what, ours.departure.rows - min(others), "<=", 0))
    if ours.ending is not None:
        made.append(Target("answers lost at SIGTERM", ours.ending.lost, "==", 0))
    if ours.refusal is not None:
        made.append(Target("status of malformed JSON", ours.refusal.status, "==", 400))
    return made


def _why_ahead(rates: Mapping[Way, float], way: str, count: int) -> str:
    precision = "int8" if way.endswith("int8") else "fp32"
    served = rates[f"{STEPDIAL} {precision}{SERVED}", count]
    alone = rates[f"{STEPDIAL} {precision}{ALONE}", count]
    return (
        f"a token of a row takes it {1000 / rates[way, count]:.2f} ms, our {precision} runtime "
        f"{1000 / alone:.2f} ms, and our server {1000 / served - 1000 / alone:.2f} ms more"
    )
