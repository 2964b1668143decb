"""Tiny training runs for tests: seconds on a CPU, every kind of model."""

from pathlib import Path

from train.config import Recipe, load_recipe
from train.loop import train

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


def tiny_text_recipe(folder: Path, *overrides: str) -> Recipe:
    """Characters, a window of 24, four steps at most."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        corpus.write_text(TEXT * 30, encoding="utf-8")
    short = ["steps.full=4", "steps.short=[1, 2]", "optim.precision=fp32", "model.window=24"]
    small = ["optim.iterations=20", "run.checkpoint_every=5", "run.evaluate_every=10"]
    return load_recipe("shakespeare", [*TINY, *short, *small, *overrides], str(corpus))


def tiny_label_recipe(*overrides: str) -> Recipe:
    """PARITY, four steps at most."""
    small = ["optim.iterations=20", "run.checkpoint_every=5", "run.evaluate_every=10"]
    return load_recipe("parity", [*TINY, "data.rows=400", *small, *overrides])


def tiny_text_run(folder: Path, *overrides: str) -> Path:
    train(tiny_text_recipe(folder, *overrides), folder / "run", quiet=True)
    return folder / "run"


def tiny_label_run(folder: Path, *overrides: str) -> Path:
    train(tiny_label_recipe(*overrides), folder / "run", quiet=True)
    return folder / "run"
