"""The loss of a batch: the task at one or several step counts, and straight trajectories.

    one count    task + lambda * penalty
    sandwich     of the task, the full count has the weight `steps.full_probability` and the shorter
                 ones share the rest, so that weights sum to 1 as elsewhere; a shorter pass learns
                 the mean of its cross-entropy (weight 1) and of its divergence from the full answer
                 (weight `steps.distil`); the penalty is that of the full pass
    exits        one pass, read out at several counts on its way: weights sum to 1 too, and an
                 earlier answer may learn from the last one as a shorter pass does
    jump         + `steps.jump` * divergence of head(x_k + (T - t_k) v_k) from the full answer

With a teacher run, the loss of every pass is a weighted sum of the cross-entropy and of the
divergence from the teacher's answer, softened by a temperature. The distance to the teacher's
states may be added.

No gradient reaches the answer that another one learns from. Which step counts a batch takes is
decided in train.recipe.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from train.data.batch import IGNORED
from train.distil import Teacher, Waypath, Waypoints, distance
from train.model import Output, Stepped
from train.ode import Observer
from train.recipe import Recipe, StepsConfig
from train.schedule import Turn


class Pass(NamedTuple):
    """One way through the model for one batch: go backward before asking for the next."""

    loss: Tensor  # (): its share of the objective
    cost: Tensor  # (): its transport cost
    evaluations: int


class JumpPoint:
    """An observer that keeps where a straight line from evaluation k ends."""

    def __init__(self, k: int, T: float) -> None:
        self.k, self.T = k, T
        self.end: Tensor | None = None

    def __call__(self, evaluation: int, t: float, x: Tensor, v: Tensor) -> None:
        if evaluation == self.k:
            self.end = x + (self.T - t) * v


class Objective:
    """The objective of a recipe for a model.

    With an original, whose weights the model began with, its full answers are the aim. A teacher is
    asked for answers that no batch brings, and for states.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Stepped,
        autocast: Callable[[], AbstractContextManager[object]],
        original: Stepped | None = None,
        teacher: Teacher | None = None,
        class_weights: Tensor | None = None,
    ) -> None:
        self.class_weights = class_weights
        self.steps, self.optim, self.learning = recipe.steps, recipe.optim, recipe.teacher
        self.model, self.autocast = model, autocast
        self.original, self.teacher = original, teacher

    def passes(
        self,
        inputs: tuple[Tensor, ...],
        targets: Tensor,
        turn: Turn,
        taught: Tensor | None = None,
    ) -> Iterator[Pass]:
        """The passes of one batch, each with the graph of its own loss only.

        Taught are the teacher's answers, if they were kept.
        """
        aim = self._aim(inputs, turn)
        lesson = self._lesson(inputs, taught)
        weights = pass_weights(len(turn.counts), self.steps.full_probability)
        for place, weight in enumerate(weights):
            made, logits = self._pass(inputs, targets, turn, place, weight, aim, lesson)
            if aim is None and len(weights) > 1:
                aim = logits
            yield made

    def _pass(
        self,
        inputs: tuple[Tensor, ...],
        targets: Tensor,
        turn: Turn,
        place: int,
        weight: float,
        aim: Tensor | None,
        lesson: "_Lesson",
    ) -> tuple[Pass, Tensor]:
        """One pass and its answer; what is not returned is let go before the next one begins."""
        jumping = place == 0 and turn.jump is not None
        count = turn.counts[place]
        point = JumpPoint(turn.jump or 0, self.model.T) if jumping else None
        reading = {"exits": turn.exits} if turn.exits else {}  # a translator has none
        with self.autocast(), Waypoints(self.model, bool(lesson.path)) as points:
            output: Output = self.model(
                *inputs,
                steps=count,
                method=self.steps.method,
                observe=_both(point, points if lesson.path else None),
                **reading,
            )
        logits = output.logits.detach()
        loss = self._task(output.logits, aim, targets, turn, lesson.logits)
        if turn.exits:
            *early, last = exit_weights(self.steps, (*turn.exits, count))
            loss = last * loss
            for share, answer in zip(early, output.early, strict=True):
                loss = loss + share * self._task(answer, logits, targets, turn, lesson.logits)
        if lesson.path:
            there = output.trajectories[-1].present
            loss = loss + self.learning.states * distance(points.path(output), lesson.path, there)
        loss = loss if weight == 1 else weight * loss
        if place == 0:
            loss = loss + self.optim.transport * penalty(output, self.optim.penalty)
        if point is not None and point.end is not None:
            with self.autocast():
                jumped = self.model.head(point.end, *output.context)
            full = logits if aim is None else aim
            loss = loss + self.steps.jump * divergence(jumped, full, targets)
        return Pass(loss, output.cost.detach(), output.evaluations), logits

    def _aim(self, inputs: tuple[Tensor, ...], turn: Turn) -> Tensor | None:
        """The original's full answer, if there is an original and anybody to learn from it."""
        if self.original is None or not (turn.distilling or turn.jump is not None):
            return None
        with torch.no_grad(), self.autocast():
            logits: Tensor = self.original(
                *inputs, steps=self.steps.full, method=self.steps.method
            ).logits
        return logits

    def _lesson(self, inputs: tuple[Tensor, ...], taught: Tensor | None) -> "_Lesson":
        if self.teacher is None:
            return _Lesson(taught, {})
        with self.autocast():
            output, path = self.teacher(*inputs)
        return _Lesson(output.logits, path if self.learning.states else {})

    def _task(
        self,
        logits: Tensor,
        aim: Tensor | None,
        targets: Tensor,
        turn: Turn,
        taught: Tensor | None,
    ) -> Tensor:
        task = task_loss(logits, targets, self.optim.smoothing, self.class_weights)
        if taught is not None:
            share, soft = self.learning.weight, self.learning.temperature
            apart = soft**2 * divergence(logits / soft, taught / soft, targets, self.class_weights)
            task = (1 - share) * task + share * apart
        if aim is None or not turn.distilling:
            return task
        weight = self.steps.distil
        apart = divergence(logits, aim, targets, self.class_weights)
        return (task + weight * apart) / (1 + weight)


class _Lesson(NamedTuple):
    """What a teacher says of a batch."""

    logits: Tensor | None
    path: Waypath  # empty where states are not compared


def _both(one: Observer | None, other: Observer | None) -> Observer | None:
    if one is None or other is None:
        return one or other

    def observe(evaluation: int, t: float, x: Tensor, v: Tensor) -> None:
        one(evaluation, t, x, v)
        other(evaluation, t, x, v)

    return observe


def pass_weights(passes: int, full_weight: float) -> list[float]:
    """Weights of the task that sum to 1; the first pass is the full one."""
    if passes == 1:
        return [1.0]
    return [full_weight, *[(1 - full_weight) / (passes - 1)] * (passes - 1)]


def exit_weights(steps: StepsConfig, counts: tuple[int, ...]) -> list[float]:
    """Weights of the task at ascending counts of one pass; they sum to 1."""
    if not steps.exit_weights:
        last, *early = pass_weights(len(counts), steps.full_probability)
        return [*early, last]
    given = dict(zip((*steps.exits, steps.full), steps.exit_weights, strict=True))
    weights = [given.get(count, steps.exit_weights[-1]) for count in counts]
    return [weight / sum(weights) for weight in weights]


def task_loss(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, weights: Tensor | None = None
) -> Tensor:
    """Mean cross-entropy in nats, per token or per row; weighted if the classes have weights."""
    each = logits.float().reshape(-1, logits.shape[-1])
    flat = targets.reshape(-1)
    if weights is None:
        return F.cross_entropy(each, flat, label_smoothing=smoothing, ignore_index=IGNORED)
    # A row has the weight of its own class, 1 in the mean of all rows. torch's own weights would
    # give what smoothing moves to a rare class the weight of that class, and so draw every row
    # towards it; and they would count a common row for more where a batch has no rare one.
    losses = F.cross_entropy(
        each, flat, label_smoothing=smoothing, ignore_index=IGNORED, reduction="none"
    )
    counted = flat != IGNORED
    return (losses * counted * weights[flat.clamp(min=0)]).sum() / counted.sum()


def divergence(
    logits: Tensor, aim: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """KL(aim || logits) in nats, the mean over the tokens or rows that count in the task.

    Weighted by the classes of the targets, as the task is, if those have weights.
    """
    classes = logits.shape[-1]
    mine = logits.float().reshape(-1, classes).log_softmax(-1)
    theirs = aim.float().reshape(-1, classes).log_softmax(-1)
    each = F.kl_div(mine, theirs, reduction="none", log_target=True).sum(-1)  # (B*N,) or (B,)
    flat = targets.reshape(-1)
    counted = (flat != IGNORED).float()
    if weights is not None:
        each = each * weights[flat.clamp(min=0)]
    return (each * counted).sum() / counted.sum()


def penalty(output: Output, kind: str) -> Tensor:
    """What lambda weighs: the transport cost, its excess, or the mean of it a unit of time."""
    if kind == "speed":
        return output.cost / sum(trajectory.T for trajectory in output.trajectories)
    return output.cost if kind == "transport" else straightness_gap(output)


def straightness_gap(output: Output) -> Tensor:
    """sum h |v|^2 - |x_T - x_0|^2 / T, means over elements: zero for straight, even paths."""
    least = torch.stack([trajectory.least for trajectory in output.trajectories]).sum()
    return output.cost - least
