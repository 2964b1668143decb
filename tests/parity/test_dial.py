"""The dial of time, injection, and blocks before and behind the steps: the runtime is torch."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from export.run import ExportRequest, export_run
from export.verify import samples_of
from serve.bundle import Bundle, Precision
from serve.runtime import OpenedModel, open_model
from serve.runtime.protocol import FloatArray, IntArray
from tests.fixtures.tiny_rungs import best
from tests.fixtures.tiny_runs import (
    tiny_label_recipe,
    tiny_logic_recipe,
    tiny_pair_recipe,
    tiny_text_recipe,
    trained,
)
from train.checkpoint import load_run
from train.data import open_dataset
from train.model import Stepped
from train.ode import METHODS
from train.recipe import Recipe
from train.retrofit import retrofit

pytestmark = pytest.mark.long

ABSOLUTE = 2e-5
TIME = ["steps.dial=time", "model.T=4.0", "steps.jump=0.0"]
LOOP = ["model.inject=true", "model.velocity=residual"]
QUICK = ["optim.iterations=6", "model.layers=1"]
STEPS = (1, 2, 4, 7)  # the last goes beyond the four of the training
Make = Callable[..., Recipe]


def label_recipe(_: Path, *overrides: str) -> Recipe:
    return tiny_label_recipe(*overrides)


FIXED = ["steps.schedule=fixed"]
# Recipe, settings; then task, cache, and the width of the state beside that of the model.
FORMS: dict[str, tuple[Make, list[str], tuple[str, str, int]]] = {
    "tagger": (tiny_logic_recipe, [], ("tag", "none", 1)),
    "tagger between blocks": (
        tiny_logic_recipe,
        ["model.prelude=1", "model.coda=2", "model.inject=false"],
        ("tag", "none", 1),
    ),
    "tagger of resolution": (
        tiny_logic_recipe,
        ["steps.dial=resolution", *FIXED, "steps.exits=[]", "model.velocity=block"],
        ("tag", "none", 1),
    ),
    "tagger that sees the time": (tiny_logic_recipe, ["model.timed=true"], ("tag", "none", 1)),
    "tagger that sees distances": (tiny_logic_recipe, ["model.reach=3"], ("tag", "none", 1)),
    "classifier": (label_recipe, [*TIME, *LOOP], ("classify", "none", 1)),
    "decoder": (tiny_text_recipe, [*TIME, *LOOP], ("generate", "kv", 2)),
    "decoder without injection": (
        tiny_text_recipe,
        [*TIME, "model.velocity=residual"],
        ("generate", "kv", 1),
    ),
    "decoder of resolution": (
        tiny_text_recipe,
        ["model.inject=true", "model.conditioned=true", "model.tied=true"],
        ("generate", "kv", 2),
    ),
    "decoder that sees the time": (
        tiny_text_recipe,
        [*TIME, *LOOP, "model.timed=true"],
        ("generate", "kv", 2),
    ),
    "decoder between blocks": (
        tiny_text_recipe,
        [*TIME, *LOOP, "model.prelude=1", "model.coda=1"],
        ("generate", "none", 1),
    ),
    "translator": (tiny_pair_recipe, TIME, ("translate", "none", 1)),
}


class Form(NamedTuple):
    """One form, trained once and exported once at all `STEPS`."""

    run: Path
    recipe: Recipe
    bundle: Bundle


@pytest.fixture(scope="module")
def form_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Form]:
    made: dict[str, Form] = {}

    def form(name: str) -> Form:
        if name not in made:
            folder = tmp_path_factory.mktemp("form")
            make, settings, _ = FORMS[name]
            recipe = make(folder, *QUICK, *settings)
            run = trained(recipe, folder)
            made[name] = Form(run, recipe, exported(run, folder / "bundle", *STEPS))
        return made[name]

    return form


def exported(
    run: Path,
    target: Path,
    *steps: int,
    method: str | None = None,
    precision: Precision = "fp32",
) -> Bundle:
    request = ExportRequest(target, steps, method, precision=precision)
    return export_run(run, request, say=lambda line: None)


def answer(model: Stepped, inputs: tuple[torch.Tensor, ...], steps: int, method: str) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(*inputs, steps=steps, method=method).logits.numpy()
    return logits


def check_decoding(opened: OpenedModel, tokens: IntArray, expected: np.ndarray, steps: int) -> None:
    """Prompts of several lengths read, and their rows continued together."""
    batch = opened.decoder(steps).open_batch()
    for row, prompt in enumerate((5, 9, 1)):
        first = batch.add(tokens[row, :prompt])
        np.testing.assert_allclose(first, expected[row, prompt - 1], atol=ABSOLUTE)
    for _ in range(6):
        at = np.array(batch.lengths)
        logits = batch.step(tokens[np.arange(3), at])
        np.testing.assert_allclose(logits, expected[np.arange(3), at], atol=ABSOLUTE)


@pytest.mark.parametrize("form", FORMS)
def test_every_rung_of_every_form_agrees_with_torch(
    form_of: Callable[[str], Form], form: str
) -> None:
    run, recipe, bundle = form_of(form)
    m, (task, cache, wider) = bundle.manifest, FORMS[form][2]
    assert (m.task, m.cache, m.shape.state_width) == (task, cache, wider * m.shape.width)
    assert (m.dial, m.grid_steps) == (
        ("time", 4) if recipe.steps.dial == "time" else ("resolution", None)
    )
    if m.task == "tag":  # every puzzle has 36 cells, and is measured so
        assert m.text_input.max_tokens == 36 and m.text_input.exact
        assert bundle.latency is not None
        assert {entry.length for entry in bundle.latency.entries} == {36}
    model, dataset = load_run(run).model, open_dataset(recipe, load_run(run).tokenizer)
    samples = samples_of(dataset, recipe.model.window, recipe.model.target_window)
    opened = open_model(bundle)
    opened.warm_up()
    for steps in STEPS:
        for inputs in [samples.draw(3, 16), *samples.edges()]:
            expected = answer(model, inputs, steps, m.method)
            rows = [each.numpy() for each in inputs]
            given = []
            if m.labelled:
                given = [opened.classifier(steps).run(rows[0])]
                given.append(opened.step_classifier(steps).run(rows[0]))
                given.append(opened.unrolled(steps).forward(rows[0]))
            elif m.task == "generate":
                given = [opened.decoder(steps).forward(rows[0])]
                given.append(opened.unrolled(steps).forward(rows[0]))
                if len(rows[0]) == 3 and rows[0].shape[1] == 16:
                    check_decoding(opened, rows[0], expected, steps)
            else:
                given = [opened.translator(steps).forward(*rows)]
            present = rows[0] != 0 if m.task == "tag" else ...
            for logits in given:
                difference = np.abs(logits - expected)[present]
                assert difference.max() <= ABSOLUTE * max(1.0, np.abs(expected).max())


# Euler's is that of the forms above.
@pytest.mark.parametrize("method", [method for method in METHODS if method != "euler"])
def test_an_injected_decoder_agrees_with_torch_by_every_method(
    form_of: Callable[[str], Form], tmp_path: Path, method: str
) -> None:
    run = form_of("decoder").run
    bundle = exported(run, tmp_path / "b", 1, 3, method=method)
    model, opened = load_run(run).model, open_model(bundle)
    tokens = torch.randint(1, 30, (3, 20))
    for steps in (1, 3):
        expected = answer(model, (tokens,), steps, method)
        given = opened.decoder(steps).forward(tokens.numpy())
        np.testing.assert_allclose(given, expected, atol=ABSOLUTE)
        check_decoding(opened, tokens.numpy(), expected, steps)


@pytest.mark.parametrize("form", ["tagger", "classifier", "decoder"])
def test_a_later_rung_goes_on_from_an_earlier_one(
    form_of: Callable[[str], Form], form: str
) -> None:
    """What k steps read out is what is read out after the first k of more."""
    run, recipe, bundle = form_of(form)
    dataset = open_dataset(recipe, load_run(run).tokenizer)
    samples = samples_of(dataset, recipe.model.window, recipe.model.target_window)
    opened = open_model(bundle)
    rows = samples.draw(3, 12)[0].numpy()
    if form == "decoder":
        caches = {}
        for steps in (2, 7):
            batch = opened.decoder(steps).open_batch()
            batch.add(rows[0])
            caches[steps] = [batch.caches(step) for step in range(2)]  # type: ignore[attr-defined]  # of this runtime
        for fewer, more in zip(caches[2], caches[7], strict=True):
            for one, other in zip(fewer, more, strict=True):
                np.testing.assert_array_equal(
                    one[:, :, : len(rows[0])], other[:, :, : len(rows[0])]
                )
        return
    whole = opened.step_classifier(7)
    jumps = whole.jumps(rows)
    assert jumps.shape[:2] == (7, 3)
    for steps in STEPS:
        rung = opened.step_classifier(steps).run(rows)
        np.testing.assert_array_equal(jumps[steps - 1], rung)
    np.testing.assert_array_equal(whole.traced(rows, None).readouts, jumps)


@pytest.mark.parametrize("form", ["tagger", "decoder"])
def test_forms_of_8_bits_export_and_verify(tmp_path: Path, form: str) -> None:
    make, settings, _ = FORMS[form]
    wide = ["model.width=192", "model.hidden=192", "model.heads=4"]
    run = trained(make(tmp_path, *QUICK, *settings, *wide), tmp_path)
    bundle = exported(run, tmp_path / "b", 1, 4, precision="int8")
    assert bundle.manifest.precision == "int8"
    assert all(rung.against_fp32 is not None for rung in bundle.manifest.rungs)


@pytest.fixture
def decoder(form_of: Callable[[str], Form]) -> OpenedModel:
    """Trained, with the input injected at each step of the dial of time."""
    return open_model(form_of("decoder").bundle)


def written(decoder: OpenedModel, steps: int, tokens: IntArray, count: int) -> list[FloatArray]:
    """The logits of a prompt and of so many tokens behind it, greedy and alone."""
    batch = decoder.decoder(steps).open_batch()
    found = [batch.add(tokens)]
    for _ in range(count):
        found.append(batch.step(best(found[-1:]))[0])
    return found


def test_rows_of_every_budget_in_one_call_get_what_they_get_alone(decoder: OpenedModel) -> None:
    """Each stops with its clock, and goes on to its next token while the others are still going."""
    mix, draw = decoder.mix(), np.random.default_rng(0)
    assert mix is not None and mix.most_batches == len(STEPS)
    prompts = {steps: draw.integers(1, 30, (2, 3 + steps)) for steps in STEPS}
    batches = {steps: decoder.decoder(steps).open_batch() for steps in STEPS}
    found = {steps: [[batches[steps].add(row)] for row in prompts[steps]] for steps in STEPS}
    stands = dict.fromkeys(STEPS, 0)
    for _ in range(28):
        first = [steps for steps in STEPS if stands[steps] == 0]
        mix.begin([batches[n] for n in first], [best([r[-1] for r in found[n]]) for n in first])
        mix.advance(list(batches.values()))
        stands = {steps: (stand + 1) % steps for steps, stand in stands.items()}
        last = [steps for steps in STEPS if stands[steps] == 0]
        for steps, logits in zip(last, mix.end([batches[n] for n in last]), strict=True):
            for row, one in zip(found[steps], logits, strict=True):
                row.append(one)
        if any(len(prompts[n][0]) + len(found[n][0]) >= 23 for n in STEPS):
            break
    for steps in STEPS:
        for row, tokens in zip(found[steps], prompts[steps], strict=True):
            np.testing.assert_array_equal(row, written(decoder, steps, tokens, len(row) - 1))
    assert len(found[1][0]) > 2 * len(found[7][0]) > 2


@pytest.mark.parametrize("right", [False, True])
def test_a_row_that_runs_ahead_of_itself_gets_what_it_gets_alone(
    decoder: OpenedModel, right: bool
) -> None:
    mix, tokens = decoder.mix(), np.arange(1, 8)
    assert mix is not None and mix.can_speculate
    expected = written(decoder, 7, tokens, 12)
    batch = decoder.decoder(7).open_batch()
    found = [batch.add(tokens)]
    speculation, most = mix.speculation(batch, 2), 0
    while len(found) < len(expected):
        (token,) = best(found[-1:])
        if speculation.tokens and speculation.tokens[0] != token:
            speculation.keep(0)
        if not speculation.tokens:
            speculation.begin(int(token))
        output = speculation.advance()
        if output.drafts is not None and speculation.tokens:
            behind = len(found) - 1 + len(speculation.tokens) + (output.last is not None)
            if speculation.room and behind < len(expected):
                (drafted,) = best(expected[behind : behind + 1])
                speculation.begin(int(drafted) if right else 1 + int(drafted) % 20)
        most = max(most, len(speculation.tokens))
        if output.last is not None:
            found.append(output.last)
    np.testing.assert_array_equal(found, expected)
    assert most > 1


def test_a_prompt_read_in_pieces_or_continued_keeps_the_same_caches(decoder: OpenedModel) -> None:
    tokens = np.arange(1, 17)
    for steps in STEPS:
        whole, parts = decoder.decoder(steps).open_batch(), decoder.decoder(steps).open_batch()
        last = whole.add(tokens)
        parts.add(tokens[:5])
        *_, stepped = (parts.step(token[None]) for token in tokens[5:])
        np.testing.assert_allclose(stepped[0], last, atol=ABSOLUTE)
        token = best([last])
        np.testing.assert_allclose(parts.step(token), whole.step(token), atol=ABSOLUTE)


@pytest.mark.parametrize("form", ["tagger", "classifier"])
def test_rows_that_stop_early_leave_the_others_as_they_were(
    form_of: Callable[[str], Form], form: str
) -> None:
    """Rows of one batch stop after different steps: each has what its rung gives it alone."""
    run, recipe, bundle = form_of(form)
    opened = open_model(bundle)
    dataset = open_dataset(recipe, load_run(run).tokenizer)
    rows = samples_of(dataset, recipe.model.window, recipe.model.target_window).draw(24, 12)[0]
    tokens, whole = rows.numpy(), opened.step_classifier(7)
    jumps = whole.jumps(tokens)  # (7, B, ..., C)
    ordered = np.sort(jumps, axis=-1)
    margins = ordered[..., -1] - ordered[..., -2]
    least = margins if form == "classifier" else margins.min(-1)  # (7, B)
    threshold = float(np.quantile(least[:-1], 0.8))
    early = whole.early(tokens, threshold)
    assert len(set(early.evaluations.tolist())) > 1
    for row, steps in enumerate(early.evaluations.tolist()):
        np.testing.assert_array_equal(early.logits[row], jumps[steps - 1, row])
        if steps in STEPS:
            alone = opened.step_classifier(steps).run(tokens[row : row + 1])[0]
            np.testing.assert_array_equal(early.logits[row], alone)
    traced = whole.traced(tokens, threshold)
    np.testing.assert_array_equal(traced.logits, early.logits)
    np.testing.assert_array_equal(traced.evaluations, early.evaluations)


def test_an_older_run_of_fixed_steps_becomes_a_dial_of_time(tmp_path: Path) -> None:
    """Its full answers are the teacher's; what it is then exports, verifies and is torch's."""
    old = trained(tiny_label_recipe(*QUICK, *FIXED, "steps.jump=0.3"), tmp_path)
    run = tmp_path / "any"
    recipe = retrofit(old, run, 0.5, ["steps.dial=time"])
    assert (recipe.steps.dial, recipe.steps.exits, recipe.model) == (
        *("time", (1, 2)),
        load_run(old).recipe.model,
    )
    before, after = load_run(old).model, load_run(run).model
    after.load_state_dict(before.state_dict())  # the same weights: the same answers at full steps
    dataset = open_dataset(recipe, load_run(run).tokenizer)
    rows = samples_of(dataset, recipe.model.window, recipe.model.target_window).draw(8, 12)[0]
    np.testing.assert_array_equal(
        answer(after, (rows,), 4, "euler"), answer(before, (rows,), 4, "euler")
    )
    bundle = exported(run, tmp_path / "b", 1, 2, 4)
    assert (bundle.manifest.dial, bundle.manifest.grid_steps) == ("time", 4)
    opened, made = open_model(bundle), load_run(run).model
    for steps in (1, 2, 4):
        expected = answer(made, (rows,), steps, "euler")
        given = opened.classifier(steps).run(rows.numpy())
        np.testing.assert_allclose(given, expected, atol=ABSOLUTE)
        np.testing.assert_array_equal(
            opened.step_classifier(4).jumps(rows.numpy())[steps - 1],
            opened.step_classifier(steps).run(rows.numpy()),
        )


def test_a_run_with_the_dial_of_time_is_retrofitted_too(tmp_path: Path) -> None:
    alone = [*FIXED, "steps.exits=[]"]
    old = trained(tiny_logic_recipe(tmp_path, *QUICK, *alone), tmp_path)
    recipe = retrofit(old, tmp_path / "any", 0.5)
    assert (recipe.steps.schedule, recipe.steps.exits, recipe.steps.jump) == ("fixed", (1, 2), 0)
    bundle = exported(tmp_path / "any", tmp_path / "b", 1, 2, 4)
    assert bundle.manifest.task == "tag" and bundle.manifest.range is not None
