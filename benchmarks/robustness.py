"""Quality of runs on disturbed held-out data: the second OT-Transformer paper's four tests.

    python -m benchmarks.robustness --runs runs/mnist-0 runs/mnist-discrete-0 --steps 1,4,20

Runs of all kinds of data may be named at once, where their data is still where it was; `--data`
says where it is now, for runs of one kind. Runs whose names differ in their last number only are
seeds of one model. A discrete transformer and a model without a transport cost belong beside an
OT-Transformer: where one is missing, the table says so.

Characters are replaced, pixels get Gaussian or uniform noise, points are left out; never in
training. The noise of a row is a function of the row, the same at every step count and for all
models of one window, which says how many rows are disturbed at once.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor

from benchmarks.lab import Cell, Provenance, Result, Table, parser, run
from train.checkpoint import Run, load_run
from train.data import open_dataset
from train.data.arrays import ImageDataset
from train.data.batch import IGNORED, Batch, Dataset
from train.quality import measure_model
from train.recipe import data_at
from train.tally import Quality

NAME = "robustness"
NOISE = (0.0, 0.01, 0.05, 0.1, 0.2, 0.5)
RATES = (0.0, 0.005, 0.01, 0.05, 0.1)
QUICK_SAMPLES = 64
# What the paper reports at those levels: of its baseline, and of OT-Transformer.
PAPER = {
    "characters": ((2.68, 2.78, 2.88, 3.65, 4.60), (1.44, 1.49, 1.55, 1.95, 2.42)),
    "gaussian": (
        (0.9297, 0.9299, 0.9296, 0.9276, 0.9170, 0.8064),
        (0.9705, 0.9705, 0.9699, 0.9689, 0.9639, 0.9010),
    ),
    "uniform": (
        (0.9297, 0.9299, 0.9298, 0.9290, 0.9264, 0.9002),
        (0.9705, 0.9703, 0.9700, 0.9697, 0.9679, 0.9557),
    ),
    "points left out": (
        (0.866, 0.866, 0.858, 0.843, 0.769, 0.345),
        (0.893, 0.893, 0.888, 0.876, 0.839, 0.554),
    ),
}

Disturb = Callable[[Batch, float, Generator], Batch]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A way to disturb a batch, and how strongly."""

    name: str
    levels: tuple[float, ...]
    apply: Disturb


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--runs", nargs="+", type=Path, required=True, metavar="RUN")
    made.add_argument("--steps", default="1,2,4,8", help="step counts (default 1,2,4,8)")
    made.add_argument("--method", help="integration method (default: each run's own)")
    made.add_argument("--data", default="", metavar="PATH", help="where the data is now")
    made.add_argument("--name", default=NAME, help="of the result (default robustness)")
    parsed = made.parse_args(arguments)
    steps = [int(count) for count in parsed.steps.split(",")]
    samples = QUICK_SAMPLES if parsed.quick else 0

    def measure(provenance: Provenance) -> Result:
        rows: list[Sequence[Cell]] = []
        kinds: dict[str, str] = {}
        for folder in parsed.runs:
            kinds[model_of(folder.name)] = kind_of(load_run(folder))
            rows += measured(folder, steps, parsed.method, parsed.data, samples)
        return _result(parsed.name, provenance, rows, kinds, samples)

    return run(NAME, arguments, parsed, measure)


def measured(
    folder: Path, steps: Sequence[int], method: str | None, data: str, samples: int
) -> list[Sequence[Cell]]:
    """The rows of one run: every disturbance of its kind of data, at every step count."""
    found = load_run(folder)
    dataset = open_dataset(data_at(found.recipe, data), found.tokenizer)
    rows: list[Sequence[Cell]] = []
    for one in disturbances(dataset):
        for count in [1] if found.model.discrete else steps:
            clean: float | None = None
            for level in one.levels:
                batches = disturbed(dataset, one, level, samples, _size(found))
                labelled = dataset.labels is not None
                chosen = method or found.recipe.steps.method
                quality = measure_model(found.model, batches, labelled, count, chosen)
                clean = quality.value if clean is None else clean
                lost = clean - quality.value if labelled else quality.value - clean
                cells = [
                    folder.name,
                    one.name,
                    count,
                    f"{level:g}",
                    *_cells(quality),
                    f"{lost:.4f}",
                ]
                rows.append(cells)
    return rows


DISCRETE, UNREGULARISED = "discrete", "lambda 0"


def model_of(run: str) -> str:
    """What seeds of one model share of their names."""
    start, _, seed = run.rpartition("-")
    return start if start and seed.isdigit() else run


def kind_of(found: Run) -> str:
    """What a model is in the papers' tables."""
    if found.model.discrete:
        return DISCRETE
    transport = found.recipe.optim.transport
    return f"OT, lambda {transport:g}" if transport else UNREGULARISED


def compared(rows: Sequence[Sequence[Cell]], kinds: Mapping[str, str]) -> list[Table]:
    """A table for each disturbance: models by levels, means over seeds, the paper's beside them."""
    found: dict[str, dict[tuple[str, Cell], dict[Cell, list[float]]]] = {}
    for run_name, name, steps, level, _, value, *_ in rows:
        of_level = found.setdefault(str(name), {}).setdefault((model_of(str(run_name)), steps), {})
        of_level.setdefault(level, []).append(float(str(value)))
    tables = []
    for name, models in found.items():
        levels = list(next(iter(models.values())))
        shown: list[Sequence[Cell]] = []
        for (model, count), values in models.items():
            seeds = len(values[levels[0]])
            cells = [mean_of(values[level]) for level in levels]
            shown.append([model, kinds[model], count, seeds, *cells])
        for what, paper in zip(("paper, baseline", "paper, OT"), PAPER.get(name, ()), strict=False):
            shown.append([what, None, None, None, *(f"{value:g}" for value in paper)])
        there = {kinds[model] for model, _ in models}
        missing = [kind for kind in (DISCRETE, UNREGULARISED) if kind not in there]
        missing += [] if any(kind.startswith("OT") for kind in there) else ["OT"]
        said = f"; not among the runs: {', '.join(missing)}" if missing else ""
        columns = ("model", "what", "steps", "seeds", *map(str, levels))
        tables.append(Table(f"{name}, by its level{said}", columns, shown))
    return tables


def mean_of(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.4f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.4f}"


def _size(found: Run) -> int:
    return max(8, 8192 // found.recipe.model.window)


def disturbances(dataset: Dataset) -> list[Disturbance]:
    """Those that the paper, or its closest test, applies to data of this kind."""
    sizes = dataset.sizes
    if isinstance(dataset, ImageDataset):
        std = torch.tensor(dataset.std).view(-1, 1, 1)  # (C, 1, 1)

        def on_pixels(noise: Callable[..., Tensor], scale: float) -> Disturb:
            """Noise on what the model reads (scale 0), or on pixels from 0 to 1 (scale 1)."""

            def apply(batch: Batch, level: float, draw: Generator) -> Batch:
                pixels = batch.inputs[0]  # (B, C, H, W)
                added = level * noise(pixels.shape, draw) / (std**scale)
                return Batch((pixels + added,), batch.targets)

            return apply

        return [
            Disturbance(f"{name}{unit}", NOISE, on_pixels(noise, scale))
            for name, noise in (("gaussian", _gaussian), ("uniform", _uniform))
            for unit, scale in (("", 0.0), (", of pixels", 1.0))
        ]
    if sizes.dimensions:
        return [Disturbance("points left out", NOISE, leave_out)]
    vocabulary = sizes.vocabulary
    if dataset.labels is not None:
        return [Disturbance("tokens, inputs only", RATES, _replacing(vocabulary, targets=False))]
    return [
        Disturbance("characters", RATES, _replacing(vocabulary, targets=True)),
        Disturbance("characters, inputs only", RATES, _replacing(vocabulary, targets=False)),
    ]


def _gaussian(shape: torch.Size, draw: Generator) -> Tensor:
    return torch.randn(shape, generator=draw)


def _uniform(shape: torch.Size, draw: Generator) -> Tensor:
    return 2 * torch.rand(shape, generator=draw) - 1


def _replacing(vocabulary: int, targets: bool) -> Disturb:
    """Tokens become others at a rate: in the text itself, or only in what the model reads."""

    def replaced(ids: Tensor, kept: Tensor, level: float, draw: Generator) -> Tensor:
        others = torch.randint(1, vocabulary, ids.shape, generator=draw)  # 0 is padding
        hit = torch.rand(ids.shape, generator=draw) < level
        return torch.where(hit & ~kept, others, ids)

    def apply(batch: Batch, level: float, draw: Generator) -> Batch:
        tokens = batch.inputs[0]  # (B, N)
        if not targets:
            return Batch((replaced(tokens, tokens == 0, level, draw),), batch.targets)
        text = torch.cat([tokens[:, :1], batch.targets], dim=1)  # (B, N + 1)
        text = replaced(text, text == IGNORED, level, draw)
        return Batch((text[:, :-1],), text[:, 1:])

    return apply


def leave_out(batch: Batch, level: float, draw: Generator) -> Batch:
    """Each cloud loses the same number of points, at random."""
    points = batch.inputs[0]  # (B, N, dimensions)
    B, N, _ = points.shape
    kept = max(1, round((1 - level) * N))
    order = torch.rand(B, N, generator=draw).argsort(1)[:, :kept].sort(1).values  # (B, kept)
    return Batch(
        (points.gather(1, order[:, :, None].expand(-1, -1, points.shape[2])),), batch.targets
    )


def disturbed(
    dataset: Dataset, one: Disturbance, level: float, samples: int, size: int
) -> Iterator[Batch]:
    """Held-out batches with noise of their own; level 0 leaves them as they are."""
    left = samples or sys.maxsize
    for place, batch in enumerate(dataset.held_out(size)):
        if left <= 0:
            return
        some = Batch(tuple(x[:left] for x in batch.inputs), batch.targets[:left])
        left -= some.rows
        draw = Generator().manual_seed(place)
        yield one.apply(some, level, draw) if level else some


def _cells(quality: Quality) -> list[Cell]:
    numbers = (quality.value, quality.low, quality.high)
    return [quality.metric, *(f"{value:.4f}" for value in numbers)]


def _result(
    name: str,
    provenance: Provenance,
    rows: Sequence[Sequence[Cell]],
    kinds: Mapping[str, str],
    samples: int,
) -> Result:
    columns = (
        *("run", "disturbance", "steps", "level", "metric", "value", "low", "high"),
        "worse by",
    )
    caption = (
        "With 95 % intervals of the rows. characters: each is another one at this rate, in the "
        "text itself; inputs only: what is to be predicted stays right. gaussian: standard "
        "deviation of the noise; uniform: drawn from [-level, level]; both on the normalised "
        "numbers that the model reads (the paper does not say, but loses about as much), or on "
        "pixels from 0 to 1. "
        "points left out: the share of each cloud that is missing."
    )
    about = "Trained on clean data, measured on disturbed held-out data"
    return provenance.result(
        name,
        "Robustness to disturbed inputs",
        f"{about}: {samples} rows." if samples else f"{about}: all of it.",
        [*compared(rows, kinds), Table(caption, columns, rows)],
        [],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
