"""Screens: variants are valid and cost the same, are trained once, and the page tells the best."""

import dataclasses
import re
from pathlib import Path

import pytest

from benchmarks.papers import again
from benchmarks.papers import screen as command
from benchmarks.papers.measured import Measured
from benchmarks.papers.page import render
from benchmarks.papers.screens import Screen, Variant, planned, read_screens, spent
from tests.fixtures.tiny_runs import TINY
from train.ode import METHODS

pytestmark = pytest.mark.long

SCREENS = read_screens()
NO_PAPERS: dict[str, list[str]] = {"experiment": []}
TRIED = Screen(
    name="tried",
    title="a tiny parity",
    recipe="parity",
    evaluations=80,
    rows=1,
    base=(*TINY, "data.rows=400"),
    variants=(
        Variant("sandwich", ("steps.schedule=sandwich", "steps.distil=1", "steps.grow=0.3")),
        Variant("one", ("steps.schedule=fixed", "steps.full=1", "steps.short=[1]")),
        Variant("wild", ("optim.lr=1e30", "optim.warmup=0", "optim.clip=1e30")),
    ),
    note="",
)


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Measured], Path]:
    folder = tmp_path_factory.mktemp("screen")
    runs = [
        command.run(TRIED, one, 0, "", folder / "runs", folder / "kept") for one in TRIED.variants
    ]
    return runs, folder


@pytest.mark.parametrize("screen", SCREENS.values(), ids=SCREENS)
def test_variants_differ_and_cost_the_same(screen: Screen) -> None:
    recipes = [planned(screen, one, 0) for one in screen.variants]
    assert len({recipe.name for recipe in recipes}) == len(recipes) > 10
    for recipe in recipes:
        cost = spent(recipe, recipe.optim.iterations)
        assert cost == pytest.approx(screen.evaluations, rel=0.03), recipe.name
        assert recipe.optim.warmup < recipe.optim.iterations / 2
    assert {recipe.steps.full for recipe in recipes} == {1, command.STEPS[-1]}


def test_a_schedule_costs_what_it_goes_through_and_other_seeds_as_much() -> None:
    screen = SCREENS["characters"]
    (half,) = (one for one in screen.variants if one.name == "full-half")
    for seed in range(3):
        recipe = planned(screen, half, seed)
        assert recipe.run.seed == seed
        assert spent(recipe, recipe.optim.iterations) == pytest.approx(1500, rel=0.02)
    midpoint = dataclasses.replace(
        recipe, steps=dataclasses.replace(recipe.steps, method="midpoint")
    )
    assert spent(midpoint, 10) == 2 * spent(recipe, 10)


def test_what_was_planned_is_what_training_spends(tried: tuple[list[Measured], Path]) -> None:
    runs, _ = tried
    for run, variant in zip(runs[:2], TRIED.variants, strict=False):
        recipe = planned(TRIED, variant, 0)
        assert run.evaluations == spent(recipe, run.iterations) == pytest.approx(80, abs=4)
        assert run.iterations == recipe.optim.iterations


def test_every_method_is_kept_at_every_count_with_the_jumps(
    tried: tuple[list[Measured], Path],
) -> None:
    sandwich = tried[0][0]
    ways = {(point.method, point.steps) for point in sandwich.points}
    assert ways == {(method, count) for method in METHODS for count in command.STEPS}
    assert 0 <= sandwich.jumps["euler"]["1"] <= 1
    assert sandwich.command.endswith("screen tried --only sandwich --seeds 0")
    assert len({point.samples for point in sandwich.points}) == 1


def test_a_finished_variant_is_not_trained_again(
    tried: tuple[list[Measured], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, folder = tried
    monkeypatch.setattr(command, "train", lambda *_: pytest.fail("trained again"))
    again = [
        command.run(TRIED, one, 0, "", folder / "runs", folder / "kept") for one in TRIED.variants
    ]
    assert again == runs
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        command.run(TRIED, TRIED.variants[0], 1, "", folder / "runs", folder / "kept")


def test_the_page_marks_the_best_and_tells_what_diverged(
    tried: tuple[list[Measured], Path],
) -> None:
    runs, _ = tried
    sandwich, one, wild = runs
    good = [dataclasses.replace(point, value=0.9) for point in sandwich.points]
    poor = [dataclasses.replace(point, value=0.8) for point in one.points]
    sandwich, one = (
        dataclasses.replace(sandwich, points=good),
        dataclasses.replace(one, points=poor),
    )
    shown = {run.group: [run] for run in (sandwich, one, wild)}
    page = render(NO_PAPERS, {}, {"tried": TRIED}, shown)
    first = next(line for line in page.splitlines() if line.startswith("| `sandwich` |"))
    second = next(line for line in page.splitlines() if line.startswith("| `one` |"))
    assert first.count("**90.00**") == 4 and "80.00" in second and "**80" not in second
    assert second.split("|")[6].strip() == "–"  # a jump from a single step says nothing
    assert re.search(r"`wild` \(seed 0\) diverged: it is shown as it was after [\d,]+ of", page)
    assert not re.search("Not run yet: `(sandwich|one|wild)`", page)
    assert "Not run yet: `one`." in render(
        {"experiment": []}, {}, {"tried": TRIED}, dict(list(shown.items())[::2])
    )
    with pytest.raises(ValueError, match=r"no screen of screens.toml names: \['stray'\]"):
        render(NO_PAPERS, {}, {"tried": TRIED}, {"stray": [sandwich]})


def test_an_unknown_variant_is_refused_with_the_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command.main(["mnist", "--only", "fixed-9"])
    assert "fixed-8" in capsys.readouterr().err


def test_a_kept_run_is_trained_again_with_another_seed_or_changed(
    tried: tuple[list[Measured], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (_, first, _), folder = tried
    kept = folder / "kept"
    rest = ["--out", str(folder / "runs"), "--results", str(kept)]
    assert again.main([first.group, "--seeds", "0", "1", *rest]) == 0
    second = Measured.read(kept / f"{first.group}-1.json")
    expected = {**first.recipe, "run": {**first.recipe["run"], "seed": 1}}
    assert second.recipe == expected and second.evaluations == first.evaluations
    ways = [(point.method, point.steps) for point in first.points]
    assert [(point.method, point.steps) for point in second.points] == ways

    shorter = ["--name", "shorter", "--set", "optim.iterations=3", "--set", "optim.warmup=1"]
    assert again.main([first.group, *shorter, *rest]) == 0
    assert Measured.read(kept / "shorter-0.json").iterations == 3
    assert again.main(["never", *rest]) == 2
    assert f"no record of 'never' in {kept}: there are shorter, " in capsys.readouterr().err
