"""The page of the papers' experiments says what was kept, and names nothing that is not there."""

import copy
import dataclasses
import json
import math
import re
import tomllib
from pathlib import Path

import pytest
import torch

from benchmarks.lab import Cell, Provenance, Table, Target
from benchmarks.papers import latency, speed
from benchmarks.papers import page as papers_page
from benchmarks.papers.measure import main
from benchmarks.papers.measured import Measured, read_all
from benchmarks.papers.page import (
    CLAIMS,
    PAGE,
    PICTURES,
    PUBLISHED,
    read_extra,
    render,
    render_claims,
    tables_sections,
)
from benchmarks.papers.queue import PLAN, meaning_of, read_plan
from benchmarks.papers.screens import SCREENED, read_screens
from tests.fixtures.tiny_runs import tiny_label_recipe, tiny_label_run, tiny_text_recipe
from train.checkpoint import RECIPE, RunError
from train.data import open_dataset
from train.recipe import Recipe, recipe_from, recipe_names

PUBLISHED_FACTS = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))


def test_the_page_is_what_the_script_writes() -> None:
    kept = read_all(), read_screens(), read_all(SCREENED)
    rendered = render(PUBLISHED_FACTS, *kept, read_extra())
    assert PAGE.read_text(encoding="utf-8") == rendered
    claims = render_claims(PUBLISHED_FACTS, kept[0], read_extra())
    assert CLAIMS.read_text(encoding="utf-8") == claims


def test_every_picture_of_the_page_is_there() -> None:
    shown = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "!["]
    names = [line.partition("(plots/")[2].rstrip(")") for line in shown]
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


KINDS = ("here", "perplexity", "bleu", "robust")


def test_claims_name_runs_that_an_experiment_has() -> None:
    named = {run for experiment in PUBLISHED_FACTS["experiment"] for run in experiment["runs"]}
    for claim in PUBLISHED_FACTS["claim"]:
        told = [one for kind in KINDS for one in claim.get(kind, [])]
        assert claim["verdict"] and {group for _, group, *_ in told} <= named
        assert told or claim.get("theory") or claim.get("speed")


def test_a_claim_names_figures_of_all_kinds_or_the_command_that_runs_it() -> None:
    scored = small("mnist-discrete", 0.9, 10, bleu={"1": 20.0, "4": 25.0})
    residual = small("ode-transformer-small-residual", 5.0, 10)
    groups = {
        "translation-rk4": [scored],
        "mnist-discrete": [scored],
        "ode-transformer-small-residual": [residual],
    }
    facts = copy.deepcopy(PUBLISHED_FACTS)
    for claim in facts["claim"]:
        claim.setdefault("differs", "another text")
    page = render_claims(facts, groups)
    translated = section(page, "Higher order is better, translation")
    assert "\n* Here: RK4: 25.0 BLEU, 1 seed\n* Not as in the paper: " in translated
    assert "\n* Not run yet: residual, 4,000 iterations (`translation-residual-long`)" in translated
    digits = section(page, "Fewer parameters, MNIST")
    assert "\n* Here: baseline, 60k: 90.00 %, 1 seed\n* Not as in the paper: " in digits
    assert "\n* Not run yet: OT, 17.7k (`mnist`), discrete, 17.7k (`mnist-discrete-64`)" in digits
    perplexity = section(page, "Higher order is better, perplexity")
    assert f"\n* Here: residual: {math.exp(5):.1f}, 1 seed\n* Not as in" in perplexity
    assert "\n* Not run yet: RK2 (`ode-" in perplexity
    theorem = section(page, "Stable forward propagation")
    assert "\n* Not run yet: `python -m benchmarks.papers.theory`\n" in theorem
    assert "* Here: " not in theorem and "* Not as in the paper: " not in theorem
    assert "\n* Not run yet: OT (`python -m benchmarks.robustness " in page
    asked = "--runs RUNS/mnist-discrete-[0-9] --steps 1 --name robustness-of-mnist-discrete "
    assert f", baseline, 60k (`python -m benchmarks.robustness {asked}" in page
    provenance = Provenance.now("robustness", [])
    columns = ("model", "what", "steps", "seeds", "0", "0.5")
    rows: list[list[Cell]] = [["mnist", "OT, lambda 0.005", 20, 3, "0.97 ± 0.01", "0.90 ± 0.02"]]
    robust = provenance.result(
        "robustness-mnist", "Noise", "", [Table("gaussian, by its level", columns, rows)], []
    )
    target = Target("models with lambda > T L² that are steeper than the bound", 3, "==", 0)
    proven = provenance.result("theory", "The theorem, tried", "", [], [target])
    claims = render_claims(facts, groups, [robust, proven])
    assert "OT: 97.00 ± 1.00 to 90.00 ± 2.00 %, 3 seeds" in claims
    assert "steeper than the bound: 3" in claims
    page = render(facts, groups, {}, {}, [robust, proven])
    assert "## The theorem, tried" in page
    noise = page.partition("## Robustness")[2]
    assert "| mnist | OT, lambda 0.005 | 20 | 3 | 97.00 ± 1.00 | 90.00 ± 2.00 |" in noise


def test_a_claim_of_speed_is_of_each_length() -> None:
    asked = "Attention that is computed once is faster"
    told = section(render_claims(PUBLISHED_FACTS, {}), asked)
    assert "\n* Not run yet: fullFF-1, 4.1M (`python -m benchmarks.papers.speed`), " in told
    times = {name: [20.0, 30.0] for name in speed.MODELS}
    times |= {"fullFF-1": [40.0, 10.0], speed.UNFUSED: [80.0, 30.0]}
    rows: list[list[Cell]] = [[name, 5, *found] for name, found in times.items()]
    table = Table("Milliseconds", ("model", "parameters", "1,000", "2,000"), rows)
    kept = Provenance.now("papers.speed", []).result("speed", "Speed by length", "", [table], [])
    told = section(render_claims(PUBLISHED_FACTS, {}, [kept]), asked)
    assert "\n* Here: fullFF-1, 4.1M: 0.50 / 3.00; fullFF-2, 4.6M: 1.00 / 1.00; " in told
    assert "not fused: fullFF-1: 2.00 / 3.00; randomFF-1: 4.00 / 1.00\n* Not as in" in told
    page = render(PUBLISHED_FACTS, {}, {}, {}, [kept])
    assert "## Speed by length" in page and "| fullFF-1 | 5 | 40.0 | 10.0 |" in page


def test_a_pass_of_training_is_timed_for_each_model_at_each_length() -> None:
    found = speed.timed(Provenance.now("papers.speed", []), (8, 16), 1)
    (table,) = found.tables
    assert table.columns == ("model", "parameters", "8", "16")
    assert [row[0] for row in table.rows] == list(speed.MODELS)
    assert all(float(str(ms)) > 0 for row in table.rows for ms in row[2:])
    sizes = {str(row[0]): int(str(row[1])) for row in table.rows}
    assert sizes[speed.BASE] == sizes[speed.UNFUSED] > sizes["fullFF-1"] > sizes["randomFF-1"]
    text = torch.randint(1, speed.SIZES.vocabulary, (1, 8))
    for name, fused in ((speed.BASE, True), (speed.UNFUSED, False)):
        model = speed.built(speed.MODELS[name])
        with torch.profiler.profile() as seen:
            speed.training_pass(name, model, text)()
        assert any("flash_attention" in one.key for one in seen.key_averages()) == fused
        assert all(one.grad is not None for one in model.parameters())


def section(page: str, start: str) -> str:
    """What the page says of one claim."""
    (found,) = re.findall(rf"\n### \d+\. {start}.*?\n(?=##)", page, re.DOTALL)
    return str(found)


def test_claims_stand_by_their_paper_and_are_counted() -> None:
    claimed = CLAIMS.read_text(encoding="utf-8").partition("## What is open")[0]
    head, overview, *papers = claimed.split("\n## ")
    claims = PUBLISHED_FACTS["claim"]
    states = [claim["state"] for claim in claims]
    for state, (said, verdict) in papers_page.STATES.items():
        assert "".join(papers).count(f"\n**{verdict}** ") == states.count(state)
        assert said.format(states.count(state)) in overview or state not in states
    assert "**In short**" in head
    assert [paper.partition("\n")[0] for paper in papers] == list(
        dict.fromkeys(claim["source"] for claim in claims)
    )
    for paper in papers:
        source = paper.partition("\n")[0]
        ours = [claim["short"] for claim in claims if claim["source"] == source]
        assert re.findall(r"^### \d+\. (.*)$", paper, re.MULTILINE) == ours
    assert "(1 seed each)" in "".join(papers)


def test_the_overview_has_each_claim_with_its_figures_and_its_verdict() -> None:
    overview = CLAIMS.read_text(encoding="utf-8").partition("## Overview")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in overview.splitlines() if row[:3] == "| ["]
    claims = PUBLISHED_FACTS["claim"]
    assert [row[0].partition("]")[0] for row in rows] == [f"[{one['short']}" for one in claims]
    assert [row[1] for row in rows] == [one["paper"] for one in claims]
    verdicts = [papers_page.STATES[one["state"]][1] for one in claims]
    assert [f"{row[3]}." for row in rows] == verdicts
    for row, claim in zip(rows, claims, strict=True):
        figures = re.findall(r"\d+\.\d+", row[2])
        assert figures or row[2] == "not run yet" or claim.get("theory")


def test_the_overviews_figures_are_the_means_of_those_below_it() -> None:
    groups = {
        "mnist": [small("mnist", value, 10) for value in (0.9612, 0.9712)],
        "mnist-discrete": [small("mnist-discrete", 0.9, 10)],
        "nanogpt-small-lambda1": [small("overfit-ot", 1.5, 10)],
    }
    facts = copy.deepcopy(PUBLISHED_FACTS)
    facts["claim"] = facts["claim"][:2]
    page = render_claims(facts, groups)
    assert " | 96.6 % with 17.7k; the baseline of 60k has 90.0 % | Holds in part |" in page
    assert " | not run yet | Holds in part |" in page  # one of its figures misses
    assert papers_page._in_short("OT: noise: 1.2168 ± 0.0170 to 3.0322 nats, 3 seeds") == (
        "1.22 to 3.03"
    )
    assert papers_page._in_short("RK4: 30.0 ± 0.4 BLEU, 3 seeds") == "30.0"
    assert papers_page._in_short("models that are steeper: 0") == "0"


def test_a_model_stands_beside_itself_without_the_transport_cost() -> None:
    pair = {
        "imdb-small": [small("imdb-small", 0.86, 10), small("imdb-small", 0.88, 10, seed=1)],
        "imdb-small-lambda0": [
            small("imdb-small-lambda0", 0.87, 10),
            small("imdb-small-lambda0", 0.85, 10, seed=1),
        ],
    }
    _, beside, _ = tables_sections(PUBLISHED_FACTS, pair)
    found = cells(beside, "film reviews, %")
    assert found[1:] == ["0.25", *["87.00 / 86.00: +1.00 (1 of 2)"] * 2, found[-1]]
    assert found[-1] == "87.00 / 86.00: +1.00 (1 of 2), 4 steps"
    assert cells(beside, "point clouds, %")[1] == "not run yet; not run yet"
    losses = {"overfit-ot": 1.5, "overfit-lambda0": 1.6}
    _, beside, _ = tables_sections(
        PUBLISHED_FACTS, {name: [small(name, loss, 10)] for name, loss in losses.items()}
    )
    assert (
        cells(beside, "a tenth of the characters, trained for any count, nats")[2]
        == "1.500 / 1.600: +0.100 (1 of 1)"
    )


def test_a_figure_beside_a_claim_says_what_is_not_as_in_the_paper() -> None:
    facts = copy.deepcopy(PUBLISHED_FACTS)
    (claim,) = [one for one in facts["claim"] if "from overfitting" in one["short"]]
    del claim["differs"]
    with pytest.raises(ValueError, match="figures stand beside 'The transport cost keeps"):
        render_claims(facts, read_all())


def test_noise_beside_the_papers_says_what_is_not_as_there() -> None:
    noise = PAGE.read_text(encoding="utf-8").partition("## Robustness")[2].partition("\n## ")[0]
    differs = {
        name: said
        for one in PUBLISHED_FACTS["experiment"]
        for name, said in one.get("differs", {}).items()
    }
    parts = noise.split("\n\n")
    beside = [part for part in parts if "| paper, OT |" in part]
    seen = set()
    for part in beside:
        rows = [row.removeprefix("| ") for row in part.splitlines()[2:]]
        names = [row.partition(" |")[0] for row in rows]
        assert names[-2:] == ["paper, baseline", "paper, OT"]
        seen.add(tuple(dict.fromkeys(names[:-2])))
        for name, row in zip(names[:-2], rows, strict=False):
            assert row.endswith(f" | {differs[name]} |")
    assert seen == {
        ("mnist", "mnist-lambda0", "mnist-discrete"),
        ("modelnet-small", "modelnet-small-lambda0", "modelnet-small-discrete"),
        (
            *("nanogpt-small-lambda1", "nanogpt-small-norms", "nanogpt-small-lambda0"),
            *("nanogpt-small-norms-lambda0", "nanogpt-small-discrete"),
        ),
    }


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


def test_tables_name_what_the_queue_trains() -> None:
    trained = {job.group for job in read_plan(PLAN)}
    tables = [*PUBLISHED_FACTS["reduced"], *PUBLISHED_FACTS["sweep"]]
    assert tables and {name for one in tables for _, name in one["rows"]} <= trained


def small(name: str, value: float, parameters: int, **changed: object) -> Measured:
    """A kept run with other figures."""
    kept = read_all()[name][0]
    points = [dataclasses.replace(point, value=value) for point in kept.points]
    return dataclasses.replace(kept, points=points, parameters=parameters, **changed)  # type: ignore[arg-type]  # fields of it


def cells(section: str, start: str) -> list[str]:
    (row,) = [line for line in section.splitlines() if line.startswith(f"| {start} ")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_fewer_parameters_stand_beside_more() -> None:
    groups = {
        "mnist": [small("mnist", 0.97, 1000)],
        "mnist-discrete-140": [small("mnist-discrete", 0.945, 4000)],
        "mnist-discrete": [small("mnist-discrete", value, 3400) for value in (0.97, 0.99)],
    }
    rows: list[list[Cell]] = [["mnist", 1, 0.5], ["mnist", 20, 7.0], ["mnist-discrete-140", 1, 0.9]]
    table = Table("MNIST, %", latency.COLUMNS, rows)
    times = Provenance.now("papers.latency", []).result("latency", "", "", [table], [])
    reduced, *_ = tables_sections(PUBLISHED_FACTS, groups, times)
    ours = cells(reduced, "OT, k (`mnist`)")
    assert ours[1:3] == ["1,000", "1.00"] and ours[7:10] == ["97.00", "", "0.50 / 7.00"]
    larger = cells(reduced, "discrete, 4 k (`mnist-discrete-140`)")
    assert larger[1:4] == ["4,000", "4.00", "94.50"] and larger[4] == "–"
    assert larger[8:10] == ["+2.50", "0.90"]
    papers = cells(reduced, "discrete, the paper's (`mnist-discrete`)")
    assert papers[3] == "98.00 ± 1.41" and papers[8] == "-1.00" and papers[-1] == "2"
    assert cells(reduced, "discrete, 2 k (`mnist-discrete-96`)")[1] == "not run yet"
    assert "not run yet" in cells(reduced, "OT, k (`nanogpt-small-lambda1`)")[1]


def test_nats_that_are_fewer_are_ahead() -> None:
    losses = {"nanogpt-small-lambda1": 1.5, "nanogpt-small-discrete-8": 1.6}
    groups = {name: [small("overfit-ot", loss, 10)] for name, loss in losses.items()}
    for name, (run,) in groups.items():  # at one step both are far worse, and nobody asks
        first, *others = run.points
        assert first.steps == 1
        points = [dataclasses.replace(first, value=5 * first.value), *others]
        groups[name] = [dataclasses.replace(run, points=points)]
    facts = copy.deepcopy(PUBLISHED_FACTS)
    for one in facts["reduced"]:
        one["full"] = 8
    reduced, *_ = tables_sections(facts, groups)
    assert cells(reduced, "discrete, 4 k (`nanogpt-small-discrete-8`)")[7] == "+0.100"


def test_a_sweep_says_what_is_lost_after_the_best_validation() -> None:
    kept = read_all()["overfit-discrete"][0]
    losses = [2.0, 1.5, 1.75]
    curve = [
        dataclasses.replace(kept.curve[0], validation={"loss@1": 9.0, "loss@5": loss})
        for loss in losses
    ]
    run = small("overfit-ot", 1.5, 10, curve=curve)
    *_, swept = tables_sections(PUBLISHED_FACTS, {"nanogpt-small-lambda0.1": [run]})
    characters = swept.partition("| characters, nats: lambda |")[2].partition("\n\n")[0]
    assert cells(characters, "0.1")[-2:] == ["0.250", "1"]
    assert cells(characters, "0.01")[1] == "not run yet"
    right = [dataclasses.replace(one, validation={"accuracy@20": 0.9}) for one in curve]
    right[0] = dataclasses.replace(right[0], validation={"accuracy@20": 0.95})
    lost = dataclasses.replace(read_all()["mnist"][0], curve=right)
    *_, swept = tables_sections(PUBLISHED_FACTS, {"mnist-lambda0.1": [lost]})
    assert cells(swept.partition("| MNIST, %: lambda")[2], "0.1")[-2:] == ["5.000", "1"]


def test_methods_are_shown_of_the_runs_that_have_them() -> None:
    runs = read_all()["mnist"]
    table = papers_page._method_table("mnist", runs)
    assert table.startswith("| mnist, by evaluations (1 seed of 3) | 1 |")
    assert "| heun | – | 46.21 |" in table
    assert papers_page._method_table("mnist", runs[1:]) == ""


def test_the_tables_are_printed_with_how_far_the_queue_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert papers_page.main(["--tables", "--results", str(tmp_path)]) == 0
    assert "waiting" not in capsys.readouterr().out
    (tmp_path / "mnist-1.failures").write_text("once\n" * 3)
    runs = ["--runs", str(tmp_path)]
    assert papers_page.main(["--tables", "--results", str(tmp_path), *runs]) == 0
    row = cells(capsys.readouterr().out.partition("| sentiment, %")[0], "OT, k (`mnist`)")
    assert row[1].startswith("0: waiting, not begun; 1: left out after 3 failures, not begun")


@pytest.mark.parametrize("task", ["classifier", "decoder"])
def test_an_answer_takes_longer_with_more_steps(task: str, tmp_path: Path) -> None:
    def made(*overrides: str) -> Recipe:
        if task == "decoder":
            return tiny_text_recipe(tmp_path, *overrides)
        return tiny_label_recipe(*overrides)

    dataset = open_dataset(made())
    for _ in range(3):  # one that is disturbed is timed again
        found = {steps: answer() for steps, answer in latency.answers_of(made(), dataset, 8)}
        assert set(found) == {1, 8}
        if 0 < found[1] < found[8]:
            break
    else:
        raise AssertionError(found)
    level = latency.answers_of(made("model.depth=discrete"), dataset, 8)
    assert [steps for steps, _ in level] == [1]


def test_every_table_has_the_times_of_its_models() -> None:
    kept = {one.name: one for one in read_extra()}["latency"]
    wanted = {
        one["task"]: {group for _, group in one["rows"]} for one in PUBLISHED_FACTS["reduced"]
    }
    assert {one.caption: {row[0] for row in one.rows} for one in kept.tables} == wanted
    assert all(isinstance(ms, float) and ms > 0 for one in kept.tables for *_, ms in one.rows)


def test_figures_are_those_of_the_training() -> None:
    """At full steps, though more were measured; and of the adaptive solver, where one trained."""
    (kept,) = read_all()["n-ode-parity-small"]
    values = {None: 0.83, 4: 0.55}
    points = [dataclasses.replace(point, value=values[point.steps]) for point in kept.points]
    run = dataclasses.replace(kept, points=points)
    assert run.full == run.at(None) and run.full.value == 0.83
    groups = {kept.group: [run]}
    shown, _ = papers_page._here(groups, "N-ODE", kept.group, "adaptive")
    assert shown == "N-ODE: 83.00 %, 1 seed"
    assert "| adaptive |" in papers_page._quality_table([*groups.items()], {})
    wide = read_all()["mnist-any"][0]
    most = max(point.steps or 0 for point in wide.points)
    assert wide.full.steps == wide.recipe["steps"]["full"] < most
    without = [point for point in wide.points if point.steps != wide.full.steps]
    with pytest.raises(ValueError, match="mnist-any-0 was not measured at 8 steps: measure it"):
        _ = dataclasses.replace(wide, points=without).full
    with pytest.raises(ValueError, match=r"-0 was not measured with the adaptive solver: measure"):
        _ = dataclasses.replace(kept, points=[kept.points[-1]]).full
    discrete = read_all()["mnist-any-discrete"][0]
    assert discrete.full.steps == 1


def test_the_steps_of_training_are_measured_whatever_is_asked(tmp_path: Path) -> None:
    run = tiny_label_run(tmp_path, "optim.iterations=2", "steps.full=3")
    assert main([str(run), "--group", "tiny", "--steps", "8,1", "--results", str(tmp_path)]) == 0
    kept = Measured.read(tmp_path / "tiny-0.json")
    assert [point.steps for point in kept.points] == [1, 3, 8]
    assert kept.full.steps == 3
