"""Models of random weights that speed, memory and size are measured on, and bundles of them.

Neither time nor memory depends on what the weights are: nothing here is trained, and quality is
measured elsewhere. Texts are random characters.
"""

import random
from dataclasses import replace
from pathlib import Path

import torch

from export.pack import ExportRequest, export_model
from export.trial import Origin
from serve.bundle import Bundle, Precision
from train.batch import Dataset
from train.build import build_model
from train.config import Recipe
from train.labelled import LabelledDataset
from train.recipe_file import load_recipe, recipe_from
from train.text import TextDataset

STEPS = (1, 2, 4, 6, 8, 10)
_CHARACTERS = "".join(map(chr, range(48, 112)))  # 64 of them; padding makes 65 tokens
_TINY = {"layers": 1, "heads": 2, "width": 64, "hidden": 128, "window": 48}


def decoder(quick: bool = False) -> Origin:
    """The decoder of the papers, with 6.2M parameters: 5 layers, 5 heads, width 320, window 256."""
    recipe = load_recipe("nanogpt", ["name=decoder"])
    if quick:
        recipe = replace(recipe, model=replace(recipe.model, **_TINY))
    window = recipe.model.window
    return _origin(recipe, TextDataset(_text(100 * window), recipe.data, window, None))


def classifier(quick: bool = False) -> Origin:
    """An encoder of 3 layers of width 256 that reads 512 tokens, with 2.4M parameters in blocks."""
    size = {"layers": 3, "heads": 8, "width": 256, "hidden": 1024, "window": 512}
    table = {
        "name": "classifier",
        "data": {"kind": "table", "tokenizer": "chars"},
        "model": {"family": "encoder", **(_TINY if quick else size)},
    }
    recipe = recipe_from(table, "classifier")
    window = recipe.model.window
    rows = [(_text(window, row), "ab"[row % 2]) for row in range(64)]
    return _origin(recipe, LabelledDataset(rows, None, recipe.data, window, None, seed=0))


def exported(
    origin: Origin, folder: Path, steps: tuple[int, ...], precision: Precision = "fp32"
) -> Bundle:
    """A bundle of it: verified, but measured on hardly any rows and without latencies."""
    request = ExportRequest(
        folder, steps, precision=precision, samples=1, latency=False, name=folder.name
    )
    return export_model(origin, request, say=lambda _: None)


def _origin(recipe: Recipe, dataset: Dataset) -> Origin:
    torch.manual_seed(0)
    return Origin(build_model(recipe.model, dataset.sizes).eval(), recipe, dataset)


def _text(characters: int, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices(_CHARACTERS, k=characters))
