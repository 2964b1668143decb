"""Quality and straightness of a run at each step count, on the held-out split of its data."""

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from train.checkpoint import load_run
from train.corrections import check_steps
from train.data import open_measured
from train.data.batch import Batch, Sizes
from train.loop import warn_of_unfinished
from train.model import Output, Stepped
from train.objective import straightness_gap
from train.ode import METHODS, method_named
from train.quality import Stability, StepRecorder, Tally, agreement, stability
from train.recipe import AS_TRAINED, Columns, Recipe, data_at
from train.schedule import ladder_of, steps_of
from train.tally import Gain, Quality, gain

ADAPTIVE = "adaptive"
JUMPS = (1, 2, 4)  # evaluations spent before a jump
POSITIONS, LOGITS = 8192, 1 << 26  # of one batch


@dataclass(frozen=True, slots=True)
class Row:
    """One way of answering: a method with a number of steps, or the adaptive solver."""

    method: str
    steps: int | None  # None: as many as the solver took
    nfe: float  # velocity evaluations of a batch
    quality: Quality
    gap: float  # sum h |v|^2 - |x_T - x_0|^2 / T, means over elements
    displacements: tuple[float, ...]  # root mean square of each step, one trajectory after another
    agreement: float  # share of answers that are those of the full count


@dataclass(frozen=True, slots=True)
class Spent:
    """What the adaptive solver spends on sequences of one length."""

    length: int
    rows: int
    nfe: float


@dataclass(frozen=True, slots=True)
class Range:
    """What the best count buys over the smallest."""

    first: int
    best: int
    gain: Gain


HELD_OUT = "held-out data"


@dataclass(frozen=True, slots=True)
class Report:
    name: str
    full_steps: int
    discrete: bool  # measured in the one way there is, whatever was asked for
    rows: tuple[Row, ...]
    jumps: dict[str, dict[int, float]]  # by method and evaluations: share that agrees with full
    stability: Stability
    lengths: tuple[Spent, ...]  # of the adaptive solver only
    chance: float | None = None  # of a classifier: the share of the most frequent class
    ranges: dict[str, Range] = field(default_factory=dict)  # by method, of several counts
    measured: str = HELD_OUT  # on what


def evaluate_run(
    folder: Path,
    steps: list[int] | None = None,
    methods: list[str] | None = None,
    data: str = "",
    rows: int = 0,
    columns: Columns = AS_TRAINED,
    model: Stepped | None = None,
) -> Report:
    """Measure every method at every step count; by default the method of the run's training.

    With `rows`, on the first so many held-out ones, in whole batches; otherwise on all. With a
    model, of a run that trained one's own, that one with the weights of the run.
    """
    model, recipe, tokenizer, facts = load_run(folder, model)
    recipe = data_at(recipe, data, columns)
    # Each once: a way that is measured twice would count its rows twice.
    steps = list(dict.fromkeys(steps or ladder_of(recipe)))
    methods = list(dict.fromkeys(methods or [recipe.steps.method]))
    if model.discrete:
        steps, methods = [1], ["discrete"]
    for method in methods:
        check_steps(model, recipe.steps, method)
    dataset = open_measured(recipe, tokenizer, facts)
    asked = _Evaluation(model, recipe, steps, methods)
    size = rows_at_once(recipe, dataset.sizes)
    batches = -(-rows // size) if rows else None
    with torch.no_grad():
        for batch in itertools.islice(dataset.held_out(size), batches):
            asked.add(batch)
    report = asked.report(dataset.labels is not None)
    if facts.get("data_sha256") in (None, dataset.digest):
        warn_of_unfinished(folder, recipe, dataset)
        return report
    return replace(report, measured=f"on {data or recipe.data.path}")


def methods_named(text: str) -> list[str]:
    """`all`, or methods separated by commas."""
    names = METHODS if text == "all" else text.split(",")
    return list(dict.fromkeys(method_named(name).name for name in names))


def rows_at_once(recipe: Recipe, sizes: Sizes) -> int:
    """As many rows as fit into a few gigabytes with their logits or their attention."""
    model = recipe.model
    if model.family == "image":
        return 256
    if model.family == "set":
        return max(4, POSITIONS // model.window)
    longest = max(model.window, model.target_window if model.family == "translator" else 0)
    positions = POSITIONS if sizes.classes else min(POSITIONS, LOGITS // sizes.vocabulary)
    return max(1, positions // longest)


class _Evaluation:
    """Everything asked of a model, over one pass through the data."""

    def __init__(
        self, model: Stepped, recipe: Recipe, counts: list[int], methods: list[str]
    ) -> None:
        self.model, self.recipe, self.counts, self.methods = model, recipe, counts, methods
        config = steps_of(recipe)
        self.full = config.full
        self.tolerance = config.tolerance if config.solver == ADAPTIVE else None
        self.ways: dict[tuple[str, int | None], _Way] = {}
        self.jumps: dict[str, dict[int, _Share]] = {}
        self.positions = 1  # the most of any batch
        self.spent: dict[int, tuple[int, int]] = {}  # by length: rows, evaluations of all rows
        self.classes: Counter[int] = Counter()  # rows of each class

    def add(self, batch: Batch) -> None:
        if batch.targets.dim() == 1:
            self.classes.update(batch.targets.tolist())
        solved: Tensor | None = None
        if self.tolerance is not None:
            output, recorder = self._answer(batch, ADAPTIVE, None)
            solved = output.logits
            self._way(ADAPTIVE, None).add(batch, output, recorder, solved)
            self._add_lengths(batch, output)
        for method in self.methods:
            full, recorder = self._answer(batch, method, self.full)
            reference = full.logits if solved is None else solved
            self._add_jumps(batch, method, full, recorder, reference)
            for count in self.counts:
                output, seen = full, recorder
                if count != self.full:
                    output, seen = self._answer(batch, method, count)
                self._way(method, count).add(batch, output, seen, reference)

    def report(self, labelled: bool) -> Report:
        rows = tuple(way.row(*key, labelled) for key, way in self.ways.items())
        jumps = {
            method: {spent: share.value for spent, share in shares.items()}
            for method, shares in self.jumps.items()
        }
        lengths = tuple(
            Spent(length, rows, evaluations / rows)
            for length, (rows, evaluations) in sorted(self.spent.items())
        )
        stable = stability(self.model, self.recipe.optim.transport, self.positions)
        name, discrete = self.recipe.name, self.model.discrete
        chance = None
        if labelled and self.classes:
            chance = max(self.classes.values()) / self.classes.total()
        ranges = {one: self._range(one, labelled) for one in self.methods if len(self.counts) > 1}
        return Report(name, self.full, discrete, rows, jumps, stable, lengths, chance, ranges)

    def _range(self, method: str, labelled: bool) -> Range:
        tallies = {count: self.ways[method, count].tally for count in self.counts}
        values = {count: tally.quality(labelled) for count, tally in tallies.items()}
        sign = 1 if labelled else -1
        best = max(values, key=lambda count: (sign * values[count].value, -count))
        first = min(values)
        found = gain(
            tallies[first].per_row(labelled), tallies[best].per_row(labelled), values[best].metric
        )
        return Range(first, best, found)

    def _answer(self, batch: Batch, method: str, count: int | None) -> tuple[Output, StepRecorder]:
        recorder = StepRecorder(self.model.span(count or 1)[1], JUMPS)
        self.model.tolerance = self.tolerance if count is None else None
        output = self.model(
            *batch.inputs,
            steps=count or 1,
            method="euler" if count is None else method,
            observe=recorder,
        )
        self.positions = max(self.positions, output.trajectories[-1].end.shape[1])
        return output, recorder

    def _way(self, method: str, count: int | None) -> "_Way":
        return self.ways.setdefault((method, count), _Way())

    def _add_jumps(
        self, batch: Batch, method: str, full: Output, recorder: StepRecorder, reference: Tensor
    ) -> None:
        shares = self.jumps.setdefault(method, {})
        if self.model.depth != "ode":
            return  # elsewhere the state at T is not where the first velocity leads
        for spent, point in recorder.jumps.items():
            logits = self.model.head(point, *full.context)
            shares.setdefault(spent, _Share()).add(logits, reference, batch.targets)

    def _add_lengths(self, batch: Batch, output: Output) -> None:
        """Solve the rows of each length on their own: together they would share their steps."""
        trajectory = output.trajectories[0]
        sizes = torch.full((batch.rows,), trajectory.start.shape[1])
        if trajectory.present is not None:
            sizes = trajectory.present.sum(1)
        for length in sizes.unique().tolist():
            chosen = sizes == length
            some = Batch(tuple(x[chosen] for x in batch.inputs), batch.targets[chosen])
            alone, _ = self._answer(some, ADAPTIVE, None)
            rows, evaluations = self.spent.get(length, (0, 0))
            spent = evaluations + alone.evaluations * some.rows
            self.spent[length] = (rows + some.rows, spent)


class _Share:
    """The share of answers that two ways have in common."""

    def __init__(self) -> None:
        self.same = self.answers = 0

    def add(self, logits: Tensor, others: Tensor, targets: Tensor) -> None:
        same, answers = agreement(logits, others, targets)
        self.same += same
        self.answers += answers

    @property
    def value(self) -> float:
        return self.same / self.answers


class _Way:
    """What is gathered of one way of answering, as means over rows."""

    def __init__(self) -> None:
        self.tally, self.share = Tally(), _Share()
        self.rows = 0
        self.evaluations = self.gap = 0.0
        self.moved: list[float] = []  # mean squares

    def add(self, batch: Batch, output: Output, recorder: StepRecorder, reference: Tensor) -> None:
        self.tally.add(batch, output.logits, float(output.cost))
        self.share.add(output.logits, reference, batch.targets)
        self.rows += batch.rows
        self.evaluations += output.evaluations * batch.rows
        self.gap += float(straightness_gap(output)) * batch.rows
        moved = [square * batch.rows for square in recorder.displacements(output)]
        before = self.moved or [0.0] * len(moved)
        self.moved = [a + b for a, b in zip(before, moved, strict=True)]

    def row(self, method: str, steps: int | None, labelled: bool) -> Row:
        return Row(
            method,
            steps,
            self.evaluations / self.rows,
            self.tally.quality(labelled),
            self.gap / self.rows,
            tuple((square / self.rows) ** 0.5 for square in self.moved),
            self.share.value,
        )
