"""One trained run, measured: what is kept of it in measured/NAME.json."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.lab import Machine
from train.checkpoint import write_atomically
from train.evaluate import ADAPTIVE
from train.recipe import Recipe

FOLDER = Path(__file__).resolve().parent / "measured"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Point:
    """Quality at one way of answering."""

    method: str
    steps: int | None  # None: the adaptive solver's own
    nfe: float
    metric: str  # "accuracy", or "loss" in nats a token
    value: float
    low: float  # 95 % interval over the held-out rows
    high: float
    samples: int
    loss: float
    cost: float  # transport
    gap: float  # of straightness
    agreement: float  # with the full count


@dataclass(frozen=True, slots=True)
class Moment:
    """What was watched while training."""

    iteration: int
    evaluations: int  # velocity evaluations spent so far
    train_loss: float
    validation: Mapping[str, float]  # metric@steps


@dataclass(frozen=True, slots=True)
class Measured:
    """A run of a recipe with one seed."""

    name: str
    group: str  # runs of one group differ in their seed only
    seed: int
    recipe: Mapping[str, Any]
    parameters: int
    iterations: int
    evaluations: int
    cpu_s: float | None
    points: Sequence[Point]
    jumps: Mapping[str, Mapping[str, float]]  # by method and evaluations: agreement with full
    stability: float
    curve: Sequence[Moment]
    command: str
    commit: str
    date: str
    machine: Machine
    bleu: Mapping[str, float] = field(default_factory=dict)  # by steps, of translators
    bleu_signature: str = ""

    def write(self, folder: Path = FOLDER) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        record = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        write_atomically(path, text.encode())
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            raise ValueError(f"{path} is not whole: delete it, and measure again") from None
        if record.pop("schema_version", None) != SCHEMA_VERSION:
            raise ValueError(f"{path} is of another schema version: measure again")
        record["machine"] = Machine(**record["machine"])
        record["points"] = [Point(**point) for point in record["points"]]
        record["curve"] = [Moment(**moment) for moment in record["curve"]]
        return cls(**record)

    def at(self, steps: int | None, method: str | None = None) -> Point | None:
        """The point of a step count; by default with the method of its training.

        None is the adaptive solver, which chooses its steps.
        """
        wanted = ADAPTIVE if steps is None else method or self.trained_method
        for point in self.points:
            if point.steps == steps and point.method in (wanted, "discrete"):
                return point
        return None

    def need(self, steps: int | None) -> Point:
        """The point of a step count that must have been measured."""
        point = self.at(steps)
        if point is None:
            counted = "with the adaptive solver" if steps is None else f"at {steps} steps"
            raise ValueError(f"{self.name} was not measured {counted}: measure it again")
        return point

    @property
    def full(self) -> Point:
        """The point of the training: at full steps, or of the adaptive solver."""
        steps = self.recipe["steps"]
        if self.discrete:
            return self.need(1)
        return self.need(None if steps.get("solver") == ADAPTIVE else steps["full"])

    @property
    def discrete(self) -> bool:
        """Whether it has blocks of its own at every depth, and so no steps."""
        return bool(self.recipe["model"]["depth"] == "discrete")

    @property
    def trained_method(self) -> str:
        return str(self.recipe["steps"]["method"])


def counts_of(asked: str, recipe: Recipe) -> list[int]:
    """The step counts to measure a run at: those asked for, and that of its training."""
    counts = {*map(int, asked.split(","))}
    if recipe.model.depth != "discrete" and recipe.steps.solver != ADAPTIVE:
        counts.add(recipe.steps.full)
    return sorted(counts)


def read_all(folder: Path = FOLDER) -> dict[str, list[Measured]]:
    """Every kept run by its group, seeds ascending."""
    groups: dict[str, list[Measured]] = {}
    for path in sorted(folder.glob("*.json")):
        one = Measured.read(path)
        groups.setdefault(one.group, []).append(one)
    return {group: sorted(runs, key=lambda run: run.seed) for group, runs in groups.items()}
