"""How long an answer of each model in the tables takes: its ONNX graph, on one core.

    python -m benchmarks.papers.latency --data DATA

Training does not change the time, so each model is built anew from its recipe. One row is answered,
as long as the model reads. Rows of a table take turns, so that they can be compared.
"""

import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

from benchmarks.lab import Cell, Provenance, Result, Table, clocked, interleave, parser, run
from benchmarks.papers.page import PUBLISHED
from benchmarks.papers.queue import PLAN, Job, read_plan
from export.graph import stitch
from export.pieces import load_exporter
from export.trace import trace
from export.verify import samples_of
from train.data import open_dataset
from train.data.batch import Dataset
from train.model import build_model
from train.recipe import Recipe, data_at

NAME = "latency"
FOLDER = Path(__file__).parent  # latency.json, which the results page shows
COLUMNS = ("model", "steps", "ms")
SECONDS, LEAST_ROUNDS, LEAST_MS = 8.0, 9, 20.0

Answer = Callable[[], float]  # gives its milliseconds


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--data", type=Path, default=Path("data"), help="where the data sets are")
    parsed = made.parse_args(arguments)
    if not parsed.quick:
        parsed.results = parsed.results or FOLDER
    torch.set_num_threads(1)
    published = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))["reduced"]

    def measure(provenance: Provenance) -> Result:
        load_exporter()
        seconds, least = (0.0, 1) if parsed.quick else (SECONDS, LEAST_ROUNDS)
        tables = []
        for one in published:
            print(one["task"], file=sys.stderr, flush=True)
            tables.append(timed(one, parsed.data, seconds, least))
        about = "Medians of the processor's time for one row, one thread, in ONNX Runtime."
        return provenance.result(NAME, "Time of an answer", about, tables, [])

    return run(f"papers.{NAME}", arguments, parsed, measure)


def timed(one: Mapping[str, Any], data: Path, seconds: float, least: int) -> Table:
    """The rows of one table, at one step and at full steps."""
    jobs = {job.group: job for job in reversed(read_plan(PLAN))}  # the first of each group
    answers: dict[tuple[str, int], Answer] = {}
    opened: dict[str, Dataset] = {}
    for _, group in one["rows"]:
        recipe = _recipe(jobs[group], data)
        kind = f"{recipe.data} {recipe.model.window}"
        if kind not in opened:
            opened[kind] = open_dataset(recipe, None)
        for steps, answer in answers_of(recipe, opened[kind], one["full"]):
            answers[group, steps] = answer
    found = interleave(answers, seconds, least)
    rows: list[list[Cell]] = [
        [group, steps, statistics.median(times)] for (group, steps), times in found.items()
    ]
    return Table(one["task"], COLUMNS, rows)


def _recipe(job: Job, data: Path) -> Recipe:
    return data_at(job.described(), str(data / job.data) if job.data else "")


def answers_of(recipe: Recipe, dataset: Dataset, full: int) -> Iterator[tuple[int, Answer]]:
    """A call for each of the counts, 1 and full; 1 alone for a model without steps."""
    torch.manual_seed(0)
    model = build_model(recipe.model, dataset.sizes, recipe.steps).eval()
    samples = samples_of(dataset, recipe.model.window, recipe.model.target_window)
    labelled = dataset.labels is not None
    parts = trace(model, samples.draw(2, 3), samples.draw(3, 5), labelled=labelled).graph
    if dataset.sizes.channels or dataset.sizes.dimensions:
        row = next(iter(dataset.held_out(1))).inputs  # they have the one size they have
    else:
        row = samples.draw(1, samples.most)
    fed = {port.name: tensor.numpy() for port, tensor in zip(parts.inputs, row, strict=True)}
    if parts.keeps:
        fed["keep"] = np.array([row[0].shape[1] - 1])
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    for steps in (1,) if model.discrete else dict.fromkeys((1, full)):
        graph = stitch(parts, recipe.steps.method, steps).SerializeToString()
        session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        yield steps, partial(_milliseconds, session, fed)


def _milliseconds(session: ort.InferenceSession, fed: Mapping[str, Any]) -> float:
    return clocked(lambda: session.run(None, fed), LEAST_MS).cpu_ms


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(f"benchmarks.papers.latency: {error}")
