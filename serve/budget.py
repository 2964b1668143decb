"""Budgets: which step counts of the ladder may serve a request.

The same request and the same ladder always give the same decision. Where load or time matter, the
decision names the step counts from which the server chooses later. Requests and decisions are named
tuples, because every request makes one of each.
"""

from typing import Literal, NamedTuple

from serve.bundle import EFFORTS, Effort, Level, Manifest, Rung, steps_in_words
from serve.errors import ImpossibleBudget, NotCalibrated, StepsForbidden

Reason = Literal["exact", "effort", "disagreement", "deadline", "load", "default"]


class BudgetRequest(NamedTuple):
    """The budget fields of a request."""

    steps: int | None = None
    effort: Effort | None = None
    max_disagreement: float | None = None
    deadline_ms: float | None = None
    min_steps: int | None = None
    max_steps: int | None = None


class Decision(NamedTuple):
    """The rung that serves a request, or the best of those that may, and the reason."""

    rung: Rung
    full: Rung
    reason: Reason
    level: Level | None = None  # for early answers; None: every row takes all steps
    choices: tuple[Rung, ...] = ()  # ascending, the last is `rung`; empty: the server has no choice

    @property
    def steps(self) -> int:
        return self.rung.steps

    @property
    def threshold(self) -> float | None:
        """How certain an answer must be to stop early; None if none may."""
        return None if self.level is None else self.level.threshold

    @property
    def step_choices(self) -> tuple[int, ...]:
        return tuple(rung.steps for rung in self.choices)

    def served_at(self, steps: int) -> "Decision":
        """The decision after the server chose a rung, with the reason if it was not the best."""
        if steps == self.steps:
            return self
        rung = next(rung for rung in self.choices if rung.steps == steps)
        reason: Reason = "deadline" if self.reason == "deadline" else "load"
        return self._replace(rung=rung, reason=reason)


def decide(request: BudgetRequest, manifest: Manifest) -> Decision:
    """The rung for this request; ImpossibleBudget, naming the ladder, if there is none."""
    full = manifest.rungs[-1]
    if request.steps is not None and request.effort is not None:
        raise ImpossibleBudget(
            "steps and effort both name a step count: send one of them", param="effort"
        )
    _check_limits(request)
    if request.max_disagreement is not None:
        return _early(request, request.max_disagreement, manifest)
    if request.steps is not None:
        return Decision(_within(request, _rung_of(request.steps, manifest), "steps"), full, "exact")
    if request.effort is not None:
        named = efforts_of(manifest)[request.effort]
        return Decision(_within(request, named, "effort"), full, "effort")
    allowed = _allowed(request, manifest)
    if request.deadline_ms is not None:
        return Decision(allowed[-1], full, "deadline", choices=allowed)
    usual = [rung for rung in allowed if rung.steps <= manifest.default_steps] or allowed[:1]
    return Decision(usual[-1], full, "default", choices=tuple(usual))


def decide_within(request: BudgetRequest, manifest: Manifest, most: int | None) -> Decision:
    """Like `decide`, for an API key with a limit on steps; StepsForbidden above it.

    Where the server chooses, it stays below the limit.
    """
    if most is None:
        return decide(request, manifest)
    capped = request
    if request.steps is None and request.effort is None and request.max_disagreement is None:
        limit = most if request.max_steps is None else min(most, request.max_steps)
        if any((request.min_steps or 1) <= rung.steps <= limit for rung in manifest.rungs):
            capped = request._replace(max_steps=limit)
    decision = decide(capped, manifest)
    if decision.steps > most:
        named = next(
            (
                field
                for field in ("steps", "effort", "max_disagreement", "min_steps")
                if getattr(request, field) is not None
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
    message = f"{manifest.name} does not offer {wanted}; it has {_listed(ladder)}"
    if manifest.depth == "fixed":
        message += (
            ": the weights of this model differ by depth, so it has one step count; leave steps out"
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


def _check_limits(request: BudgetRequest) -> None:
    if (
        request.min_steps is not None
        and request.max_steps is not None
        and request.min_steps > request.max_steps
    ):
        raise ImpossibleBudget(
            f"min_steps is {request.min_steps} and max_steps {request.max_steps}: the least is "
            "above the most",
            param="min_steps",
        )


def _within(request: BudgetRequest, rung: Rung, named: str) -> Rung:
    """The rung that the caller named, unless min_steps or max_steps forbid it."""
    for field, broken in (
        ("min_steps", request.min_steps is not None and rung.steps < request.min_steps),
        ("max_steps", request.max_steps is not None and rung.steps > request.max_steps),
    ):
        if broken:
            raise ImpossibleBudget(
                f"{named} asks for {steps_in_words(rung.steps)}, which {field} forbids: leave "
                f"{field} out",
                param=field,
            )
    return rung


def _allowed(request: BudgetRequest, manifest: Manifest) -> tuple[Rung, ...]:
    """The rungs between min_steps and max_steps, ascending."""
    if request.min_steps is None and request.max_steps is None:
        return manifest.rungs
    allowed = tuple(
        rung
        for rung in manifest.rungs
        if (request.min_steps is None or rung.steps >= request.min_steps)
        and (request.max_steps is None or rung.steps <= request.max_steps)
    )
    if allowed:
        return allowed
    ladder = list(manifest.steps)
    raise ImpossibleBudget(
        f"{manifest.name} has no step count within min_steps and max_steps; it has "
        f"{_listed(ladder)}",
        param="max_steps" if request.min_steps is None else "min_steps",
        ladder=ladder,
    )


def _early(request: BudgetRequest, allowed: float, manifest: Manifest) -> Decision:
    """Full steps, with early stopping at the strictest certified level that is allowed."""
    if request.steps is not None or request.effort is not None:
        named = "steps" if request.steps is not None else "effort"
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
    if request.max_steps is not None and request.max_steps < full.steps:
        raise ImpossibleBudget(
            f"max_disagreement is measured against {full.steps} steps, which an answer that is "
            f"not sure must take: max_steps cannot be below {full.steps}",
            param="max_steps",
        )
    if request.min_steps is not None and request.min_steps > full.steps:
        _allowed(request, manifest)
    if request.min_steps is not None and 1 < request.min_steps < full.steps:
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
    if request.min_steps == full.steps > 1:
        fitting = []
    return Decision(full, full, "disagreement", fitting[-1] if fitting else None)


def _listed(items: list[int] | list[str]) -> str:
    return ", ".join(map(str, items))
