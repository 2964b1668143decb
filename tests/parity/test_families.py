"""Every family of models: trained, exported, verified, and the runtime answers as torch does."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.attention import has_cached_form
from export.inspect import describe, rung_latency_ms
from export.quality import measure_bundle
from export.run import ExportRequest, Origin, export_model, export_run
from export.trace import CacheShape, trace
from export.verify import Inputs, samples_of
from serve.bundle import Bundle, ImageInput, Manifest, PointsInput
from serve.runtime import Model, open_model
from tests.fixtures.tiny_runs import (
    tiny_image_recipe,
    tiny_label_recipe,
    tiny_pair_recipe,
    tiny_point_recipe,
    tiny_text_recipe,
    trained,
)
from tests.server_process import server_process
from train.checkpoint import load_run
from train.data import open_dataset, open_measured
from train.data.batch import Sizes
from train.model import Embedding, OTTransformer, PooledHead, Stepped, TokenHead, build_model
from train.recipe import Recipe, Scheme

pytestmark = pytest.mark.long

ABSOLUTE = 2e-5
QUICK = ["optim.iterations=6", "model.layers=1"]
RUNGE_KUTTA = ["model.block=runge-kutta", "model.depth=discrete"]
EVOLVED = ["model.block=evolved", "model.depth=discrete", "model.evolve=2"]


def label_recipe(_: Path, *overrides: str) -> Recipe:
    return tiny_label_recipe(*overrides)


Make = Callable[..., Recipe]
# Recipe, settings, then what the manifest must say: task, depth, cache, evaluations of each rung.
FAMILIES: dict[str, tuple[Make, list[str], tuple[str, str, str, tuple[int, ...]]]] = {
    "conditioned decoder, tied": (
        tiny_text_recipe,
        ["model.conditioned=true", "model.tied=true", "model.positions=sinusoidal"],
        ("generate", "ode", "kv", (1, 3)),
    ),
    "Runge-Kutta decoder": (
        tiny_text_recipe,
        [*RUNGE_KUTTA, "model.scheme=rk2-learned"],
        ("generate", "fixed", "kv", (1,)),
    ),
    "evolved encoder": (
        label_recipe,
        [*EVOLVED, "model.feedforward=random", "model.final_norm=pooled", "model.head_layers=1"],
        ("classify", "fixed", "none", (1,)),
    ),
    "chain of timed ODEs": (
        label_recipe,
        ["model.block=timed", "model.depth=chain", "model.layers=2", "steps.method=midpoint"],
        ("classify", "chain", "none", (4, 12)),
    ),
    "chain of ODEs whose attention knows the time": (
        label_recipe,
        ["model.block=timed", "model.depth=chain", "model.layers=2", "model.timed_attention=true"],
        ("classify", "chain", "none", (2, 6)),
    ),
    "chain of plain blocks": (
        label_recipe,
        ["model.depth=chain", "model.layers=2", "model.activation=gelu-exact"],
        ("classify", "chain", "none", (2, 6)),
    ),
    "Runge-Kutta translator, relative": (
        tiny_pair_recipe,
        [
            *(*RUNGE_KUTTA, "model.scheme=rk2-learned", "model.scheme_in_decoder=false"),
            *("model.reach=3", "model.function=feedforward"),
        ],
        ("translate", "fixed", "none", (2,)),
    ),
    "image": (
        tiny_image_recipe,
        ["model.hidden=0", "model.project=false", "model.pool=first"],
        ("classify", "ode", "none", (1, 3)),
    ),
    "set": (tiny_point_recipe, [], ("classify", "ode", "none", (1, 3))),
    "translator, tied": (
        tiny_pair_recipe,
        ["model.tied=true"],
        ("translate", "ode", "none", (2, 6)),
    ),
    "evolved translator": (
        tiny_pair_recipe,
        [*EVOLVED, "model.evolve=1"],
        ("translate", "fixed", "none", (2,)),
    ),
}


def logits(opened: Model, steps: int, inputs: Inputs) -> np.ndarray[Any, Any]:
    arrays = [each.numpy() for each in inputs]
    match opened.bundle.manifest.task:
        case "classify" | "tag":
            return opened.classifier(steps).run(arrays[0])
        case "generate":
            return opened.decoder(steps).forward(arrays[0])
        case "translate":
            return opened.translator(steps).forward(*arrays)


def check_rungs(bundle: Bundle, model: Stepped, inputs: list[Inputs]) -> None:
    opened = open_model(bundle)
    opened.warm_up()
    for rung in bundle.manifest.rungs:
        for each in inputs:
            with torch.no_grad():
                expected = model(*each, steps=rung.steps, method=rung.method).logits.numpy()
            given = logits(opened, rung.steps, each)
            np.testing.assert_allclose(given, expected, atol=ABSOLUTE)
        assert rung.verified.max_abs_error <= rung.verified.tolerance < 1e-3


class Exported(NamedTuple):
    recipe: Recipe
    run: Path
    bundle: Bundle
    said: list[str]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """A family, trained and exported once."""
    made: dict[str, Exported] = {}

    def export(family: str) -> Exported:
        if family not in made:
            folder = tmp_path_factory.mktemp("family")
            make, settings, _ = FAMILIES[family]
            recipe = make(folder, *QUICK, *settings)
            said: list[str] = []
            name = re.sub("[^a-z]+", "-", family.lower())
            request = ExportRequest(folder / "bundle", (1, 3), name=name)
            run = trained(recipe, folder)
            made[family] = Exported(recipe, run, export_run(run, request, say=said.append), said)
        return made[family]

    return export


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_exports_and_answers_as_torch_does(
    exported: Callable[[str], Exported], family: str
) -> None:
    expected = FAMILIES[family][2]
    recipe, run, bundle, said = exported(family)
    fixed = expected[1] == "fixed"
    m = bundle.manifest
    assert said[0].startswith("reading ")
    assert ("weights of this model differ by depth" in said[1]) == fixed
    for phase in ("tracing ", "checking each graph", "measuring quality on ", "measuring latency "):
        assert len([line for line in said if line.startswith(phase)]) == 1
    assert (m.task, m.depth, m.cache, tuple(rung.nfe for rung in m.rungs)) == expected
    model, dataset = load_run(run).model, open_dataset(recipe, load_run(run).tokenizer)
    samples = samples_of(dataset, recipe.model.window, recipe.model.target_window)
    check_rungs(bundle, model, [samples.draw(4, 9), *samples.edges()])
    again = measure_bundle(bundle, None, recipe.data.path, None)
    assert {rung.steps: rung.quality for rung in m.rungs} == {
        steps: one.quality for steps, one in again.items()
    }
    card = (bundle.folder / "README.md").read_text(encoding="utf-8")
    assert ("fixed depth" in card) == fixed and ("a block, each over" in card) == (
        m.depth == "chain"
    )
    assert ("fixed depth" in describe(bundle)) == fixed
    assert all(rung_latency_ms(bundle, rung) for rung in m.rungs)
    if "tied" in family:
        check_tied(bundle, model)


def test_images_are_prepared_as_those_of_the_training_whatever_they_are(
    exported: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _, bundle, _ = exported("image")
    with np.load(Path(recipe.data.path) / "data.npz") as arrays:
        np.savez(tmp_path / "data.npz", images=arrays["images"] // 4, classes=arrays["classes"])
    opened: list[Any] = []

    def recorded(*given: Any) -> Any:
        opened.append(open_measured(*given))
        return opened[-1]

    monkeypatch.setattr("export.quality.open_measured", recorded)
    measure_bundle(bundle, [1], str(tmp_path), None)
    spec = bundle.manifest.input
    assert isinstance(spec, ImageInput)
    assert (opened[0].mean, opened[0].std) == (spec.mean, spec.std)


def test_the_server_answers_every_family(exported: Callable[[str], Exported]) -> None:
    bundles = [exported(family).bundle for family in FAMILIES]
    with server_process([bundle.folder for bundle in bundles]) as server:
        for bundle in bundles:
            m = bundle.manifest
            for steps in (1, 3):
                given = httpx.post(server.url + path_of(m), json=question(m, steps), timeout=30)
                if m.depth == "fixed" and steps != 1:
                    assert given.status_code == 422
                    assert "differ by depth" in given.json()["error"]["message"]
                    continue
                assert given.status_code == 200, given.text
                answer = given.json()
                spent = answer["results"][0]["budget"] if m.labels else answer["budget"]
                assert (spent["steps"], spent["nfe"]) == (steps, m.rung(steps).nfe)


def path_of(m: Manifest) -> str:
    return "/v1/classify" if m.labels else "/v1/generate"


def question(m: Manifest, steps: int) -> dict[str, Any]:
    """Something that the model takes."""
    asked: dict[str, Any] = {"model": m.name, "steps": steps}
    match m.input:
        case ImageInput(height=height, width=width):
            return {**asked, "input": {"image": [[128] * width] * height}}
        case PointsInput(dimensions=dimensions):
            return {**asked, "input": {"points": [[i] * dimensions for i in range(5)]}}
        case _:
            if m.labels:
                return {**asked, "input": "^ 1 0 1"}
            prompt = "one two" if m.task == "translate" else "the quick"
            return {**asked, "prompt": prompt, "max_tokens": 4}


def check_tied(bundle: Bundle, model: Stepped) -> None:
    """A token embedding that is also the head stands in the weights file once, whichever way."""
    embed = getattr(model, "embed_source", None) or getattr(model, "embed", None)
    assert isinstance(embed, Embedding)
    table, stored = embed.tokens.weight.detach().numpy(), bundle.weights_path.read_bytes()
    assert stored.count(table.tobytes()) + stored.count(table.T.tobytes()) == 1


class Average(nn.Module):
    """Any module (B, N, D) -> (B, N, D): here, of the mean of what has been seen so far."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1)[:, None]  # (N, 1)
        return torch.tanh(self.linear(x.cumsum(1) / count))


@pytest.mark.parametrize("classifies", [True, False])
def test_a_plain_module_is_a_velocity_that_exports(tmp_path: Path, classifies: bool) -> None:
    recipe = tiny_label_recipe() if classifies else tiny_text_recipe(tmp_path)
    dataset = open_dataset(recipe)
    sizes, width, window = dataset.sizes, 12, recipe.model.window
    torch.manual_seed(0)
    embed = Embedding(sizes.vocabulary, window, width, None)
    head: nn.Module = TokenHead(width, sizes.vocabulary, norm=True)
    if classifies:
        head = PooledHead(width, sizes.classes, True, "mean", 0.0)
    model = OTTransformer(embed, Average(width), head)
    origin = Origin(model, recipe, dataset)
    request = ExportRequest(tmp_path / "bundle", (1, 2), "heun", "plain", samples=64)
    bundle = export_model(origin, request, say=lambda line: None)
    assert bundle.manifest.cache == "none" and bundle.manifest.shape.width == width
    check_rungs(bundle, model, [samples_of(dataset, window, 1).draw(3, 7)])


@pytest.mark.parametrize(
    ("scheme", "layers", "calls"),
    [
        *(("residual", 2, 2), ("dlcl", 2, 2), ("leapfrog", 2, 2)),
        *(("rk2", 1, 2), ("rk4", 1, 4), ("polynet", 1, 2)),  # each call takes time to trace
    ],
)
def test_every_attention_of_an_evaluation_has_caches(
    tmp_path: Path, scheme: Scheme, layers: int, calls: int
) -> None:
    settings = [*RUNGE_KUTTA, f"model.scheme={scheme}", f"model.layers={layers}"]
    recipe = tiny_text_recipe(tmp_path, *settings)
    model = build_model(recipe.model, Sizes(vocabulary=30))
    assert isinstance(model, OTTransformer)
    assert has_cached_form(model.velocity) and not has_cached_form(Average(16))
    traced = trace(model.eval(), [torch.ones(2, 3).long()], [torch.ones(3, 5).long()])
    assert traced.caches == CacheShape(calls, 2, 8)


@pytest.mark.parametrize("settings", [["model.heads=4"], EVOLVED], ids=["narrow", "evolved"])
def test_what_the_cached_operator_cannot_compute_has_no_cache(
    tmp_path: Path, settings: list[str]
) -> None:
    recipe = tiny_text_recipe(tmp_path, *settings)
    model = build_model(recipe.model, Sizes(vocabulary=30))
    assert isinstance(model, OTTransformer) and not has_cached_form(model.velocity)
