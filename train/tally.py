"""Quality of one way of answering, summed up row by row, with a 95 % confidence interval.

Without torch, so that a bundle can be measured where only its server is installed.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PerRow = npt.NDArray[np.float64]  # (R,)
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
    macro_f1: float | None = None  # of one answer a row: the mean F1 of the classes


@dataclass(frozen=True, slots=True)
class Gain:
    """How much better one way of answering is than another on the same rows."""

    better: float  # in the metric: fewer nats, or a larger share of right answers
    half: float  # of a 95 % interval of the rows

    @property
    def real(self) -> bool:
        return self.better > self.half


def gain(per_row: PerRow, others: PerRow, metric: str) -> Gain:
    """Of the second over the first; both are what each row (R,) adds to the quality."""
    apart = others - per_row if metric != "loss" else per_row - others
    return Gain(float(apart.mean()), half_interval(apart, metric))


def half_interval(apart: PerRow, metric: str) -> float:
    """Half the 95 % interval of the mean of differences (R,), row by row on the same rows.

    Of right answers never less than what no difference in so many rows leaves open.
    """
    rows = len(apart)
    if rows < 2:
        return math.inf
    half = t95(rows - 1) * float(apart.std(ddof=1)) / math.sqrt(rows)
    return half if metric == "loss" else max(half, Z95**2 / (rows + Z95**2))


def t95(freedom: int) -> float:
    """The quantile of Student's distribution for an interval of 95 %, 1 % off at most."""
    if freedom <= 2:
        return (12.706, 4.303)[freedom - 1]
    z = Z95  # a series in 1 / freedom (Cornish and Fisher)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


class Sums:
    """Quality of one way of answering, gathered batch by batch."""

    def __init__(self) -> None:
        # Of each row, the independent unit of the interval. No tensors: small ones that stay would
        # stand between the large ones of the next batches, and memory would grow to many times.
        self._losses = array("d")  # sums over what counts in it
        self._counts = array("d")
        self._hits = array("d")  # right answers
        self.pairs = Counter[tuple[int, int]]()  # of one answer a row: the class and the answer
        self._cost = 0.0

    def add_rows(
        self, losses: Iterable[float], counts: Iterable[int], hits: Iterable[int], cost: float
    ) -> None:
        """A batch: of each row its summed loss, how many positions count, how many are right."""
        before = len(self._counts)
        self._losses.extend(losses)
        self._counts.extend(counts)
        self._hits.extend(hits)
        self._cost += cost * (len(self._counts) - before)

    def per_row(self, labelled: bool) -> PerRow:
        """What each row (R,) adds to the quality, whose mean it is: what pairs are compared by."""
        counts = _numbers(self._counts)
        added: PerRow = _numbers(self._hits if labelled else self._losses) / counts.mean()
        return added

    def quality(self, labelled: bool) -> Quality:
        losses, counts = _numbers(self._losses), _numbers(self._counts)
        rows, tokens = len(counts), int(counts.sum())
        loss = float(losses.sum()) / tokens
        cost = self._cost / rows
        hits = _numbers(self._hits)
        if labelled and tokens == rows:
            right = int(hits.sum())
            low, high = wilson(right, rows)
            f1 = macro_f1(self.pairs) if self.pairs else None
            return Quality("accuracy", right / rows, low, high, rows, loss, cost, macro_f1=f1)
        if labelled:  # a label a position: positions of a row are not independent
            share = float(hits.sum()) / tokens
            spread = _spread(hits, counts)
            whole = float((hits == counts).mean())
            low, high = max(0.0, share - spread), min(1.0, share + spread)
            return Quality("accuracy", share, low, high, tokens, loss, cost, whole)
        spread = _spread(losses, counts)
        return Quality("loss", loss, loss - spread, loss + spread, tokens, loss, cost)


def _spread(sums: PerRow, counts: PerRow) -> float:
    """Half a 95 % interval of a ratio of two sums over rows (R,).

    Where all rows count alike, it is that of the mean of their means.
    """
    rows = len(sums)
    apart = (sums - sums.sum() / counts.sum() * counts) / counts.mean()
    return t95(rows - 1) * float(apart.std(ddof=1)) / math.sqrt(rows) if rows > 1 else math.inf


def _numbers(values: "array[float]") -> PerRow:
    return np.array(values, np.float64)


def macro_f1(pairs: Mapping[tuple[int, int], int]) -> float:
    """The mean F1 of the classes, of how many rows have each pair of a class and an answer.

    A class that no row has and no answer gives is left out.
    """
    right, seen = Counter[int](), Counter[int]()
    for (true, said), rows in pairs.items():
        seen[true] += rows
        seen[said] += rows
        right[true] += rows * (true == said)
    found = [2 * right[one] / both for one, both in seen.items() if both]
    return sum(found) / len(found)


def wilson(hits: int, rows: int) -> tuple[float, float]:
    """Wilson's interval for a share: honest near 0 and 1, unlike the normal one."""
    p, z2 = hits / rows, Z95 * Z95
    centre = (p + z2 / (2 * rows)) / (1 + z2 / rows)
    half = Z95 * math.sqrt(p * (1 - p) / rows + z2 / (4 * rows * rows)) / (1 + z2 / rows)
    # Rounding must not put an end on the wrong side of the share itself.
    return min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half))
