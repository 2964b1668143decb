"""Screens: many variants of a recipe at equal training cost, as screens.toml names them."""

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path

from train.ode import METHODS
from train.recipe import Recipe, load_recipe
from train.schedule import expected_steps, steps_of, turn_for

SCREENS = Path(__file__).parent / "screens.toml"
SCREENED = Path(__file__).parent / "screened"
_CORRECTIONS = 4  # enough for the cost to come as near as whole iterations allow
_CHECKPOINTS = 4  # of a run


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    overrides: tuple[str, ...]  # key=value


@dataclass(frozen=True, slots=True)
class Screen:
    name: str
    title: str
    recipe: str
    evaluations: int  # of the velocity, by each variant in training
    rows: int  # of the held-out ones to evaluate, 0: all
    base: tuple[str, ...]  # overrides of every variant
    variants: tuple[Variant, ...]
    note: str

    def group(self, variant: Variant) -> str:
        """What the runs of a variant are called; they differ in their seed only."""
        return f"{self.name}-{variant.name}"


def read_screens(path: Path = SCREENS) -> dict[str, Screen]:
    """The screens of a file by name."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    shared = table.get("variant", [])
    screens = {}
    for entry in table["screen"]:
        own = entry.pop("variant", [])
        variants = tuple(Variant(one["name"], tuple(one["set"])) for one in [*shared, *own])
        base = tuple(entry.pop("base", []))
        note = entry.pop("note", "")
        screens[entry["name"]] = Screen(**entry, base=base, variants=variants, note=note)
    return screens


def planned(screen: Screen, variant: Variant, seed: int, data: str = "") -> Recipe:
    """The recipe of a variant, with as many iterations as the cost of its screen allows."""
    overrides = [*screen.base, *variant.overrides]
    overrides += [f"name={screen.group(variant)}", f"run.seed={seed}"]
    recipe = load_recipe(screen.recipe, overrides, data)
    iterations = iterations_for(recipe, screen.evaluations)
    every = -(-iterations // _CHECKPOINTS)
    return dataclasses.replace(
        recipe,
        optim=dataclasses.replace(recipe.optim, iterations=iterations),
        run=dataclasses.replace(recipe.run, evaluate_every=every, checkpoint_every=every),
    )


def iterations_for(recipe: Recipe, evaluations: int) -> int:
    """How many iterations spend about so many evaluations, with the draws of the recipe's seed.

    What a schedule is expected to spend is a start; a short run may draw a few percent off it.
    """
    each = expected_steps(steps_of(recipe)) * _evaluations_a_step(recipe)
    iterations = max(1, round(evaluations / each))
    for _ in range(_CORRECTIONS):
        iterations = max(1, round(iterations * evaluations / spent(recipe, iterations)))
    return iterations


def spent(recipe: Recipe, iterations: int) -> int:
    """The velocity evaluations that a training of so many iterations goes through."""
    steps, seed = steps_of(recipe), recipe.run.seed
    turns = (turn_for(iteration, iterations, steps, seed) for iteration in range(iterations))
    return sum(sum(turn.counts) for turn in turns) * _evaluations_a_step(recipe)


def _evaluations_a_step(recipe: Recipe) -> int:
    return METHODS[recipe.steps.method].evaluations * recipe.optim.accumulate
