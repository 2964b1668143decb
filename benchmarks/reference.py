"""Models of random weights that speed, memory and size are measured on, and bundles of them.

Neither time nor memory depends on what the weights are: nothing here is trained, verified or
calibrated. Texts are random characters.
"""

import random
from collections.abc import Mapping
from pathlib import Path

import torch

from export.draft import TOKENIZER, draft_manifest
from export.graph import Ladder, write_graphs
from export.int8 import unseen_rows
from export.int8_cache import measured_scales
from export.run import Origin
from export.trace import trace
from export.verify import samples_of
from serve.bundle import Bundle, Precision, open_staging, seal_bundle
from train.data.batch import Dataset
from train.data.labelled import LabelledDataset
from train.data.text import TextDataset
from train.model import build_model
from train.recipe import Recipe, load_recipe, recipe_from

STEPS = (1, 2, 4, 6, 8, 10)
QUICK_STEPS = (1, 2)
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
METHOD = "euler"
_CHARACTERS = "".join(map(chr, range(48, 112)))  # 64 of them; padding makes 65 tokens
_SMALL: Mapping[str, int] = {"layers": 1, "heads": 2, "width": 64, "hidden": 512, "window": 48}
_CLASSIFIER = {"layers": 3, "heads": 8, "width": 256, "hidden": 1024, "window": 512}


def decoder(quick: bool) -> Origin:
    """The decoder of the papers, with 6.2M parameters: 5 layers, 5 heads, width 320, window 256."""
    size = [f"model.{key}={value}" for key, value in _SMALL.items()] if quick else []
    recipe = load_recipe("nanogpt", ["name=decoder", *size])
    window = recipe.model.window
    return _origin(recipe, TextDataset(_text(400 * window), recipe.data, window, None))


def classifier(quick: bool) -> Origin:
    """An encoder of 3 layers, 8 heads and width 256 that reads 512 tokens."""
    table = {
        "name": "classifier",
        "data": {"kind": "table", "tokenizer": "chars"},
        "model": {"family": "encoder", **(_SMALL if quick else _CLASSIFIER)},
    }
    recipe = recipe_from(table, "classifier")
    window = recipe.model.window
    rows = [(_text(window, row), "ab"[row % 2]) for row in range(64)]
    return _origin(recipe, LabelledDataset(rows, None, recipe.data, window, None, seed=0))


def bundles(
    origin: Origin, folder: Path, steps: tuple[int, ...], small_caches: bool = False
) -> dict[Precision, Bundle]:
    """A bundle of each precision, in folders of their own; with 8-bit caches, if they are small."""
    model, recipe, dataset = origin.model, origin.recipe, origin.dataset
    assert dataset.tokenizer is not None
    samples = samples_of(dataset, recipe.model.window, recipe.model.target_window)
    traced = trace(model, samples.draw(2, 3), samples.draw(3, 5))
    scales = None
    if small_caches:
        assert traced.caches is not None
        scales = measured_scales(model, dataset, steps, METHOD, traced.caches.pairs)
    made: dict[Precision, Bundle] = {}
    for precision in PRECISIONS:
        name = f"{recipe.name}-{precision}{'-small-caches' if small_caches else ''}"
        draft = draft_manifest(
            name,
            recipe,
            model,
            traced,
            dataset,
            steps,
            METHOD,
            precision,
            {},
            iteration=0,
            cache="kv_int8" if small_caches else traced.cache,
        )
        with open_staging(folder / name) as staging:
            (staging / TOKENIZER).write_text(dataset.tokenizer.to_str(), encoding="utf-8")
            ladder = Ladder(steps, METHOD)
            write_graphs(staging, traced, ladder, precision, unseen_rows(dataset), scales)
            made[precision] = seal_bundle(staging, draft, folder / name)
    return made


def _origin(recipe: Recipe, dataset: Dataset) -> Origin:
    torch.manual_seed(0)
    return Origin(build_model(recipe.model, dataset.sizes).eval(), recipe, dataset)


def _text(characters: int, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices(_CHARACTERS, k=characters))
