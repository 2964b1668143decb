"""Quality of a model at one step count, with a 95 % confidence interval.

Knows batches and logits; which splits and step counts matter is the caller's business.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from train.data import Batch
from train.model import OTTransformer

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


def measure(
    logits_of: Callable[[Tensor], tuple[Tensor, float]], batches: Iterable[Batch], labelled: bool
) -> Quality:
    """Quality of anything that turns tokens into logits (and a transport cost)."""
    losses: list[Tensor] = []  # one a row: the independent units of the interval
    hits = rows = tokens = 0
    cost = 0.0
    for batch in batches:
        logits, batch_cost = logits_of(batch.tokens)
        flat = logits.float().reshape(-1, logits.shape[-1])
        each = F.cross_entropy(flat, batch.targets.reshape(-1), reduction="none")
        losses.append(each.view(len(batch.tokens), -1).mean(1))
        hits += int((flat.argmax(-1) == batch.targets.reshape(-1)).sum())
        rows += len(batch.tokens)
        tokens += batch.targets.numel()
        cost += batch_cost * len(batch.tokens)
    per_row = torch.cat(losses).double()
    loss = float(per_row.mean())
    if labelled:
        low, high = wilson(hits, rows)
        return Quality("accuracy", hits / rows, low, high, rows, loss, cost / rows)
    spread = Z95 * float(per_row.std()) / math.sqrt(rows) if rows > 1 else math.inf
    return Quality("loss", loss, loss - spread, loss + spread, tokens, loss, cost / rows)


def wilson(hits: int, rows: int) -> tuple[float, float]:
    """Wilson's interval for a share: honest near 0 and 1, unlike the normal one."""
    p, z2 = hits / rows, Z95 * Z95
    centre = (p + z2 / (2 * rows)) / (1 + z2 / rows)
    half = Z95 * math.sqrt(p * (1 - p) / rows + z2 / (4 * rows * rows)) / (1 + z2 / rows)
    return max(0.0, centre - half), min(1.0, centre + half)


def measure_model(
    model: OTTransformer, batches: Iterable[Batch], labelled: bool, steps: int, method: str
) -> Quality:
    def logits_of(tokens: Tensor) -> tuple[Tensor, float]:
        output = model(tokens, steps, method)
        return output.logits, float(output.cost)

    training = model.training
    model.eval()
    with torch.no_grad():
        quality = measure(logits_of, batches, labelled)
    model.train(training)
    return quality
