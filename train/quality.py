"""Quality of a model at one step count, and how straight and stable its trajectories are."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.data.batch import IGNORED, Batch
from train.model import Output, Stepped
from train.tally import Quality, Sums


class Tally(Sums):
    """The sums of batches that a model has answered."""

    def add(self, batch: Batch, logits: Tensor, cost: float) -> None:
        flat, targets = logits.float().reshape(-1, logits.shape[-1]), batch.targets.reshape(-1)
        each = F.cross_entropy(flat, targets, reduction="none", ignore_index=IGNORED)
        counted = (batch.targets != IGNORED).view(batch.rows, -1)
        answers = flat.argmax(-1)
        if batch.targets.dim() == 1:
            self.pairs.update(zip(targets.tolist(), answers.tolist(), strict=True))
        hits = (answers == targets).view(batch.rows, -1)
        losses = each.view(batch.rows, -1)
        self.add_rows(losses.sum(1).tolist(), counted.sum(1).tolist(), hits.sum(1).tolist(), cost)


def measure(
    logits_of: Callable[[Batch], tuple[Tensor, float]], batches: Iterable[Batch], labelled: bool
) -> Quality:
    """Quality of anything that turns inputs into logits (and a transport cost)."""
    tally = Tally()
    for batch in batches:
        tally.add(batch, *logits_of(batch))
    return tally.quality(labelled)


def measure_model(
    model: Stepped, batches: Iterable[Batch], labelled: bool, steps: int, method: str
) -> Quality:
    def logits_of(batch: Batch) -> tuple[Tensor, float]:
        output = model(*batch.inputs, steps=steps, method=method)
        return output.logits, float(output.cost)

    training = model.training
    model.eval()
    with torch.no_grad():
        quality = measure(logits_of, batches, labelled)
    model.train(training)
    return quality


# How straight and how stable a model's trajectories are. Those of an ideal model are straight lines
# at constant speed: then one evaluation and a jump to the end give the answer of any step count.


class StepRecorder:
    """An observer that keeps how far each step moves the state, and some jumps to the end."""

    def __init__(self, T: float, jumps: tuple[int, ...] = ()) -> None:
        self.T, self.wanted = T, jumps
        self.moved: list[list[Tensor]] = []  # of each trajectory, squares (B, N) of its steps
        self.starts: list[Tensor] = []  # of each trajectory, where its latest step began
        self.jumps: dict[int, Tensor] = {}  # by evaluations spent: x_k + (T - t_k) v_k

    def __call__(self, evaluation: int, t: float, x: Tensor, v: Tensor) -> None:
        if evaluation == 0:
            self.moved.append([])
            self.starts.append(x)
        else:
            # States themselves would fill the memory: a path may have hundreds of steps.
            self.moved[-1].append(_squares(x - self.starts[-1]))
            self.starts[-1] = x
        if evaluation + 1 in self.wanted:
            self.jumps[evaluation + 1] = x + (self.T - t) * v

    def displacements(self, output: Output) -> list[float]:
        """Mean squares of each step's displacement, one trajectory after another.

        A trajectory that was not observed counts as one step.
        """
        moved = []
        starts = self.starts or [trajectory.start for trajectory in output.trajectories]
        before = self.moved or [[] for _ in output.trajectories]
        for squares, start, trajectory in zip(before, starts, output.trajectories, strict=True):
            for each in (*squares, _squares(trajectory.end - start)):  # (B, N)
                kept = each if trajectory.present is None else each[trajectory.present]
                moved.append(float(kept.mean()))
        return moved


def _squares(change: Tensor) -> Tensor:
    """The mean square (B, N) of each position of a change of state (B, N, D)."""
    return change.float().square().mean(-1)


@dataclass(frozen=True, slots=True)
class Stability:
    """lambda beside what it must exceed for outputs that are proven to be stable."""

    transport: float  # lambda
    squared_norm: float  # L^2, L the largest singular value of the output weights
    threshold: float  # T L^2
    ratio: float  # lambda / (T L^2)
    strict_ratio: float  # the same with lambda in the norms of the theorem


def stability(model: Stepped, transport: float, positions: int = 1) -> Stability:
    """Theorem 2, "Stable Forward Propagation", of the second OT-Transformer paper.

    It assumes lambda > T L^2, with T the terminal time and L the 2-operator norm of the weights of
    the output layer, and bounds the distance of two outputs by
    (1 - T L^2 / lambda)^-1 (L |X_1(0) - X_2(0)| + T L^2 / lambda |y_1 - y_2|).

    There the cost is lambda/2 times sums of squares, here (as in the code released with it) lambda
    times their mean over N positions and D channels. Where the task is a mean over positions too,
    or the head reads their mean, N cancels and lambda means 2 lambda / D in the theorem: the strict
    ratio. A head that reads one position of N, the first or in each channel the largest, has
    outputs that move as far as that one position does: there lambda means 2 lambda / (N D), with
    the `positions` that were measured, the most of any batch. A norm before the output weights is
    outside the theorem, and is not counted, nor are layers before them.
    """
    weights = output_weights(model.head)
    norm = float(torch.linalg.matrix_norm(weights.detach().float(), 2))
    threshold = model.T * norm**2
    pools = {getattr(module, "pool", None) for module in model.head.modules()}  # behind a coda too
    read = positions if pools & {"first", "max"} else 1
    strict = 2 * transport / (weights.shape[1] * read)
    return Stability(transport, norm**2, threshold, transport / threshold, strict / threshold)


def output_weights(head: nn.Module) -> Tensor:
    """The weights (classes, D) of the last linear layer of a head."""
    linear = [module for module in head.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError("the head has no linear layer to measure")
    return linear[-1].weight


def agreement(logits: Tensor, others: Tensor, targets: Tensor) -> tuple[int, int]:
    """How many answers are the same in both, and how many there are."""
    counted = targets != IGNORED
    same = (logits.argmax(-1) == others.argmax(-1)) & counted
    return int(same.sum()), int(counted.sum())
