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
from serve.runtime.protocol import IntArray
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

pytestmark = pytest.mark.long

ABSOLUTE = 2e-5
TIME = ["steps.dial=time", "model.T=4.0", "steps.jump=0.0"]
LOOP = ["model.inject=true", "model.velocity=residual"]
QUICK = ["optim.iterations=6", "model.layers=1"]
STEPS = (1, 2, 4, 7)  # the last goes beyond the four of the training
Make = Callable[..., Recipe]


def label_recipe(_: Path, *overrides: str) -> Recipe:
    return tiny_label_recipe(*overrides)


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
        ["steps.dial=resolution", "steps.exits=[]", "model.velocity=block"],
        ("tag", "none", 1),
    ),
    "tagger that sees the time": (tiny_logic_recipe, ["model.timed=true"], ("tag", "none", 1)),
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
