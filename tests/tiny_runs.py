"""Tiny training runs for tests: seconds on a CPU, every kind of model, data made on the spot."""

from pathlib import Path

import numpy as np

from train.loop import train
from train.recipe import Recipe, load_recipe

TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. "
TINY = [
    "model.width=16",
    "model.hidden=32",
    "model.heads=2",
    "model.layers=2",
    "optim.batch=8",
    "optim.warmup=2",
    "run.threads=1",
    "run.evaluate_batches=2",
]
SHORT = ["optim.iterations=20", "run.checkpoint_every=5", "run.evaluate_every=10"]
IMAGES = """
name = "tiny-images"
[data]
kind = "images"
train = "data.npz:images"
train_labels = "data.npz:classes"
labels = ["left", "right", "both"]
[model]
family = "image"
patch = 7
[steps]
full = 4
short = [1, 2]
"""
POINTS = """
name = "tiny-points"
[data]
kind = "points"
train = "data.npz:clouds"
train_labels = "data.npz:classes"
[model]
family = "set"
window = 24
inducing = 4
[steps]
full = 4
short = [1, 2]
"""
PAIRS = """
name = "tiny-pairs"
[data]
kind = "pairs"
train = "train"
vocabulary = 300
[model]
family = "translator"
window = 20
target_window = 24
[steps]
full = 4
short = [1, 2]
"""
WORDS = (("one", "eins"), ("two", "zwei"), ("three", "drei"), ("four", "vier"), ("five", "fünf"))


def tiny_text_recipe(folder: Path, *overrides: str) -> Recipe:
    """Characters, a window of 24, four steps at most."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        corpus.write_text(TEXT * 30, encoding="utf-8")
    short = ["steps.full=4", "steps.short=[1, 2]", "optim.precision=fp32", "model.window=24"]
    return load_recipe("shakespeare", [*TINY, *short, *SHORT, *overrides], str(corpus))


def tiny_label_recipe(*overrides: str) -> Recipe:
    """PARITY, four steps at most."""
    return load_recipe("parity", [*TINY, "data.rows=400", *SHORT, *overrides])


def tiny_logic_recipe(_: Path, *overrides: str) -> Recipe:
    """Sudoku of 6 by 6 cells: a tagger with the dial of time, the input injected, four steps."""
    short = ["data.rows=80", "model.T=4.0"]
    steps = ["steps.full=4", "steps.short=[1, 2]", "steps.exits=[1, 2]", "steps.stages=[]"]
    return load_recipe("logic", [*TINY, *short, *steps, *SHORT, *overrides])


def tiny_image_recipe(folder: Path, *overrides: str) -> Recipe:
    """Grey images of 14 × 14 that are bright on one side or on both."""
    draw = np.random.default_rng(0)
    classes = draw.integers(0, 3, 80).astype(np.uint8)
    images = draw.integers(0, 80, (80, 14, 14)).astype(np.uint8)
    images[classes != 1, :, :7] += 120
    images[classes != 0, :, 7:] += 120
    np.savez(folder / "data.npz", images=images, classes=classes)
    return _recipe(folder, IMAGES, overrides)


def tiny_point_recipe(folder: Path, *overrides: str) -> Recipe:
    """Clouds of 24 points, flat or round."""
    draw = np.random.default_rng(0)
    classes = draw.integers(0, 2, 80).astype(np.uint8)
    clouds = draw.standard_normal((80, 24, 3)).astype(np.float32)
    clouds[classes == 0, :, 2] *= 0.1
    np.savez(folder / "data.npz", clouds=clouds, classes=classes)
    return _recipe(folder, POINTS, overrides)


def tiny_pair_recipe(folder: Path, *overrides: str) -> Recipe:
    """Number words, word by word."""
    draw = np.random.default_rng(0)
    rows = [[WORDS[i] for i in draw.integers(0, 5, draw.integers(1, 5))] for _ in range(80)]
    for side, language in enumerate(("en", "de")):
        lines = [" ".join(pair[side] for pair in row) for row in rows]
        (folder / f"train.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return _recipe(folder, PAIRS, overrides)


def _recipe(folder: Path, text: str, overrides: tuple[str, ...]) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(str(path), [*TINY, *SHORT, *overrides], str(folder))


def tiny_text_run(folder: Path, *overrides: str) -> Path:
    return trained(tiny_text_recipe(folder, *overrides), folder)


def tiny_label_run(folder: Path, *overrides: str) -> Path:
    return trained(tiny_label_recipe(*overrides), folder)


def trained(recipe: Recipe, folder: Path) -> Path:
    train(recipe, folder / "run", quiet=True)
    return folder / "run"
