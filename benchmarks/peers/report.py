"""Tables and targets of what was found.

Knows how figures are shown; deliberately nothing of how they came about.
"""

from collections.abc import Mapping, Sequence

from benchmarks.lab import Cell, Table, Target, median
from benchmarks.peers.faults import LEAVE_AT, LEAVERS, TIMES
from benchmarks.peers.found import Found, in_time, not_first
from benchmarks.peers.generation import ALONE, SERVED, Way
from benchmarks.peers.peer import MOSEC, STEPDIAL
from benchmarks.peers.speed import CLIENTS, p99

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
        one_s = [each for speed in found.speeds for each in speed.one.latencies_s]
        many_s = [each for speed in found.speeds for each in speed.many.latencies_s]
        rows.append(
            [
                *(found.peer.name, rate, rate / ours if ours else None),
                *(1000 * median(one_s), 1000 * p99(one_s)),
                found.middle(lambda it: it.many.per_s),
                *(1000 * median(many_s), 1000 * p99(many_s)),
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
