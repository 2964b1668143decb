"""What a batch is trained on: how many steps it takes, and task loss + lambda * transport cost.

The step count of an iteration is a function of (seed, iteration), so a resumed run repeats it.
"""

import random

import torch.nn.functional as F
from torch import Tensor

from train.config import StepsConfig
from train.model import Output


def expected_steps(config: StepsConfig) -> float:
    """Mean steps of a batch once any count may be drawn."""
    shorter = sum(config.short) / len(config.short)
    return config.full_probability * config.full + (1 - config.full_probability) * shorter


def growing_iterations(iterations: int, config: StepsConfig) -> int:
    """How many iterations run at one step, so that they take the share `grow` of the whole cost."""
    if config.schedule == "fixed":
        return 0
    cheap = config.grow * expected_steps(config)
    return round(iterations * cheap / (cheap + 1 - config.grow)) if cheap else 0


def progress(iteration: int, iterations: int, config: StepsConfig) -> float:
    """The share of the training cost that is spent when an iteration starts, as expected."""
    grown = growing_iterations(iterations, config)
    if grown == 0:
        return iteration / iterations
    if iteration < grown:
        return config.grow * iteration / grown
    return config.grow + (1 - config.grow) * (iteration - grown) / max(1, iterations - grown)


def steps_for(iteration: int, iterations: int, config: StepsConfig, seed: int) -> int:
    """One step while growing, then the full count with its probability, else a shorter one."""
    if config.schedule == "fixed":
        return config.full
    if iteration < growing_iterations(iterations, config):
        return 1
    draw = random.Random(f"{seed}/{iteration}")
    if draw.random() < config.full_probability:
        return config.full
    return draw.choice(config.short)


def task_loss(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats, per token or per row."""
    classes = logits.shape[-1]
    return F.cross_entropy(
        logits.float().view(-1, classes), targets.reshape(-1), label_smoothing=smoothing
    )


def objective(output: Output, targets: Tensor, transport: float, smoothing: float) -> Tensor:
    return task_loss(output.logits, targets, smoothing) + transport * output.cost
