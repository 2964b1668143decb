"""Share of requests answered within their deadline, at 2 and 4 times the load that can be served.

    python -m benchmarks.deadlines [--data PATH]

Requests come at random times, at multiples of the rate that the server sustains at full steps,
which is measured first. Three ways to serve take turns: Stepdial, which chooses the steps; the
same, told to take full steps; and a server that takes every request in turn at full steps. PATH is
the test set of the bundle, for its labels.
"""

import itertools
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.client import Shot, arrivals, burst, fire
from benchmarks.lab import (
    Cell,
    Options,
    Provenance,
    Result,
    Table,
    Target,
    options,
    parser,
    percentile,
    run,
)
from benchmarks.server import Server, running_server
from benchmarks.soak import settled_gauges
from benchmarks.texts import LabelledText, labelled_texts
from serve.bundle import Bundle

NAME = "deadlines"
PATH = "/v1/classify"
LOADS = (2, 4)
DEADLINE_S, SECONDS, ROUNDS = 0.25, 30.0, 3
ATTAINED = {2: 0.95, 4: 0.90}
UNMANAGED = ("--queue-limit", "1000000", "--queue-wait-s", "86400", "--no-degrade")
_COLUMNS = (
    *("server", "load", "requests", "in time", "refused", "admitted, in time", "p50 ms", "p99 ms"),
    *("refusals, p99 ms", "steps", "right"),
)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve."""

    name: str
    fields: dict[str, Any]  # of each request
    server: Server


@dataclass(slots=True)
class Outcome:
    """What came of all runs of one server at one load."""

    shots: list[Shot] = field(default_factory=list)
    labels: dict[int, str | None] = field(default_factory=dict)

    @property
    def answered(self) -> list[Shot]:
        return [shot for shot in self.shots if shot.status == 200]

    @property
    def refused(self) -> list[Shot]:
        return [shot for shot in self.shots if shot.status in (422, 429)]

    @property
    def in_time(self) -> float:
        return sum(shot.latency_s <= DEADLINE_S for shot in self.answered) / len(self.shots)

    @property
    def admitted_in_time(self) -> float:
        admitted = len(self.shots) - len(self.refused)
        return self.in_time * len(self.shots) / max(1, admitted)

    @property
    def refusal_p99_ms(self) -> float | None:
        times = [1000 * shot.latency_s for shot in self.refused]
        return percentile(times, 0.99) if times else None

    @property
    def steps(self) -> float | None:
        taken = [shot.read["results"][0]["budget"]["steps"] for shot in self.answered]
        return statistics.fmean(taken) if taken else None

    @property
    def right(self) -> float | None:
        """The share of answers with the right label, of those in time whose label is known."""
        found = [
            shot.read["results"][0]["label"] == self.labels[id(shot)]
            for shot in self.answered
            if shot.latency_s <= DEADLINE_S and self.labels[id(shot)] is not None
        ]
        return statistics.fmean(found) if found else None


def main(arguments: Sequence[str]) -> int:
    read = parser(__doc__.partition("\n")[0])
    read.add_argument("--data", metavar="FOLDER", help="test set of the bundle, for its labels")
    parsed = read.parse_args(arguments)
    if not parsed.bundles:
        parsed.bundles = [one for one in options(parsed).bundles if one.name == "topics"]
    return run(NAME, arguments, parsed, partial(measure, options(parsed), parsed.data))


def measure(chosen: Options, data: str | None, provenance: Provenance) -> Result:
    bundle = chosen.read("classify")[0]
    texts = labelled_texts(bundle, data)
    seconds, rounds = (2.0, 1) if chosen.quick else (SECONDS, ROUNDS)
    full = {"steps": bundle.manifest.full_steps}
    deadline = {"deadline_ms": 1000 * DEADLINE_S}
    folders = [bundle.folder]
    with running_server(folders) as ours, running_server(folders, *UNMANAGED) as unmanaged:
        arms = (
            Arm("Stepdial", deadline, ours),
            Arm("full steps, same admission", full | deadline, ours),
            Arm("full steps, one after another", full, unmanaged),
        )
        capacity_s = 1.0 if chosen.quick else 8.0
        rate, _ = (_capacity(one, bundle, texts, capacity_s) for one in (ours, unmanaged))
        outcomes = {(arm.name, load): Outcome() for arm in arms for load in LOADS}
        order = random.Random(5)
        for number, load in itertools.product(range(rounds), LOADS):
            for arm in order.sample(arms, len(arms)):
                outcome = outcomes[arm.name, load]
                _run(arm, bundle, texts, load * rate, seconds, random.Random(number), outcome)
    rows = [_row(arm, load, outcomes[arm.name, load]) for arm in arms for load in LOADS]
    targets = [each for load in LOADS for each in _targets(load, outcomes[arms[0].name, load])]
    caption = (
        f"Deadline {1000 * DEADLINE_S:g} ms, counted from when a request was due; {rate:.0f} "
        f"requests a second are what the server sustains at {bundle.manifest.full_steps} steps. "
        "`in time`: of all requests; `steps`: the mean; `right`: of the answers in time."
    )
    return provenance.result(
        NAME,
        "Deadlines under overload",
        f"Requests to `{bundle.manifest.name}` that come at random times, whatever became of those "
        f"before. {rounds} runs of {seconds:g} s for each server and load, in an order that "
        "changes.",
        [Table(caption, _COLUMNS, rows)],
        targets,
    )


def _run(
    arm: Arm,
    bundle: Bundle,
    texts: Sequence[LabelledText],
    rate: float,
    seconds: float,
    chance: random.Random,
    outcome: Outcome,
) -> None:
    """One run, whose requests are added to the outcome."""
    shots = []
    for due_s in arrivals(rate, seconds, chance):
        one = chance.choice(texts)
        shot = Shot(due_s, {"model": bundle.manifest.name, "input": one.text} | arm.fields)
        shots.append(shot)
        outcome.labels[id(shot)] = one.label
    fire(arm.server, PATH, shots, patience_s=4 * DEADLINE_S)
    settled_gauges(arm.server)  # what nobody waits for any more is gone before the next run
    outcome.shots += shots


def _capacity(
    server: Server, bundle: Bundle, texts: Sequence[LabelledText], seconds: float
) -> float:
    """Answers a second at full steps, with always more to do."""
    fields = {"model": bundle.manifest.name, "steps": bundle.manifest.full_steps}
    chance = random.Random(3)

    def at_once(count: int) -> float:
        bodies = [fields | {"input": chance.choice(texts).text} for _ in range(count)]
        return burst(server, PATH, bodies)

    rate = at_once(32)
    return at_once(min(240, max(48, round(rate * seconds))))


def _row(arm: Arm, load: int, outcome: Outcome) -> list[Cell]:
    times = [1000 * shot.latency_s for shot in outcome.answered]
    return [
        *(arm.name, f"{load} x", len(outcome.shots), _percent(outcome.in_time)),
        _percent(len(outcome.refused) / len(outcome.shots)),
        _percent(outcome.admitted_in_time, 2),
        percentile(times, 0.5) if times else None,
        percentile(times, 0.99) if times else None,
        *(outcome.refusal_p99_ms, outcome.steps),
        None if outcome.right is None else _percent(outcome.right),
    ]


def _targets(load: int, outcome: Outcome) -> list[Target]:
    wanted = ATTAINED[load]
    made = [
        Target(f"{load} x: in time", outcome.in_time, ">=", wanted),
        Target(f"{load} x: admitted, in time", outcome.admitted_in_time, ">=", 0.999),
    ]
    if outcome.refusal_p99_ms is not None:
        made.append(Target(f"{load} x: refusals, p99", outcome.refusal_p99_ms, "<=", 10.0, "ms"))
    return made


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
