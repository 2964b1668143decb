"""How long a training pass takes by the length of its text: TransEvolve beside a transformer.

    python -m benchmarks.papers.speed

Forward, loss and backward of one text of the recipe `transevolve-imdb-chars`, in PyTorch, float32.
No dropout: with it PyTorch has no fused attention on a CPU. The letters are random, which changes
no time.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.lab import Cell, Provenance, Result, Table, clocked, interleave, parser, run
from train.data.batch import Sizes
from train.model import build_model, count_parameters
from train.recipe import load_recipe

NAME = "speed"
FOLDER = Path(__file__).parent  # speed.json, which the results page shows
RECIPE = "transevolve-imdb-chars"
PLAIN = ("model.dropout=0", "model.attention_dropout=0")
TRANSFORMER = ("model.block=transformer", "model.layers=6")
BASE, UNFUSED = "transformer", "transformer, attention not fused"
MODELS = {
    BASE: TRANSFORMER,
    UNFUSED: TRANSFORMER,
    "fullFF-1": (),
    "fullFF-2": ("model.layers=2", "model.evolve=3"),
    "randomFF-1": ("model.feedforward=random",),
    "randomFF-2": ("model.feedforward=random", "model.layers=2", "model.evolve=3"),
}
LENGTHS = (1000, 2000, 3000, 4000)
QUICK = (32, 64)
SIZES = Sizes(vocabulary=100, classes=2)
ROUNDS = 3


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    parsed = made.parse_args(arguments)
    if not parsed.quick:
        parsed.results = parsed.results or FOLDER
    lengths, rounds = (QUICK, 1) if parsed.quick else (LENGTHS, ROUNDS)
    torch.set_num_threads(1)
    return run(
        f"papers.{NAME}", arguments, parsed, lambda provenance: timed(provenance, lengths, rounds)
    )


def timed(provenance: Provenance, lengths: Sequence[int], rounds: int) -> Result:
    """Each model at each length; the models of a length take turns."""
    rows: dict[str, list[Cell]] = {}
    models = {name: built(overrides) for name, overrides in MODELS.items()}
    for name, model in models.items():
        rows[name] = [name, count_parameters(model)]
    for length in lengths:
        print(f"{length:,} characters", file=sys.stderr, flush=True)
        text = torch.randint(1, SIZES.vocabulary, (1, length))
        calls = {name: training_pass(name, model, text) for name, model in models.items()}
        for name, times in interleave(calls, 0.0, rounds).items():
            rows[name].append(statistics.median(times))
    table = Table(
        "Milliseconds of the processor for one text, by its length in characters",
        ("model", "parameters", *(f"{length:,}" for length in lengths)),
        list(rows.values()),
    )
    about = f"Forward, loss and backward, one thread; medians of {rounds}."
    return provenance.result(NAME, "Speed by length", about, [table], [])


def built(overrides: Sequence[str]) -> nn.Module:
    torch.manual_seed(0)
    recipe = load_recipe(RECIPE, [*PLAIN, *overrides])
    return build_model(recipe.model, SIZES, recipe.steps).train()


def training_pass(name: str, model: nn.Module, text: Tensor) -> Callable[[], float]:
    """Gives the milliseconds of one pass."""
    target = torch.zeros(1, dtype=torch.long)

    def once() -> None:
        model.zero_grad()
        with sdpa_kernel(SDPBackend.MATH) if name == UNFUSED else nullcontext():
            F.cross_entropy(model(text).logits, target).backward()

    return partial(_milliseconds, once)


def _milliseconds(call: Callable[[], object]) -> float:
    return clocked(call, 0.0).cpu_ms


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
