"""Quality of a model at one step count, with a 95 % confidence interval, and how straight it
moves.
"""

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.data.batch import IGNORED, Batch
from train.model import Output, Stepped

Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class Quality:
    metric: str  # "loss" in nats a token, or "accuracy"
    value: float
    low: float
    high: float
    samples: int  # tokens, or rows
    loss: float  # cross-entropy, whatever the metric
    cost: float  # transport cost; 0 where it was not computed
    whole: float | None = None  # of several answers a row: the share of rows that are right in all


@dataclass(frozen=True, slots=True)
class Gain:
    """How much better one way of answering is than another on the same rows."""

    better: float  # in the metric: fewer nats, or a larger share of right answers
    half: float  # of a 95 % interval of the rows

    @property
    def real(self) -> bool:
        return self.better > self.half


def gain(per_row: Tensor, others: Tensor, metric: str) -> Gain:
    """Of the second over the first; both are what each row (R,) adds to the quality."""
    apart = others - per_row if metric != "loss" else per_row - others
    spread = Z95 * float(apart.std()) / math.sqrt(len(apart)) if len(apart) > 1 else math.inf
    return Gain(float(apart.mean()), spread)


class Tally:
    """Quality of one way of answering, gathered batch by batch."""

    def __init__(self) -> None:
        # Of each row, the independent unit of the interval. No tensors: small ones that stay would
        # stand between the large ones of the next batches, and memory would grow to many times.
        self._losses = array("d")  # sums over what counts in it
        self._counts = array("d")
        self._hits = array("d")  # right answers
        self._rows = 0
        self._cost = 0.0

    def add(self, batch: Batch, logits: Tensor, cost: float) -> None:
        flat, targets = logits.float().reshape(-1, logits.shape[-1]), batch.targets.reshape(-1)
        each = F.cross_entropy(flat, targets, reduction="none", ignore_index=IGNORED)
        counted = (batch.targets != IGNORED).view(batch.rows, -1)
        hits = (flat.argmax(-1) == targets).view(batch.rows, -1)
        self._losses.extend(each.view(batch.rows, -1).sum(1).tolist())
        self._counts.extend(counted.sum(1).tolist())
        self._hits.extend(hits.sum(1).tolist())
        self._rows += batch.rows
        self._cost += cost * batch.rows

    def per_row(self, labelled: bool) -> Tensor:
        """What each row (R,) adds to the quality, whose mean it is: what pairs are compared by."""
        counts = _tensor(self._counts)
        return _tensor(self._hits if labelled else self._losses) / counts.mean()

    def quality(self, labelled: bool) -> Quality:
        losses, counts = _tensor(self._losses), _tensor(self._counts)
        rows, tokens = self._rows, int(counts.sum())
        loss = float(losses.sum()) / tokens
        cost = self._cost / rows
        hits = _tensor(self._hits)
        if labelled and tokens == rows:
            right = int(hits.sum())
            low, high = wilson(right, rows)
            return Quality("accuracy", right / rows, low, high, rows, loss, cost)
        if labelled:  # a label a position: positions of a row are not independent
            share = float(hits.sum()) / tokens
            spread = _spread(hits, counts)
            whole = float((hits == counts).double().mean())
            low, high = max(0.0, share - spread), min(1.0, share + spread)
            return Quality("accuracy", share, low, high, tokens, loss, cost, whole)
        spread = _spread(losses, counts)
        return Quality("loss", loss, loss - spread, loss + spread, tokens, loss, cost)


def _spread(sums: Tensor, counts: Tensor) -> float:
    """Half a 95 % interval of a ratio of two sums over rows (R,).

    Where all rows count alike, it is that of the mean of their means.
    """
    rows = len(sums)
    apart = (sums - sums.sum() / counts.sum() * counts) / counts.mean()
    return Z95 * float(apart.std()) / math.sqrt(rows) if rows > 1 else math.inf


def _tensor(values: "array[float]") -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def measure(
    logits_of: Callable[[Batch], tuple[Tensor, float]], batches: Iterable[Batch], labelled: bool
) -> Quality:
    """Quality of anything that turns inputs into logits (and a transport cost)."""
    tally = Tally()
    for batch in batches:
        tally.add(batch, *logits_of(batch))
    return tally.quality(labelled)


def wilson(hits: int, rows: int) -> tuple[float, float]:
    """Wilson's interval for a share: honest near 0 and 1, unlike the normal one."""
    p, z2 = hits / rows, Z95 * Z95
    centre = (p + z2 / (2 * rows)) / (1 + z2 / rows)
    half = Z95 * math.sqrt(p * (1 - p) / rows + z2 / (4 * rows * rows)) / (1 + z2 / rows)
    # Rounding must not put an end on the wrong side of the share itself.
    return min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half))


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


# How straight and how stable a model's trajectories are: what `evaluate` shows beside quality.
# Trajectories of an ideal model are straight and run at constant speed; then one evaluation and a
# jump to the end give the answer of any number of steps.


class Trail:
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
        """Mean squares of each step's displacement, leg by leg; a leg not observed is one step."""
        moved = []
        starts = self.starts or [leg.start for leg in output.legs]
        before = self.moved or [[] for _ in output.legs]
        for squares, start, leg in zip(before, starts, output.legs, strict=True):
            for each in (*squares, _squares(leg.end - start)):  # (B, N)
                kept = each if leg.present is None else each[leg.present]
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
    """Theorem 2, "Stable Forward Propagation", of the journal version of OT-Transformer.

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
    pool = getattr(model.head, "pool", None)
    read = positions if pool in ("first", "max") else 1
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
