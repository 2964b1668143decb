"""The graph files of a bundle, and the one file of their weights.

Knows which graphs a bundle has and in which form each precision wants them; not what is in them.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import onnx

from export.draft import WEIGHTS, encoder_name, graph_name, step_files
from export.integers import Ranges, use_integers
from export.parts import Traced
from export.quantise import quantise
from export.ranges import measured_ranges
from export.shapes import keep_shapes
from export.small_caches import Scales, cache_bytes
from export.step_graphs import stitch_step
from export.stitch import stitch
from export.weights import WeightsFile
from serve.bundle import LABELLING, Precision
from serve.runtime.protocol import RowArray


@dataclasses.dataclass(frozen=True, slots=True)
class Ladder:
    """The rungs to be made."""

    steps: tuple[int, ...]
    method: str


def write_graphs(
    folder: Path,
    traced: Traced,
    ladder: Ladder,
    precision: Precision,
    unseen: Iterable[RowArray] = (),
    scales: Scales | None = None,
) -> None:
    """Write all graphs and the weights; each graph is checked as it then lies there.

    Unseen are the rows on which a classifier of fewer bits is measured, scales those of its caches
    if a decoder keeps them as bytes.
    """
    weights = WeightsFile(WEIGHTS)
    ranges: Ranges = {}
    if precision == "int8" and traced.task in LABELLING:
        whole = (stitch(traced.graph, ladder.method, steps) for steps in ladder.steps)
        ranges = measured_ranges(whole, unseen)
    files = step_files(traced)
    if traced.step is not None and files is not None:
        graphs = stitch_step(traced.graph, traced.step, ladder.method)._asdict()
        if scales is not None:
            cache_bytes(graphs["step"].graph, scales)
        for field, name in files.graphs.items():
            _write(folder / name, graphs[field], weights, precision, ranges, plain=False)
    for steps in ladder.steps:
        graph = stitch(traced.graph, ladder.method, steps)
        _write(folder / graph_name(steps), graph, weights, precision, ranges, plain=True)
        if traced.encoder is not None:
            encoder = stitch(traced.encoder, ladder.method, steps)
            _write(folder / encoder_name(steps), encoder, weights, precision, ranges, plain=True)
    weights.write(folder)
    for path in folder.glob("*.onnx"):
        onnx.checker.check_model(str(path))


def _write(
    path: Path,
    graph: onnx.ModelProto,
    weights: WeightsFile,
    precision: Precision,
    ranges: Ranges,
    plain: bool,
) -> None:
    if precision == "int8":
        use_integers(graph, ranges, plain)
        quantise(graph, plain)
    weights.externalise(graph)
    if plain:
        keep_shapes(graph)
    path.write_bytes(graph.SerializeToString(deterministic=True))
