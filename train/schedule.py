"""Which step counts an iteration trains, and how far the training has come by its cost.

Everything is a function of (seed, iteration), so that a resumed run repeats it.
"""

import dataclasses
import math
import random
from dataclasses import dataclass

from train.recipe import Recipe, StepsConfig

JUMPS = 3  # a jump is trained from one of the first so many evaluations
TAIL = 0.5  # deviation of the logarithm of a count drawn by the schedule "tail"
LONGEST_TAIL = 4  # times the full count


@dataclass(frozen=True, slots=True)
class Turn:
    """What one batch goes through."""

    counts: tuple[int, ...]  # the steps of each pass; of several, the first is the full one
    distilling: bool = False  # whether answers are drawn towards the full one
    jump: int | None = None  # the evaluation of the first pass to jump to the end from
    exits: tuple[int, ...] = ()  # earlier counts of the only pass that are trained too


def expected_steps(config: StepsConfig) -> float:
    """Mean steps of a batch, all its passes together, once any count may be drawn."""
    if config.schedule == "tail":
        return config.full * math.exp(TAIL**2 / 2)
    if config.schedule == "fixed" or not config.short:
        return config.full
    if config.schedule == "sandwich":
        smallest, others = _shorter(config)
        between = [sum(others) / len(others)] if others else []
        return config.full + sum((*smallest, *between))
    mean = sum(config.short) / len(config.short)
    return config.full_probability * config.full + (1 - config.full_probability) * mean


def growing_iterations(iterations: int, config: StepsConfig) -> int:
    """How many iterations run at one step, so that they take the share `grow` of the whole cost."""
    if config.schedule == "fixed" or config.stages:
        return 0
    cheap = config.grow * expected_steps(config)
    return round(iterations * cheap / (cheap + 1 - config.grow)) if cheap else 0


def progress(iteration: int, iterations: int, config: StepsConfig) -> float:
    """The share of the training cost that is spent when an iteration starts, as expected."""
    if config.stages:
        return _progress_in_stages(iteration / iterations, config)
    grown = growing_iterations(iterations, config)
    if grown == 0:
        return iteration / iterations
    if iteration < grown:
        return config.grow * iteration / grown
    return config.grow + (1 - config.grow) * (iteration - grown) / max(1, iterations - grown)


def _progress_in_stages(done: float, config: StepsConfig) -> float:
    """The same where a share `done` of the iterations is behind."""
    spent = total = begins = 0.0
    for place, share in enumerate(config.stages):
        cost = expected_steps(_in_stage(config, place))
        total += share * cost
        spent += min(share, max(0.0, done - begins)) * cost
        begins += share
    return spent / total


def _stage(done: float, config: StepsConfig) -> StepsConfig:
    """The settings that hold once a share `done` of the iterations is behind."""
    ends = 0.0
    for place, share in enumerate(config.stages):
        ends += share
        if done < ends - 1e-9:
            return _in_stage(config, place)
    return config


def _in_stage(config: StepsConfig, place: int) -> StepsConfig:
    most = sorted({*config.short, config.full})[place]
    short = tuple(count for count in config.short if count < most)
    return dataclasses.replace(config, full=most, short=short)


def turn_for(iteration: int, iterations: int, config: StepsConfig, seed: int) -> Turn:
    """One step while growing; then what the schedule says, with jumps from where they begin."""
    if iteration < growing_iterations(iterations, config):
        return Turn((1,))
    draw = random.Random(f"{seed}/{iteration}")
    counts = _counts(_stage(iteration / iterations, config), draw)
    begun = progress(iteration, iterations, config) >= config.distil_from
    jumps = min(JUMPS, config.full - 1)  # from the last evaluation a jump is the step itself
    jump = config.jump > 0 and begun and jumps > 0 and counts[0] == config.full
    return Turn(
        counts,
        distilling=config.distil > 0 and begun,
        jump=draw.randrange(jumps) if jump else None,
        exits=tuple(count for count in config.exits if count < counts[0]),
    )


def steps_of(recipe: Recipe) -> StepsConfig:
    """The settings that apply: one depth, or a solver with steps of its own, leaves no draw."""
    steps = recipe.steps
    if recipe.model.depth == "discrete":
        return dataclasses.replace(steps, schedule="fixed", full=1, stages=(), exits=())
    if steps.solver == "adaptive":
        return dataclasses.replace(steps, schedule="fixed")
    return steps


def shortest_of(steps: StepsConfig) -> int:
    """The smallest step count that is trained."""
    counts = {steps.full, *steps.exits}
    if steps.schedule != "fixed":
        counts |= {1} if steps.grow or steps.schedule == "tail" else {*steps.short}
    return min(counts)


def ladder_of(recipe: Recipe) -> list[int]:
    """The step counts to show where none are asked for: 1, 2, 4, ... and the full one."""
    full = steps_of(recipe).full
    return [*(1 << k for k in range((full - 1).bit_length())), full]


def _counts(config: StepsConfig, draw: random.Random) -> tuple[int, ...]:
    if config.schedule == "tail":
        count = round(config.full * math.exp(draw.gauss(0.0, TAIL)))
        return (min(max(count, 1), LONGEST_TAIL * config.full),)
    if config.schedule == "fixed" or not config.short:
        return (config.full,)
    if config.schedule == "sandwich":
        smallest, others = _shorter(config)
        between = (draw.choice(others),) if others else ()
        return (config.full, *smallest, *between)
    if draw.random() < config.full_probability:
        return (config.full,)
    return (draw.choice(config.short),)


def _shorter(config: StepsConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The smallest count, and those between it and the full one."""
    counts = sorted(set(config.short) - {config.full})
    return tuple(counts[:1]), tuple(counts[1:])
