"""Training iterations a second, beside a plain PyTorch loop that does the same arithmetic.

    python -m benchmarks.throughput

Both sides see the same model sizes, batches, Euler steps, transport cost, clipping and AdamW; the
plain side is written out here with nothing of ours but the data. They take turns in one process.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lab import (
    Cell,
    Provenance,
    Result,
    Table,
    Target,
    interleave,
    median_ratio,
    parser,
    run,
)
from train.data import open_dataset
from train.data.batch import Dataset
from train.devices import Devices
from train.loop import TrainingLoop, make_optimiser
from train.model import build_model
from train.recipe import Recipe, recipe_from

NAME = "throughput"
WANTED_RATIO = 0.9
SCHEDULE = {"schedule": "fixed", "full": 8, "method": "euler"}
OPTIM = {"iterations": 100_000, "transport": 0.1, "warmup": 0, "clip": 1.0}


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained."""

    name: str
    recipe: Recipe
    dataset: Dataset
    iterations: int  # timed at a time


class PlainBlock(nn.Module):
    """Attention, and a feed-forward if it has hidden units, with norms before them."""

    def __init__(self, width: int, heads: int, hidden: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1 = nn.LayerNorm(width) if hidden else nn.Identity()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feedforward: nn.Module | None = None
        if hidden:
            self.feedforward = nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, hidden),
                nn.GELU(approximate="tanh"),
                nn.Linear(hidden, width),
            )

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(B, N, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)  # (B, H, N, D/H)
        x = x + self.out(y.transpose(1, 2).reshape(B, N, D))
        return x if self.feedforward is None else x + self.feedforward(x)


class PlainDecoder(nn.Module):
    def __init__(self, recipe: Recipe, vocabulary: int) -> None:
        super().__init__()
        c = recipe.model
        self.tokens = nn.Embedding(vocabulary, c.width)
        self.positions = nn.Parameter(torch.randn(c.window, c.width) * 0.02)
        self.blocks = nn.Sequential(
            *(PlainBlock(c.width, c.heads, c.hidden, True) for _ in range(c.layers))
        )
        self.norm, self.head = nn.LayerNorm(c.width), nn.Linear(c.width, vocabulary)

    def embed(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return x

    def read_out(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


class PlainImages(nn.Module):
    def __init__(self, recipe: Recipe, side: int, classes: int) -> None:
        super().__init__()
        c = recipe.model
        self.patch = c.patch
        self.patches = nn.Linear(c.patch**2, c.width)
        self.first = nn.Parameter(torch.zeros(1, 1, c.width))
        self.positions = nn.Parameter(torch.randn((side // c.patch) ** 2 + 1, c.width) * 0.02)
        self.blocks = nn.Sequential(
            *(PlainBlock(c.width, c.heads, c.hidden, False) for _ in range(c.layers))
        )
        self.head = nn.Linear(c.width, classes)

    def embed(self, pixels: Tensor) -> Tensor:
        B, _, H, W = pixels.shape
        p = self.patch
        cut = pixels.view(B, H // p, p, W // p, p).transpose(2, 3).reshape(B, -1, p * p)
        x = torch.cat([self.first.expand(B, -1, -1), self.patches(cut)], dim=1)
        return x + self.positions  # (B, 1 + N, D)

    def read_out(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x[:, 0])
        return logits


def plain_training(case: Case, model: PlainDecoder | PlainImages) -> Callable[[], float]:
    """Iterations of the plain loop; seconds for one."""
    steps, optim = case.recipe.steps, case.recipe.optim
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=(0.9, optim.beta2), weight_decay=0.1, fused=True
    )
    at = 0

    def train_some() -> float:
        nonlocal at
        begun_s = time.perf_counter()
        for _ in range(case.iterations):
            batch = case.dataset.batch(at, optim.batch, 0)
            x, h = model.embed(batch.inputs[0]), 1 / steps.full
            cost = x.new_zeros(())
            for _ in range(steps.full):
                v = model.blocks(x)
                cost = cost + h * v.square().mean()
                x = x + h * v
            logits = model.read_out(x)
            task = F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())
            loss = task + optim.transport * cost
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            at += 1
        return (time.perf_counter() - begun_s) / case.iterations

    return train_some


def our_training(case: Case, folder: Path) -> Callable[[], float]:
    """Iterations of the loop of `stepdial train`; seconds for one."""
    model = build_model(case.recipe.model, case.dataset.sizes).train()
    optimiser = make_optimiser(model, case.recipe.optim)
    devices = Devices("cpu", case.recipe.optim.precision)
    loop = TrainingLoop(case.recipe, folder, case.dataset, model, optimiser, True, devices)
    at = 0

    def train_some() -> float:
        nonlocal at
        begun_s = time.perf_counter()
        for _ in range(case.iterations):
            loop.iterate(at)
            at += 1
        return (time.perf_counter() - begun_s) / case.iterations

    return train_some


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, parsed.quick))


def measure(quick: bool, provenance: Provenance) -> Result:
    torch.set_num_threads(1)
    rows: list[Sequence[Cell]] = []
    targets = []
    with tempfile.TemporaryDirectory() as folder:
        for case, plain in (_decoder(Path(folder)), _images(Path(folder))):
            timed = interleave(
                {"ours": our_training(case, Path(folder)), "plain": plain_training(case, plain)},
                seconds=0 if quick else 25,
                least=2 if quick else 8,
            )
            ours, theirs = timed["ours"], timed["plain"]
            ratio = median_ratio(theirs, ours)
            rows.append([case.name, 1 / median(ours), 1 / median(theirs), len(ours), ratio])
            what = f"{case.name}: iterations a second over those of the plain loop"
            targets.append(Target(what, ratio, ">=", WANTED_RATIO, "times"))
    columns = ("model", "ours, iterations/s", "plain, iterations/s", "rounds", "ours over plain")
    return provenance.result(
        NAME,
        "Training throughput beside a plain loop",
        "Iterations a second of `stepdial train`'s loop and of a loop written out in plain PyTorch "
        f"with the same arithmetic: {SCHEDULE['full']} Euler steps, transport cost, clipping, "
        "AdamW, float32, 1 thread.",
        [Table("Medians; the ratio is the median of those within each round.", columns, rows)],
        targets,
    )


def _decoder(folder: Path) -> tuple[Case, PlainDecoder]:
    path = folder / "corpus.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 2000, encoding="utf-8")
    recipe = _recipe(
        {"kind": "text", "path": str(path)},
        {"family": "decoder", "layers": 2, "heads": 4, "width": 128, "hidden": 512, "window": 128},
        batch=16,
    )
    dataset = open_dataset(recipe)
    torch.manual_seed(0)
    plain = PlainDecoder(recipe, dataset.sizes.vocabulary)
    return Case("character decoder", recipe, dataset, iterations=3), plain


def _images(folder: Path) -> tuple[Case, PlainImages]:
    draw = np.random.default_rng(0)
    path = folder / "images.npz"
    np.savez(
        path,
        x=draw.integers(0, 256, (2000, 28, 28), dtype=np.uint8),
        y=draw.integers(0, 10, 2000, dtype=np.uint8),
    )
    pixels, classes = f"{path.name}:x", f"{path.name}:y"
    recipe = _recipe(
        {"kind": "images", "path": str(folder), "train": pixels, "train_labels": classes},
        {
            "family": "image",
            "layers": 1,
            "heads": 1,
            "width": 64,
            "hidden": 0,
            "patch": 7,
            "norm": "none",
            "final_norm": "none",
            "pool": "first",
        },
        batch=100,
    )
    dataset = open_dataset(recipe)
    torch.manual_seed(0)
    plain = PlainImages(recipe, side=28, classes=10)
    return Case("image transformer", recipe, dataset, iterations=10), plain


def _recipe(data: dict[str, object], model: dict[str, object], batch: int) -> Recipe:
    optim = {**OPTIM, "batch": batch}
    table = {"name": NAME, "data": data, "model": model, "steps": SCHEDULE, "optim": optim}
    return recipe_from(table, NAME)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
