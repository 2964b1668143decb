"""The page of the papers' experiments says what was kept, and names nothing that is not there."""

import json
import tomllib
from pathlib import Path

import pytest

from benchmarks.papers.measure import main
from benchmarks.papers.measured import Measured, read_all
from benchmarks.papers.page import PAGE, PICTURES, PUBLISHED, render
from benchmarks.papers.screens import SCREENED, read_screens
from tests.tiny_runs import tiny_label_run
from train.checkpoint import RECIPE, RunError
from train.recipe_file import recipe_names

PUBLISHED_FACTS = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))


def test_the_page_is_what_the_script_writes() -> None:
    rendered = render(PUBLISHED_FACTS, read_all(), read_screens(), read_all(SCREENED))
    assert PAGE.read_text(encoding="utf-8") == rendered


def test_every_picture_of_the_page_is_there() -> None:
    shown = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "!["]
    names = [line.partition("(results/")[2].rstrip(")") for line in shown]
    assert names and {name for name in names} == {path.name for path in PICTURES.iterdir()}


def test_what_is_kept_can_be_read_again() -> None:
    runs = [run for group in read_all().values() for run in group]
    assert runs and all(run.points and run.evaluations > 0 for run in runs)
    assert all(run.iterations == run.recipe["optim"]["iterations"] for run in runs)
    assert len({run.name for run in runs}) == len(runs)


def test_half_a_training_is_not_measured(tmp_path: Path) -> None:
    run = tiny_label_run(tmp_path, "optim.iterations=2")
    kept = json.loads((run / RECIPE).read_text())
    kept["recipe"]["optim"]["iterations"] = 5
    (run / RECIPE).write_text(json.dumps(kept))
    with pytest.raises(RunError, match="has done 2 of 5 iterations: go on with it first"):
        main([str(run), "--steps", "1", "--results", str(tmp_path)])


def test_a_group_that_no_experiment_names_is_refused() -> None:
    ((_, runs), *_) = read_all().items()
    with pytest.raises(ValueError, match="no experiment of published"):
        render(PUBLISHED_FACTS, {"stray": runs}, {}, {})


@pytest.mark.parametrize("runs", read_all().values(), ids=read_all())
def test_runs_of_a_group_differ_in_their_seed_only(runs: list[Measured]) -> None:
    recipes = [{**run.recipe, "run": {**run.recipe["run"], "seed": 0}} for run in runs]
    assert all(recipe == recipes[0] for recipe in recipes)
    assert runs[0].recipe["name"].removesuffix("-any") in {
        *recipe_names(),
        *(name.removesuffix("-any") for name in recipe_names()),
    }
