"""Budgets: from what a caller asked to a rung of the ladder.

Pure: the same ask and the same ladder give the same decision. It deliberately knows neither load
nor time; a decision that depends on them will be told of them here.
"""

from dataclasses import dataclass
from typing import Literal

from serve.bundle import Effort, Level, Manifest, Rung
from serve.errors import ImpossibleBudget, NotCalibrated

Reason = Literal["exact", "effort", "disagreement", "default"]


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request says about its budget."""

    steps: int | None = None
    effort: Effort | None = None
    max_disagreement: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The rung that serves a request, and why."""

    rung: Rung
    full: Rung
    reason: Reason
    level: Level | None = None  # of early answers; None: all steps of the rung are taken

    @property
    def steps(self) -> int:
        return self.rung.steps

    @property
    def threshold(self) -> float | None:
        """How far ahead an early answer must be, if there may be one."""
        return None if self.level is None else self.level.threshold


def decide(ask: Ask, manifest: Manifest) -> Decision:
    """The rung for this ask; ImpossibleBudget, naming the ladder, where there is none."""
    full = manifest.rungs[-1]
    if ask.steps is not None and ask.effort is not None:
        raise ImpossibleBudget(
            "steps and effort both name a rung: send one of them", param="effort"
        )
    if ask.max_disagreement is not None:
        return _early(ask, ask.max_disagreement, manifest)
    if ask.steps is not None:
        for rung in manifest.rungs:
            if rung.steps == ask.steps:
                return Decision(rung, full, "exact")
        ladder = list(manifest.steps)
        message = (
            f"{manifest.name} has no rung of {ask.steps} steps; its ladder has {_listed(ladder)}"
        )
        if manifest.depth == "fixed":
            message += (
                ": the weights of this model differ by depth, so it has one rung; leave steps out"
            )
        raise ImpossibleBudget(message, param="steps", ladder=ladder)
    if ask.effort is not None:
        for rung in manifest.rungs:
            if rung.effort == ask.effort:
                return Decision(rung, full, "effort")
        efforts = {rung.effort: rung.steps for rung in manifest.rungs if rung.effort is not None}
        named = _listed([f"{word} ({steps})" for word, steps in efforts.items()])
        raise ImpossibleBudget(
            f"{manifest.name} has no rung for effort {ask.effort}; "
            + (f"its efforts, with their steps, are {named}" if efforts else "it names no efforts")
            + f"; its ladder has {_listed(list(manifest.steps))} steps",
            param="effort",
            efforts=efforts,
            ladder=list(manifest.steps),
        )
    return Decision(manifest.rung(manifest.default_steps), full, "default")


def _early(ask: Ask, allowed: float, manifest: Manifest) -> Decision:
    """Full steps, or fewer for a row whose answer is sure enough: the strictest level that fits."""
    if ask.steps is not None or ask.effort is not None:
        named = "steps" if ask.steps is not None else "effort"
        raise ImpossibleBudget(
            f"max_disagreement lets the server choose the steps, and {named} names them: send one "
            "of them",
            param="max_disagreement",
        )
    if manifest.calibration is None:
        raise NotCalibrated(
            f"{manifest.name} cannot promise how often an early answer differs: it was not "
            "calibrated for that. Leave max_disagreement out, or send steps or effort",
            param="max_disagreement",
        )
    full = manifest.rungs[-1]
    fitting = [
        level
        for level in manifest.calibration.levels
        if level.max_disagreement <= allowed and level.threshold is not None
    ]
    return Decision(full, full, "disagreement", fitting[-1] if fitting else None)


def _listed(items: list[int] | list[str]) -> str:
    return ", ".join(map(str, items))
