"""Quality of a model at one step count, with a 95 % confidence interval.

Knows batches and logits; which splits and step counts matter is the caller's business.
"""

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from train.batch import IGNORED, Batch
from train.model import Stepped

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
