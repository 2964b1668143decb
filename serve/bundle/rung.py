"""A rung of a bundle's ladder: its steps, its cost, its measured quality, its verification.

Knows neither graphs nor time: latency is measured apart from the manifest. What its evaluations
must be depends on the bundle's depth, so the rules of the task have that.
"""

from dataclasses import dataclass
from typing import Literal, Self

from serve.bundle.fields import (
    BundleError,
    check_choice,
    check_file_name,
    check_flag,
    check_integer,
    check_members,
    check_number,
    inside,
)

Method = Literal["euler", "ab2", "midpoint", "heun", "rk4"]
Effort = Literal["low", "medium", "high", "max"]
Metric = Literal["loss", "accuracy", "bleu"]

EVALUATIONS_PER_STEP: dict[str, int] = {"euler": 1, "ab2": 1, "midpoint": 2, "heun": 2, "rk4": 4}
METHODS = tuple(EVALUATIONS_PER_STEP)
EFFORTS = ("low", "medium", "high", "max")
METRICS = ("loss", "accuracy", "bleu")
MAX_STEPS = 1024
MAX_EVALUATIONS = 1 << 20
_HUGE = 1e30
_RANGES = {"loss": (-_HUGE, _HUGE), "accuracy": (0.0, 1.0), "bleu": (0.0, 100.0)}


def steps_in_words(steps: int) -> str:
    """A count of steps as a person writes it."""
    return "1 step" if steps == 1 else f"{steps} steps"


@dataclass(frozen=True, slots=True)
class Quality:
    """A rung's measured quality on held-out data, with its confidence interval."""

    metric: Metric
    value: float
    low: float
    high: float
    samples: int
    exact: float | None = None  # of a tagger: the share of rows without a wrong position

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, METRICS)
        check_number("value", self.value, *_RANGES[self.metric])
        check_number("low", self.low, -_HUGE, self.value)
        check_number("high", self.high, self.value, _HUGE)
        check_integer("samples", self.samples, 1, 1 << 53)
        if self.exact is not None:
            check_number("exact", self.exact, 0.0, 1.0)

    @classmethod
    def from_json(cls, value: object) -> Self:
        if isinstance(value, dict):
            value = {"exact": None} | value
        return cls(**check_members(value, ("metric", "value", "low", "high", "samples", "exact")))


@dataclass(frozen=True, slots=True)
class Range:
    """What the last rung is better than the first by: the mean over the rows, and its interval.

    Above 0 is better, whatever the metric. Both rungs were measured on the same rows, so that the
    interval is that of a paired difference.
    """

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        check_number("value", self.value, -_HUGE, _HUGE)
        check_number("low", self.low, -_HUGE, self.value)
        check_number("high", self.high, self.value, _HUGE)

    @classmethod
    def from_json(cls, value: object) -> Self:
        return cls(**check_members(value, ("value", "low", "high")))


@dataclass(frozen=True, slots=True)
class Verified:
    """How far the graph's float32 answer was from the model's, and how far it was allowed to be."""

    max_abs_error: float
    tolerance: float
    float32_error: float

    def __post_init__(self) -> None:
        check_number("tolerance", self.tolerance, 0.0, _HUGE)
        check_number("float32_error", self.float32_error, 0.0, _HUGE)
        check_number("max_abs_error", self.max_abs_error, 0.0, _HUGE)
        if self.max_abs_error > self.tolerance:
            raise BundleError(
                f"is {self.max_abs_error:g}, above the tolerance {self.tolerance:g}: this graph "
                "failed its verification; export the bundle again",
                field="max_abs_error",
            )

    @classmethod
    def from_json(cls, value: object) -> Self:
        return cls(**check_members(value, ("max_abs_error", "tolerance", "float32_error")))


@dataclass(frozen=True, slots=True)
class AgainstFp32:
    """What fewer bits changed, on the rows that the quality was measured on."""

    top1_agreement: float  # share of answers that are those of float32
    change: float  # of the metric: its value less that of float32
    samples: int

    def __post_init__(self) -> None:
        check_number("top1_agreement", self.top1_agreement, 0.0, 1.0)
        check_number("change", self.change, -_HUGE, _HUGE)
        check_integer("samples", self.samples, 1, 1 << 53)

    @classmethod
    def from_json(cls, value: object) -> Self:
        return cls(**check_members(value, ("top1_agreement", "change", "samples")))


@dataclass(frozen=True, slots=True)
class Rung:
    """One operating point: so many steps of a method, as one fixed-step graph."""

    steps: int
    method: Method
    nfe: int
    effort: Effort | None
    graph: str
    quality: Quality
    verified: Verified
    encoder: str | None = None  # of a translator: the graph that reads the source
    dominated: bool = False  # fewer steps are at least as good
    against_fp32: AgainstFp32 | None = None  # of another precision

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, 1, MAX_STEPS)
        check_choice("method", self.method, METHODS)
        if self.effort is not None:
            check_choice("effort", self.effort, EFFORTS)
        check_file_name("graph", self.graph)
        check_integer("nfe", self.nfe, 1, MAX_EVALUATIONS)
        if self.encoder is not None:
            check_file_name("encoder", self.encoder)
        check_flag("dominated", self.dominated)
        if self.dominated and self.effort is not None:
            raise BundleError(
                f"is {self.effort}, but fewer steps are at least as good: name those",
                field="effort",
            )

    @property
    def spent(self) -> int:
        """Evaluations of one velocity that is integrated in these steps."""
        return self.steps * EVALUATIONS_PER_STEP[self.method]

    @property
    def graphs(self) -> dict[str, str]:
        """The graphs of the rung, by their field."""
        graphs = {"graph": self.graph}
        return graphs if self.encoder is None else graphs | {"encoder": self.encoder}

    @classmethod
    def from_json(cls, value: object) -> Self:
        members = dict(check_members(value, _KEYS))
        with inside("quality"):
            members["quality"] = Quality.from_json(members["quality"])
        with inside("verified"):
            members["verified"] = Verified.from_json(members["verified"])
        with inside("against_fp32"):
            if members["against_fp32"] is not None:
                members["against_fp32"] = AgainstFp32.from_json(members["against_fp32"])
        return cls(**members)


_KEYS = (
    "steps",
    "method",
    "nfe",
    "effort",
    "dominated",
    "graph",
    "encoder",
    "quality",
    "verified",
    "against_fp32",
)


def check_ladder(rungs: tuple[Rung, ...], method: str) -> None:
    """Rules that hold between the rungs of one bundle."""
    if not rungs:
        raise BundleError("is empty; a bundle has at least one rung: export it again")
    for index, rung in enumerate(rungs):
        here = f"[{index}]"
        if rung.method != method:
            raise BundleError(
                f"is {rung.method}, but the bundle's method is {method}: a bundle has one method",
                field=f"{here}.method",
            )
        if rung.quality.metric != rungs[0].quality.metric:
            raise BundleError(
                f"is {rung.quality.metric}, but the first rung's is {rungs[0].quality.metric}: "
                "a ladder has one metric",
                field=f"{here}.quality.metric",
            )
        if index and rung.steps == rungs[index - 1].steps:
            raise BundleError(
                f"repeats {rung.steps}; keep one rung of each step count", field=f"{here}.steps"
            )
        if index and rung.steps < rungs[index - 1].steps:
            raise BundleError(
                f"is {rung.steps} after {rungs[index - 1].steps}; sort the rungs by steps",
                field=f"{here}.steps",
            )
    seen: set[str] = set()
    for index, rung in enumerate(rungs):
        for field, graph in rung.graphs.items():
            if graph in seen:
                raise BundleError(
                    f"repeats {graph}; every rung has graphs of its own", field=f"[{index}].{field}"
                )
            seen.add(graph)
    _check_efforts(rungs)


def _check_efforts(rungs: tuple[Rung, ...]) -> None:
    last = -1
    for index, rung in enumerate(rungs):
        if rung.effort is None:
            continue
        field = f"[{index}].effort"
        rank = EFFORTS.index(rung.effort)
        if rank == last:
            raise BundleError(f"repeats {rung.effort}; each word names one rung", field=field)
        if rank < last:
            raise BundleError(
                f"is {rung.effort} after {EFFORTS[last]}; a greater effort has more steps",
                field=field,
            )
        last = rank
