"""The page of the papers' experiments says what was kept, and names nothing that is not there."""

import copy
import json
import tomllib
from pathlib import Path

import pytest

from benchmarks.papers.measure import main
from benchmarks.papers.measured import Measured, read_all
from benchmarks.papers.page import PAGE, PICTURES, PUBLISHED, render
from benchmarks.papers.queue import PLAN, meaning_of, read_plan
from benchmarks.papers.screens import SCREENED, read_screens
from tests.fixtures.tiny_runs import tiny_label_run
from train.checkpoint import RECIPE, RunError
from train.recipe import recipe_from, recipe_names

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


def test_a_figure_beside_a_papers_says_what_is_not_as_there() -> None:
    groups, page = read_all(), PAGE.read_text(encoding="utf-8")
    seen = 0
    for experiment in PUBLISHED_FACTS["experiment"]:
        for name, said in experiment.get("differs", {}).items():
            assert name in experiment["runs"]
            rows = [row for row in page.splitlines() if row.startswith(f"| {name} | ")]
            assert (name in groups) == any(row.endswith(f" | {said} |") for row in rows)
            seen += name in groups
    assert seen > 20
    silent = copy.deepcopy(PUBLISHED_FACTS)
    del silent["experiment"][0]["differs"]["mnist-plain"]
    with pytest.raises(ValueError, match="mnist: mnist-plain stand beside a paper's figures"):
        render(silent, groups, read_screens(), read_all(SCREENED))


def test_claims_name_runs_that_an_experiment_has() -> None:
    named = {run for experiment in PUBLISHED_FACTS["experiment"] for run in experiment["runs"]}
    for claim in PUBLISHED_FACTS["claim"]:
        assert claim["verdict"] and {group for _, group, _ in claim["here"]} <= named


def test_what_the_queue_trains_has_a_place_on_the_page() -> None:
    named = {run for experiment in PUBLISHED_FACTS["experiment"] for run in experiment["runs"]}
    assert {job.group for job in read_plan(PLAN)} <= named


def test_a_group_that_no_experiment_names_is_refused() -> None:
    ((_, runs), *_) = read_all().items()
    with pytest.raises(ValueError, match="no experiment of published"):
        render(PUBLISHED_FACTS, {"stray": runs}, {}, {})


@pytest.mark.parametrize("runs", read_all().values(), ids=read_all())
def test_runs_of_a_group_differ_in_their_seed_only(runs: list[Measured]) -> None:
    meanings = [meaning_of(recipe_from(dict(run.recipe), run.name)) for run in runs]
    assert [one.pop("run")["seed"] for one in meanings] == [run.seed for run in runs]
    assert all(one == meanings[0] for one in meanings)
    assert runs[0].recipe["name"].removesuffix("-any") in {
        *recipe_names(),
        *(name.removesuffix("-any") for name in recipe_names()),
    }
