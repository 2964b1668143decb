"""What the layers of a classifier multiply, measured: the least and the greatest number of each.

Runs the float32 graphs of all rungs on rows that the model was not trained on. Knows layers and
rows; not what becomes of the ranges.
"""

from collections.abc import Iterable, Iterator, Sequence

import onnx
import onnxruntime as ort
from onnx import helper

from export.integers import Range, Ranges
from export.layers import Layers, node_of
from serve.runtime.protocol import RowArray
from train.data.batch import Dataset

ROWS, ROWS_AT_ONCE = 32, 8
NOTHING_UNSEEN = (
    "the data has no validation rows to measure activations on, so its 8-bit weights are blocks "
    "with scales, as of a decoder, which can be slower than float32 here. Give it validation rows "
    "(data.held_out) and export again, or use --precision fp32"
)


def unseen_rows(dataset: Dataset) -> Iterator[RowArray]:
    """A few rows of the training split that nothing was trained on."""
    rows = 0
    for batch in dataset.validation(ROWS_AT_ONCE):
        yield batch.inputs[0].contiguous().numpy()
        rows += batch.rows
        if rows >= ROWS:
            return


def measured_ranges(graphs: Iterable[onnx.ModelProto], rows: Iterable[RowArray]) -> Ranges:
    """The ranges of all layers of these graphs, by the digests of their matrices."""
    ranges: dict[str, Range] = {}
    batches = list(rows)
    for graph in graphs:
        for digest, found in _measured(graph, batches):
            known = ranges.get(digest, Range(0.0, 0.0))
            ranges[digest] = Range(min(known.low, found.low), max(known.high, found.high))
    return ranges


def _measured(model: onnx.ModelProto, batches: Sequence[RowArray]) -> Iterator[tuple[str, Range]]:
    """A digest and a range for each layer and batch."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    graph, layers = watched.graph, Layers(model.graph)
    digests = []
    del graph.output[:]
    for node in model.graph.node:
        layer = layers.of(node)
        if layer is None:
            continue
        for op, name in (("ReduceMin", "least"), ("ReduceMax", "greatest")):
            output = f"{node.output[0]}/{name}"
            graph.node.append(node_of(op, [layer.x], output, keepdims=0))
            graph.output.append(helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, []))
        digests.append(layers.digest(layer))
    if not digests:
        return
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # so that two exports measure the same to the last bit
    options.log_severity_level = 3
    session = ort.InferenceSession(watched.SerializeToString(), options)
    (taken,) = session.get_inputs()
    for batch in batches:
        found = iter(session.run(None, {taken.name: batch}))
        for digest, low, high in zip(digests, found, found, strict=True):
            yield digest, Range(float(low), float(high))
