"""Right answers a second within a deadline under overload: a tagger beside plain models.

    python -m benchmarks.overload --bundles zoo/logic PLAIN1 PLAIN4

The first bundle has the dial; the others are plain models of the same data. One server has them
all. Requests come at random times, at 2 and 4 times what it sustains at the full steps of the dial,
which is measured first; every model gets the same requests at the same times with the same
deadline, one model after another, in rounds. What counts is what was right of the answers that were
in time.

The deadline is ten times what a request alone takes at full steps: so long that no model misses it
for being slow, so short that a queue of a second is of no use.
"""

import itertools
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

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
from benchmarks.texts import TaggedText, check_same_data, tagged_texts
from serve.bundle import Bundle

NAME = "overload"
PATH = "/v1/classify"
LOADS = (2, 4)
TEXTS = 8  # of a request
SECONDS, ROUNDS = 10.0, 5
DEADLINE = 10  # times an answer alone at full steps
WANTED = 1.5  # times as much right as the better plain model
_COLUMNS = (
    *("model", "parameters", "alone ms", "load", "requests", "in time", "p50 ms", "p99 ms"),
    *("steps", "right positions a second", "right texts a second"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Arm:
    """One model, and what its requests say of steps."""

    name: str
    bundle: Bundle
    fields: dict[str, Any]


class Right(NamedTuple):
    """Of the answers in time."""

    positions: int
    texts: int  # with every position right


@dataclass(slots=True)
class Outcome:
    """What came of one arm at one load, in all rounds."""

    requests: int = 0
    latencies_s: list[float] = field(default_factory=list)  # of answers
    seconds: list[float] = field(default_factory=list)  # of each round
    right: list[Right] = field(default_factory=list)
    in_time: int = 0
    steps: list[int] = field(default_factory=list)

    def add(
        self,
        shots: Sequence[tuple[Shot, Sequence[TaggedText]]],
        deadline_s: float,
        seconds: float,
    ) -> None:
        """A round."""
        positions = whole = 0
        for shot, given in shots:
            self.requests += 1
            if shot.status == 200:
                self.latencies_s.append(shot.latency_s)
            if shot.status != 200 or shot.latency_s > deadline_s:
                continue
            self.in_time += 1
            for result, text in zip(shot.read["results"], given, strict=True):
                right, every = text.right([token["label"] for token in result["tokens"]])
                positions += right
                whole += every
                self.steps.append(result["budget"]["steps"])
        self.right.append(Right(positions, whole))
        self.seconds.append(seconds)

    def a_second(self, what: str) -> float:
        return float(sum(getattr(one, what) for one in self.right)) / sum(self.seconds)

    def each(self, what: str) -> list[float]:
        return [
            getattr(one, what) / seconds
            for one, seconds in zip(self.right, self.seconds, strict=True)
        ]


Outcomes = dict[tuple[Arm, int], Outcome]


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    seconds, rounds = (1.0, 1) if chosen.quick else (SECONDS, ROUNDS)
    dial, *plain = chosen.read("tag")
    if not plain:
        raise SystemExit("name a tagger with a dial, then plain models, with --bundles")
    texts = tagged_texts(dial)
    check_same_data(dial, plain)
    full = {"steps": dial.manifest.full_steps}
    arms = [
        Arm(f"{dial.manifest.name}, steps by the server", dial, {}),
        Arm(f"{dial.manifest.name}, {full['steps']} steps", dial, full),
        *(Arm(bundle.manifest.name, bundle, {}) for bundle in plain),
    ]
    with running_server([bundle.folder for bundle in (dial, *plain)]) as server:
        alone_s = {arm: _alone_s(server, arm, texts) for arm in arms}
        deadline_s = DEADLINE * alone_s[arms[1]]
        if deadline_s > seconds / 8 and not chosen.quick:
            raise SystemExit(
                f"a request alone takes {alone_s[arms[1]]:.1f} s: rounds of {seconds:g} s are too "
                "short for a queue"
            )
        rate = _capacity(server, arms[1], texts, seconds)
        outcomes = _rounds(server, arms, rate, deadline_s, texts, seconds, rounds)
    rows = [_row(arm, load, outcomes[arm, load], alone_s[arm]) for load in LOADS for arm in arms]
    caption = (
        f"{TEXTS} texts a request. {rate:.1f} requests a second are what the server sustains "
        f"at {full['steps']} steps; the loads are 2 and 4 times that, the same for all. Deadline "
        f"{1000 * deadline_s:.0f} ms from when a request was due, {DEADLINE} times what one alone "
        f"takes at {full['steps']} steps. `alone`: a request on an idle server. `in time`: of all "
        "requests. `right`: of those in time; a text is right where all of its positions are."
    )
    beside, targets = _ratios(outcomes, arms[0], arms[2:])
    return provenance.result(
        NAME if dial.manifest.name == "logic" else f"{NAME}_{dial.manifest.name}",
        f"What an overloaded server gets right in time: {dial.manifest.name}",
        f"{len(texts):,} texts of the test set. {rounds} rounds of {seconds:g} s for "
        "each model and load, in an order that changes. All models are in one server.",
        [Table(caption, _COLUMNS, rows), beside],
        targets,
    )


def _rounds(
    server: Server,
    arms: Sequence[Arm],
    rate: float,
    deadline_s: float,
    texts: Sequence[TaggedText],
    seconds: float,
    rounds: int,
) -> Outcomes:
    outcomes: Outcomes = {(arm, load): Outcome() for load in LOADS for arm in arms}
    order = random.Random(5)
    for round_, load in itertools.product(range(rounds), LOADS):
        for arm in order.sample(arms, len(arms)):
            chance = random.Random(100 * round_ + load)  # the same requests for all
            shots = _requests(arm, load * rate, deadline_s, texts, seconds, chance)
            fire(server, PATH, [shot for shot, _ in shots], patience_s=4 * deadline_s)
            outcomes[arm, load].add(shots, deadline_s, seconds)
    return outcomes


def _requests(
    arm: Arm,
    rate: float,
    deadline_s: float,
    texts: Sequence[TaggedText],
    seconds: float,
    chance: random.Random,
) -> list[tuple[Shot, list[TaggedText]]]:
    shots: list[tuple[Shot, list[TaggedText]]] = []
    for due_s in arrivals(rate, seconds, chance):
        given = chance.choices(texts, k=TEXTS)
        body = _body(arm, given) | {"deadline_ms": 1000 * deadline_s}
        shots.append((Shot(due_s, body), given))
    return shots


def _body(arm: Arm, texts: Sequence[TaggedText]) -> dict[str, Any]:
    return {"model": arm.bundle.manifest.name, "input": [one.text for one in texts]} | arm.fields


def _alone_s(server: Server, arm: Arm, texts: Sequence[TaggedText]) -> float:
    """The median of a request that comes alone."""
    chance = random.Random(2)
    shots = [Shot(0.0, _body(arm, chance.choices(texts, k=TEXTS))) for _ in range(15)]
    for shot in shots:
        fire(server, PATH, [shot], patience_s=60.0)
    return statistics.median(shot.latency_s for shot in shots)


def _capacity(server: Server, arm: Arm, texts: Sequence[TaggedText], seconds: float) -> float:
    """Requests a second with always more to do."""
    chance = random.Random(3)

    def at_once(count: int) -> float:
        bodies = [_body(arm, chance.choices(texts, k=TEXTS)) for _ in range(count)]
        return burst(server, PATH, bodies)

    rate = at_once(24)
    return at_once(min(200, max(24, round(rate * seconds))))


def _row(arm: Arm, load: int, outcome: Outcome, alone_s: float) -> list[Cell]:
    times = [1000 * each for each in outcome.latencies_s]
    return [
        *(arm.name, arm.bundle.manifest.shape.parameters, 1000 * alone_s),
        *(f"{load} x", outcome.requests),
        f"{100 * outcome.in_time / outcome.requests:.1f} %",
        percentile(times, 0.5) if times else None,
        percentile(times, 0.99) if times else None,
        statistics.fmean(outcome.steps) if outcome.steps else None,
        outcome.a_second("positions"),
        outcome.a_second("texts"),
    ]


def _ratios(outcomes: Outcomes, dial: Arm, plain: Sequence[Arm]) -> tuple[Table, list[Target]]:
    """The dial beside the better plain model, which may be another one for each figure."""
    rows: list[Sequence[Cell]] = []
    targets = []
    for what, load in ((what, load) for what in ("positions", "texts") for load in LOADS):
        ours = outcomes[dial, load]
        rival = max(plain, key=lambda arm: outcomes[arm, load].a_second(what))
        best, name = outcomes[rival, load], rival.name
        mine, theirs = ours.a_second(what), best.a_second(what)
        each = list(_quotients(ours.each(what), best.each(what)))
        rows.append(
            [
                *(f"right {what}, {load} x", name, theirs, mine),
                mine / theirs if theirs else None,
                f"{min(each):.2f} to {max(each):.2f}" if each else None,
            ]
        )
        if theirs:
            targets.append(
                Target(
                    f"{load} x: right {what}, times those of {name}", mine / theirs, ">=", WANTED
                )
            )
    columns = ("what", "better plain model", "it, a second", "dial, a second", "times", "by round")
    caption = "The dial, whose steps the server chooses, beside the better of the plain models."
    return Table(caption, columns, rows), targets


def _quotients(ours: Sequence[float], theirs: Sequence[float]) -> Iterator[float]:
    return (a / b for a, b in zip(ours, theirs, strict=True) if b)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
