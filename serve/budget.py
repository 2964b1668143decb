"""Budgets: from what a request asks for to one rung of the model's ladder, or to several.

The same ask and the same ladder give the same decision. Load and time do not count here: where
they matter, the decision lists the rungs that the server may choose from. `Ask` and `Decision` are
tuples because every request makes one of each.
"""

from typing import Literal, NamedTuple

from serve.bundle import EFFORTS, Effort, Level, Manifest, Rung, steps_in_words
from serve.errors import ImpossibleBudget, NotCalibrated, StepsForbidden

Reason = Literal["exact", "effort", "disagreement", "deadline", "load", "default"]


class Ask(NamedTuple):
    """What a request says about its budget."""

    steps: int | None = None
    effort: Effort | None = None
    max_disagreement: float | None = None
    deadline_ms: float | None = None
    min_steps: int | None = None
    max_steps: int | None = None


class Decision(NamedTuple):
    """The rung that serves a request, or the best of those that may, and why."""

    rung: Rung
    full: Rung
    reason: Reason
    level: Level | None = None  # of early answers; None: all steps of the rung are taken
    choices: tuple[Rung, ...] = ()  # ascending, up to `rung`; empty: the server has no choice

    @property
    def steps(self) -> int:
        return self.rung.steps

    @property
    def threshold(self) -> float | None:
        """How far ahead an early answer must be, if there may be one."""
        return None if self.level is None else self.level.threshold

    @property
    def step_choices(self) -> tuple[int, ...]:
        return tuple(rung.steps for rung in self.choices)

    def served_at(self, steps: int) -> "Decision":
        """What became of it: the rung that the server chose, and why it was not the best."""
        if steps == self.steps:
            return self
        rung = next(rung for rung in self.choices if rung.steps == steps)
        reason: Reason = "deadline" if self.reason == "deadline" else "load"
        return self._replace(rung=rung, reason=reason)


def decide(ask: Ask, manifest: Manifest) -> Decision:
    """The rung for this ask; ImpossibleBudget, naming the ladder, where there is none."""
    full = manifest.rungs[-1]
    if ask.steps is not None and ask.effort is not None:
        raise ImpossibleBudget(
            "steps and effort both name a rung: send one of them", param="effort"
        )
    _check_limits(ask)
    if ask.max_disagreement is not None:
        return _early(ask, ask.max_disagreement, manifest)
    if ask.steps is not None:
        return Decision(_within(ask, _rung_of(ask.steps, manifest), "steps"), full, "exact")
    if ask.effort is not None:
        named = efforts_of(manifest)[ask.effort]
        return Decision(_within(ask, named, "effort"), full, "effort")
    allowed = _allowed(ask, manifest)
    if ask.deadline_ms is not None:
        return Decision(allowed[-1], full, "deadline", choices=allowed)
    usual = [rung for rung in allowed if rung.steps <= manifest.default_steps] or allowed[:1]
    return Decision(usual[-1], full, "default", choices=tuple(usual))


def decide_within(ask: Ask, manifest: Manifest, most: int | None) -> Decision:
    """The same for a caller who may have so many steps at most; StepsForbidden beyond them.

    Where the server chooses, it chooses among those.
    """
    if most is None:
        return decide(ask, manifest)
    capped = ask
    if ask.steps is None and ask.effort is None and ask.max_disagreement is None:
        limit = most if ask.max_steps is None else min(most, ask.max_steps)
        if any((ask.min_steps or 1) <= rung.steps <= limit for rung in manifest.rungs):
            capped = ask._replace(max_steps=limit)
    decision = decide(capped, manifest)
    if decision.steps > most:
        named = next(
            (
                field
                for field in ("steps", "effort", "max_disagreement", "min_steps")
                if getattr(ask, field) is not None
            ),
            "steps",
        )
        raise StepsForbidden(
            f"this asks for {steps_in_words(decision.steps)}, and the API key may have {most} at "
            "most: ask for fewer",
            param=named,
            max_steps=most,
        )
    return decision


def _rung_of(steps: int, manifest: Manifest) -> Rung:
    for rung in manifest.rungs:
        if rung.steps == steps:
            return rung
    ladder = list(manifest.steps)
    wanted = steps_in_words(steps)
    message = f"{manifest.name} has no rung of {wanted}; its ladder has {_listed(ladder)}"
    if manifest.depth == "fixed":
        message += (
            ": the weights of this model differ by depth, so it has one rung; leave steps out"
        )
    raise ImpossibleBudget(message, param="steps", ladder=ladder)


def efforts_of(manifest: Manifest) -> dict[Effort, Rung]:
    """The rung for each of the four words of effort, in any model.

    A word that the bundle gives to no rung means the nearest word that it does give, of two as
    near the greater. Where the bundle names no rung at all, the words are spread over the rungs
    that are worth asking for: those that no rung with fewer steps equals.
    """
    named = {rung.effort: rung for rung in manifest.rungs if rung.effort is not None}
    if named:
        return {
            word: named[min(named, key=lambda name: _distance(name, rank))]
            for rank, word in enumerate(EFFORTS)
        }
    worthwhile = [rung for rung in manifest.rungs if not rung.dominated] or list(manifest.rungs)
    last = len(worthwhile) - 1
    return {
        word: worthwhile[(2 * rank * last + len(EFFORTS) - 1) // (2 * (len(EFFORTS) - 1))]
        for rank, word in enumerate(EFFORTS)
    }


def _distance(name: Effort, rank: int) -> tuple[int, int]:
    """How far a word is from the one of this rank; of two as far, the greater comes first."""
    found = EFFORTS.index(name)
    return abs(found - rank), -found


def _check_limits(ask: Ask) -> None:
    if ask.min_steps is not None and ask.max_steps is not None and ask.min_steps > ask.max_steps:
        raise ImpossibleBudget(
            f"min_steps is {ask.min_steps} and max_steps {ask.max_steps}: the least is above the "
            "most",
            param="min_steps",
        )


def _within(ask: Ask, rung: Rung, named: str) -> Rung:
    """A rung that the caller named, if the limits that came with it allow it."""
    for field, broken in (
        ("min_steps", ask.min_steps is not None and rung.steps < ask.min_steps),
        ("max_steps", ask.max_steps is not None and rung.steps > ask.max_steps),
    ):
        if broken:
            raise ImpossibleBudget(
                f"{named} asks for {steps_in_words(rung.steps)}, which {field} forbids: leave "
                f"{field} out",
                param=field,
            )
    return rung


def _allowed(ask: Ask, manifest: Manifest) -> tuple[Rung, ...]:
    """The rungs between the limits, ascending."""
    if ask.min_steps is None and ask.max_steps is None:
        return manifest.rungs
    allowed = tuple(
        rung
        for rung in manifest.rungs
        if (ask.min_steps is None or rung.steps >= ask.min_steps)
        and (ask.max_steps is None or rung.steps <= ask.max_steps)
    )
    if allowed:
        return allowed
    ladder = list(manifest.steps)
    raise ImpossibleBudget(
        f"{manifest.name} has no rung within min_steps and max_steps; its ladder has "
        f"{_listed(ladder)}",
        param="max_steps" if ask.min_steps is None else "min_steps",
        ladder=ladder,
    )


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
    if ask.max_steps is not None and ask.max_steps < full.steps:
        raise ImpossibleBudget(
            f"max_disagreement is measured against {full.steps} steps, which an answer that is "
            f"not sure must take: max_steps cannot be below {full.steps}",
            param="max_steps",
        )
    if ask.min_steps is not None and ask.min_steps > full.steps:
        _allowed(ask, manifest)
    if ask.min_steps is not None and 1 < ask.min_steps < full.steps:
        raise ImpossibleBudget(
            "max_disagreement is certified for answers that may stop after any step: send "
            f"min_steps as 1 or {full.steps}, or leave it out",
            param="min_steps",
        )
    fitting = [
        level
        for level in manifest.calibration.levels
        if level.max_disagreement <= allowed and level.threshold is not None
    ]
    if ask.min_steps == full.steps > 1:
        fitting = []
    return Decision(full, full, "disagreement", fitting[-1] if fitting else None)


def _listed(items: list[int] | list[str]) -> str:
    return ", ".join(map(str, items))
