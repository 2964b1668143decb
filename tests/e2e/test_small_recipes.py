"""Every recipe made for a CPU is trained by the command, and learns; every full one has its size.

A recipe keeps its family, blocks, depth, steps and objective here; only its sizes are shrunk, and
its data are made on the spot. What the parity tests do not export is exported.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from export.run import ExportRequest, export_run
from tests.recipe_data import write_all
from train.__main__ import main
from train.data.batch import Sizes
from train.model import OTTransformer, Stepped, build_model, count_parameters
from train.recipe import load_recipe, recipe_names

pytestmark = pytest.mark.long

ITERATIONS = 30
SIZES = {
    "model.heads": 4,
    "model.width": 32,
    "model.hidden": 64,
    "model.layers": 2,
    "model.window": 24,
    "model.target_window": 24,
    "model.inducing": 4,
    "data.vocabulary": 300,
    "data.longest": 6,
    "data.rows": 400,
    "data.head": 8,
    "data.tail": 8,
    "optim.batch": 16,
    "optim.accumulate": 1,
}
QUICK = {
    "optim.iterations": ITERATIONS,
    "optim.lr": 5e-3,
    "optim.warmup": 3,
    "optim.precision": "fp32",
    "run.threads": 1,
    "run.evaluate_every": 2,  # a line of the log each
    "run.evaluate_batches": 1,
    "run.checkpoint_every": ITERATIONS,
}
# What none of the small recipes is: made small here, for what it exports to.
SHRUNK = ["mnist-any", "mnist-discrete", "modelnet-discrete", "multi30k-discrete"]
SHRUNK += ["nanogpt-discrete"]
SMALL = [name for name in recipe_names() if name.endswith("-small")]
OWN = {"text": "corpus.txt", "nanogpt-small": "corpus.txt", "nanogpt-discrete": "corpus.txt"}
OWN |= {"classifier": "labels.csv", "tagger": "words.jsonl"}
MADE = {"parity", "n-ode-parity-small", "transevolve-listops-small"}
# Family, block and depth that no parity test exports.
EXPORTED = {
    "mnist-discrete": "classify",
    "modelnet-discrete": "classify",
    "multi30k-discrete": "translate",
    "nanogpt-discrete": "generate",
    "ode-transformer-translation-small": "translate",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latency is measured in an instant."""
    monkeypatch.setattr("export.latency.ENOUGH_S", 0.0)
    monkeypatch.setattr("export.latency.ENOUGH_RUNS", 1)


def shrunk(name: str) -> list[str]:
    """The settings that make a recipe tiny: none is larger than its own."""
    own = load_recipe(name).to_json()
    settings = dict(QUICK)
    for key, most in SIZES.items():
        section, last = key.split(".")
        settings[key] = min(own[section][last], most)
    if name in EXPORTED and own["model"]["family"] != "set":  # whose first block is the embedding
        settings["model.layers"] = 1  # what is traced takes time
    if own["data"]["kind"] == "images":
        settings["model.patch"] = 8
    if own["data"]["kind"] == "parity":
        settings["data.longest"] = 2
    if own["data"]["kind"] == "listops":  # its answers are learnt late
        settings |= {"optim.batch": 64, "optim.lr": 1e-2}
    return [f"{key}={value}" for key, value in settings.items()]


def train(name: str, data: Path, folder: Path) -> Path:
    words = ["train", name, "--out", str(folder / "run")]
    if name not in MADE:
        words += ["--data", str(data / OWN.get(name, ""))]
    assert main([*words, *(f"--set={setting}" for setting in shrunk(name))]) == 0
    return folder / "run"


@pytest.mark.parametrize("name", [*SMALL, *SHRUNK, "parity", "classifier", "tagger", "text"])
def test_a_recipe_learns(name: str, data: Path, tmp_path: Path) -> None:
    run = train(name, data, tmp_path)
    kept, own = json.loads((run / "recipe.json").read_text())["recipe"], load_recipe(name)
    assert kept["steps"] == own.to_json()["steps"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    assert len(losses) == ITERATIONS // 2
    third = len(losses) // 3
    assert sum(losses[-third:]) < 0.97 * sum(losses[:third]), losses
    if name in EXPORTED:
        bundle = export_run(run, ExportRequest(tmp_path / "bundle", (1,)), say=lambda line: None)
        assert (bundle.manifest.task, bundle.manifest.depth) == (EXPORTED[name], "fixed")
        (rung,) = bundle.manifest.rungs
        assert rung.verified.max_abs_error <= rung.verified.tolerance < 1e-3


CHARACTERS = Sizes(vocabulary=66)
REVIEWS = Sizes(vocabulary=16_000, classes=2)
DIGITS = Sizes(classes=10, channels=1, height=28, width=28)
PICTURES = Sizes(classes=2, channels=3, height=64, width=64)
CLOUDS = Sizes(classes=10, dimensions=3)


def body(model: OTTransformer) -> int:
    """Without the head, which the paper's figure leaves out."""
    return count_parameters(model) - count_parameters(model.head)


def blocks(model: OTTransformer) -> int:
    return count_parameters(model.velocity)


@pytest.mark.parametrize(
    ("name", "sizes", "count", "thousands"),
    [
        ("nanogpt", CHARACTERS, count_parameters, 6_160),
        ("nanogpt-discrete", CHARACTERS, count_parameters, 10_650),
        ("gpt2-shakespeare", Sizes(vocabulary=50_257), count_parameters, 123_700),
        ("gpt2-shakespeare-discrete", Sizes(vocabulary=50_257), count_parameters, 123_700),
        ("gpt2-openwebtext", Sizes(vocabulary=50_304), count_parameters, 123_700),
        ("gpt2-openwebtext-discrete", Sizes(vocabulary=50_304), count_parameters, 123_700),
        ("imdb", REVIEWS, blocks, 2_370),
        ("imdb-discrete", REVIEWS, blocks, 4_740),
        ("mnist", DIGITS, count_parameters, 18),
        ("cats-dogs", PICTURES, blocks, 1_480),
        ("cats-dogs-discrete", PICTURES, blocks, 1_770),
        ("modelnet", CLOUDS, body, 650),
        ("modelnet-discrete", CLOUDS, body, 860),
    ],
)
def test_a_full_recipe_has_the_size_of_the_paper(
    name: str, sizes: Sizes, count: Callable[[OTTransformer], int], thousands: float
) -> None:
    model = built(name, sizes)
    assert isinstance(model, OTTransformer)
    assert count(model) / 1e3 == pytest.approx(thousands, rel=0.025)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mnist-discrete", DIGITS),  # the paper's 93k count a layer that is never called
        ("ode-transformer", Sizes(vocabulary=33_279)),
        ("multi30k", Sizes(vocabulary=8_000)),
        ("multi30k-discrete", Sizes(vocabulary=8_000)),
        ("n-ode-parity", Sizes(vocabulary=6, classes=2)),
        ("transevolve-agnews", Sizes(vocabulary=16_000, classes=4)),
        ("transevolve-imdb", REVIEWS),
        ("transevolve-imdb-chars", REVIEWS),
        ("transevolve-listops", Sizes(vocabulary=17, classes=10)),
    ],
)
def test_a_full_recipe_without_a_published_size_builds(name: str, sizes: Sizes) -> None:
    assert count_parameters(built(name, sizes)) > 1000


def built(name: str, sizes: Sizes) -> Stepped:
    """The model of a recipe, without any memory for its weights."""
    with torch.device("meta"):
        return build_model(load_recipe(name).model, sizes)
