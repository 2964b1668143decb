"""How many replicas a load needs, and their memory and price, from what one was measured to do.

    python -m benchmarks.capacity --ask 'KIND OF REQUEST=RATE' [--p99-ms 100] ...

Either from service times of benchmarks/results/dial.json, through a queueing formula, or from
capacity.json files of `stepdial loadtest --find-capacity`. The formulas are explained in
docs/deploying.md; it measures nothing itself, and knows no prices.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab import RESULTS, Result, Table, text_table

HOURS_A_MONTH = 730
_MOST_REPLICAS = 100_000
_OF_MANY_TOKENS = re.compile(r"a token of an answer of (\d+)")
_SLOWEST = 0.99  # the share of answers that the objective is about


class CapacityError(ValueError):
    """A plan that cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Requests of one kind, and how long one takes a replica that has nothing else to do."""

    name: str
    rate_per_s: float
    service_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Requests of one kind, and the most of them that one replica was seen to answer in time."""

    name: str
    rate_per_s: float
    capacity_per_s: float


def utilisation(mix: Sequence[Timed], replicas: int) -> float:
    """The share of its time that each replica works."""
    return sum(kind.rate_per_s * kind.service_s for kind in mix) / replicas


def slowest_s(mix: Sequence[Timed], replicas: int) -> float:
    """The time that 99 % of the slowest kind stay below: an M/G/1 queue at each replica.

    The mean wait of those that wait is Pollaczek and Khinchine's; its tail is taken to be
    exponential, which is a little too long for equal service times.
    """
    busy = utilisation(mix, replicas)
    if busy >= 1:
        return math.inf
    longest_s = max(kind.service_s for kind in mix)
    if busy <= 1 - _SLOWEST:
        return longest_s
    work = sum(kind.rate_per_s * kind.service_s for kind in mix)
    squares = sum(kind.rate_per_s * kind.service_s**2 for kind in mix)
    wait_s = squares / work / (2 * (1 - busy))
    return longest_s + wait_s * math.log(busy / (1 - _SLOWEST))


def replicas_by_time(mix: Sequence[Timed], objective_s: float, headroom: float) -> int:
    """The fewest replicas at which the load, grown by the headroom, is still in time."""
    longest = max(mix, key=lambda kind: kind.service_s)
    if longest.service_s > objective_s:
        raise CapacityError(
            f"{longest.name} takes {longest.service_s * 1000:.1f} ms on a replica of its own: no "
            f"number of them answers in {objective_s * 1000:g} ms; give it fewer steps"
        )
    grown = [Timed(kind.name, kind.rate_per_s * (1 + headroom), kind.service_s) for kind in mix]
    least, most = 0, 1
    while slowest_s(grown, most) > objective_s:
        least, most = most, 2 * most
        if most > _MOST_REPLICAS:
            raise CapacityError(f"this needs more than {_MOST_REPLICAS} replicas")
    while most - least > 1:
        middle = (least + most) // 2
        enough = slowest_s(grown, middle) <= objective_s
        least, most = (least, middle) if enough else (middle, most)
    return most


def replicas_by_capacity(mix: Sequence[Measured], headroom: float) -> int:
    """The same where each kind's capacity was measured: shares of a replica add up."""
    shares = sum(kind.rate_per_s / kind.capacity_per_s for kind in mix)
    return math.ceil(shares * (1 + headroom))


def service_times(dial: Result) -> dict[str, float]:
    """Seconds that an answer of each kind takes, by name, as one client saw them."""
    (table,) = dial.tables
    found = {}
    for row in table.rows:
        name, steps, client_ms = (
            table.columns.index(it) for it in ("request", "steps", "client ms")
        )
        request, milliseconds = str(row[name]), row[client_ms]
        assert isinstance(milliseconds, int | float)
        many = _OF_MANY_TOKENS.search(request)
        tokens = int(many[1]) if many else 1
        request = _OF_MANY_TOKENS.sub(rf"an answer of {tokens} tokens", request)
        found[f"{request}, {row[steps]} steps"] = milliseconds * tokens / 1000
    return found


def most_memory_mb(soak: Result) -> float:
    """The most memory that one server of the zoo had under load.

    PSS, since pages of caches are mapped at several places, and RSS counts each.
    """
    memory = soak.tables[1]
    column = memory.columns.index("PSS MB")
    (found,) = (row[column] for row in memory.rows if row[0] == "most under load")
    assert isinstance(found, int | float)
    return float(found)


def read_capacity(path: Path, rate_per_s: float) -> Measured:
    """What `--find-capacity` found, as it keeps it in capacity.json."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["met_per_s"] is None:
        raise CapacityError(f"{path}: no rate was found that meets {record['objective']}")
    return Measured(f"{path.parent.name}: {record['objective']}", rate_per_s, record["met_per_s"])


def main(arguments: Sequence[str]) -> int:
    dial, soak = Result.read(RESULTS / "dial.json"), Result.read(RESULTS / "soak.json")
    times = service_times(dial)
    line = _parser(times, most_memory_mb(soak)).parse_args(arguments)
    try:
        asked = [_split(text) for text in line.ask]
        files = [name.endswith(".json") for name, _ in asked]
        if all(files):
            measured = [read_capacity(Path(name), rate) for name, rate in asked]
            needed = replicas_by_capacity(measured, line.headroom)
            rows = [
                (
                    kind.name,
                    kind.rate_per_s,
                    kind.capacity_per_s,
                    kind.rate_per_s / kind.capacity_per_s,
                )
                for kind in measured
            ]
            columns = ("requests", "a second", "a replica answers", "replicas busy")
            source = "Measured under load; a mix is taken to cost what its parts do."
        elif not any(files):
            timed = [Timed(name, rate, _time_of(name, times)) for name, rate in asked]
            needed = replicas_by_time(timed, line.p99_ms / 1000, line.headroom)
            rows = [
                (
                    kind.name,
                    kind.rate_per_s,
                    kind.service_s * 1000,
                    kind.rate_per_s * kind.service_s,
                )
                for kind in timed
            ]
            columns = ("requests", "a second", "ms alone", "replicas busy")
            source = (
                f"p99 at this rate: {slowest_s(timed, needed) * 1000:.0f} ms of {line.p99_ms:g}.\n"
                f"Service times: {dial.command} at {dial.commit}, {dial.date}.\n"
                f"One replica there: {dial.machine.sentence}."
            )
        else:
            raise CapacityError("--ask names kinds of dial.json or capacity.json files, not both")
    except (CapacityError, OSError) as error:
        print(f"capacity: {error}", file=sys.stderr)
        return 2
    total = needed + line.spare
    print(text_table(Table("", columns, rows)))
    more = f"{line.headroom:.0%} more of it"
    print(f"\n{total} replicas: {needed} for the load and {more}, {line.spare} spare.")
    print(f"{total * line.memory_mb / 1000:.1f} GB of memory, {line.memory_mb:.0f} MB each.")
    if line.price_per_hour is not None:
        print(
            f"{total * line.price_per_hour * HOURS_A_MONTH:.0f} a month of {HOURS_A_MONTH} hours."
        )
    print(source)
    if line.memory_mb == most_memory_mb(soak):
        print(f"Memory: {soak.command} at {soak.commit}, {soak.date}.")
    return 0


def _split(text: str) -> tuple[str, float]:
    name, _, rate = text.rpartition("=")
    try:
        rate_per_s = float(rate)
    except ValueError:
        rate_per_s = 0.0
    if not name or not 0 < rate_per_s < math.inf:
        raise CapacityError(f"--ask {text!r}: send NAME=RATE, a rate a second above 0")
    return name, rate_per_s


def _time_of(name: str, times: dict[str, float]) -> float:
    if name not in times:
        raise CapacityError(f"{name!r} was not measured; there are:\n  " + "\n  ".join(times))
    return times[name]


def _parser(times: dict[str, float], memory_mb: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capacity",
        description=__doc__.partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="kinds that were measured:\n  " + "\n  ".join(times),
    )
    parser.add_argument(
        "--ask",
        action="append",
        required=True,
        metavar="NAME=RATE",
        help="requests of a kind a second, or of a capacity.json; once for each kind of the mix",
    )
    parser.add_argument(
        "--p99-ms", type=float, default=100.0, help="99 %% of each kind within this (default: 100)"
    )
    parser.add_argument(
        "--headroom", type=float, default=0.5, help="share of the load it may grow by (0.5)"
    )
    parser.add_argument("--spare", type=int, default=1, help="replicas that may be gone (1)")
    parser.add_argument(
        "--memory-mb", type=float, default=memory_mb, help=f"of a replica ({memory_mb:.0f})"
    )
    parser.add_argument("--price-per-hour", type=float, help="of a replica, in your currency")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
