"""What a classifier may save by answering early, and how often that changes its answer.

After each evaluation but the last, the readout straight to the end gives logits. A row answers
there as soon as the largest logit is ahead of the second by at least the threshold; a row that
never is takes the full-step answer. What is guaranteed of a level: with the given confidence over
the draw of the calibration rows, on data like them, the share of answers that differ from the
full-step answer is at most its `max_disagreement`. Each level holds on its own with that
confidence. A request between two levels takes the stricter one; a request below the strictest,
and a level without a threshold, run all steps. Knows numbers only: no logits are seen here.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Self

from serve.bundle.fields import (
    BundleError,
    check_integer,
    check_list,
    check_members,
    check_number,
    check_text,
    inside,
)
from serve.bundle.rung import MAX_EVALUATIONS

MAX_LEVELS = 16
_LEAST, _MOST = 1e-9, 1 - 1e-9  # shares that are neither never nor always
_MAX_THRESHOLD = 1e30


@dataclass(frozen=True, slots=True)
class Level:
    """One allowed disagreement, and how far ahead an early answer must be to keep to it."""

    max_disagreement: float
    threshold: float | None  # None: none could be certified, so run all steps
    evaluations: float  # spent a row, in the mean over the calibration rows
    observed: float  # share of the calibration rows whose answer differed

    def __post_init__(self) -> None:
        check_number("max_disagreement", self.max_disagreement, _LEAST, _MOST)
        if self.threshold is not None:
            check_number("threshold", self.threshold, 0.0, _MAX_THRESHOLD)
        check_number("evaluations", self.evaluations, 1.0, MAX_EVALUATIONS)
        check_number("observed", self.observed, 0.0, 1.0)
        if self.observed > self.max_disagreement:
            raise BundleError(
                f"is {self.observed:g}, above the {self.max_disagreement:g} that the level allows: "
                "export the bundle again",
                field="observed",
            )

    @classmethod
    def from_json(cls, value: object) -> Self:
        keys = ("max_disagreement", "threshold", "evaluations", "observed")
        return cls(**check_members(value, keys))


@dataclass(frozen=True, slots=True)
class Calibration:
    """The levels that were certified on these rows, from the strictest to the loosest."""

    rows: int
    confidence: float
    source: str
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        check_integer("rows", self.rows, 1, 1 << 53)
        check_number("confidence", self.confidence, _LEAST, _MOST)
        check_text("source", self.source, 1000)
        if not 1 <= len(self.levels) <= MAX_LEVELS:
            raise BundleError(
                f"has {len(self.levels)} items; a calibration has from 1 to {MAX_LEVELS}",
                field="levels",
            )
        for index, (strict, loose) in enumerate(itertools.pairwise(self.levels), start=1):
            field = f"levels[{index}]"
            if loose.max_disagreement <= strict.max_disagreement:
                raise BundleError(
                    f"is {loose.max_disagreement:g} after {strict.max_disagreement:g}; sort the "
                    "levels from strict to loose, each once",
                    field=f"{field}.max_disagreement",
                )
            if _needed(loose) > _needed(strict):
                raise BundleError(
                    "asks more than the stricter level before it; what that one certifies holds "
                    "here too",
                    field=f"{field}.threshold",
                )

    @classmethod
    def from_json(cls, value: object) -> Self:
        members = dict(check_members(value, ("rows", "confidence", "source", "levels")))
        levels = []
        for index, level in enumerate(check_list("levels", members["levels"], MAX_LEVELS)):
            with inside(f"levels[{index}]"):
                levels.append(Level.from_json(level))
        return cls(**(members | {"levels": tuple(levels)}))


def _needed(level: Level) -> float:
    return math.inf if level.threshold is None else level.threshold
