"""Any step count for a run that was trained at one: fine-tuning with itself as the teacher.

Every batch is run at the full count, at the smallest and at one in between. All of them learn the
task and the answers of the frozen original at full steps, and jumps from the first evaluations are
trained too. With the dial of time one pass is read out at every count, and there are no jumps. It
is an ordinary training run with a recipe made here, and resumes like one.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any

from train.checkpoint import MODEL, STATE, RunError, iteration_of, read_facts
from train.loop import train
from train.recipe import Recipe, StepsConfig, apply_override, data_at, overridden, recipe_from

DISTIL, JUMP = 1.0, 0.3


def retrofit(
    run: Path,
    folder: Path,
    share: float = 0.25,
    overrides: list[str] | None = None,
    data: str = "",
    quiet: bool = True,
) -> Recipe:
    """Fine-tune a run into another folder; the recipe that this took."""
    if folder.resolve() == run.resolve():
        raise RunError(f"{folder} is the run itself: choose another --out")
    kept = read_facts(run)["recipe"]
    begun = (folder / STATE).is_file()  # meanwhile the original may have gone on
    origin = read_facts(folder).get("origin") if begun else None
    trained = origin["iteration"] if origin else iteration_of(run / MODEL)
    recipe = retrofit_recipe(kept, str(run), share, overrides or [], data, trained)
    train(recipe, folder, quiet, origin=run)
    return recipe


def retrofit_recipe(
    kept: dict[str, Any],
    where: str,
    share: float,
    overrides: list[str],
    data: str = "",
    trained: int | None = None,
) -> Recipe:
    """The recipe of a run as one that fine-tunes it for a share of what it was trained.

    `trained` are the iterations of that; None for all of its recipe.
    """
    original = recipe_from(kept, where)
    reason = _refusal(original)
    if reason:
        raise RunError(f"{where} cannot be retrofitted: {reason}")
    if not 0 < share <= 1:
        raise RunError(f"--iterations {share}: give a share of the original iterations, up to 1")
    steps, optim = original.steps, original.optim
    iterations = max(1, round(share * (trained or optim.iterations)))
    wanted = steps.short or StepsConfig().short  # a run of fixed steps may name no others
    short = tuple(sorted({*(count for count in wanted if count < steps.full), 1}))
    changed = copy.deepcopy(kept)
    for override in overrides:
        apply_override(changed, override)
    timed = changed["steps"].get("dial") == "time"  # which decides what else is set below
    in_time = timed or steps.backprop > 0
    in_one = timed and original.model.family != "translator"
    table = dataclasses.replace(
        original,
        name=original.name[:60] + "-any",
        steps=dataclasses.replace(
            steps,
            dial="time" if timed else "resolution",
            schedule="fixed" if in_one else "sandwich",
            short=short,
            exits=short if in_one else (),
            exit_weights=(),
            stages=(),
            grow=0.0,
            distil=DISTIL,
            jump=JUMP if original.model.depth == "ode" and not in_time else 0.0,
            distil_from=0.0,
        ),
        optim=dataclasses.replace(
            optim,
            iterations=iterations,
            epochs=0.0,
            schedule="cosine",
            drops=(),
            warmup=min(optim.warmup, iterations // 10),
        ),
    ).to_json()
    recipe = data_at(overridden(table, overrides, where), data)
    if recipe.model != original.model:
        raise RunError("--set model...: a retrofit keeps the model; train a new one instead")
    return recipe


def _refusal(recipe: Recipe) -> str:
    """Why a run has no shorter answers to train, if so."""
    if recipe.model.depth == "discrete":
        return (
            'its weights differ by depth (model.depth is "discrete"), so it has one depth only: '
            'train it again with model.depth "ode"'
        )
    if recipe.steps.solver == "adaptive":
        return "its solver chose the steps itself, so there is no full count to teach"
    if recipe.optim.endings:
        return "its shorter answers have endings of their own, which have learnt them already"
    if recipe.steps.full == 1:
        return "it was trained at one step, so there is no fuller answer to teach"
    return ""
