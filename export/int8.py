"""8-bit weights, and 8-bit matrix products.

Symmetric, per output channel and block of 64 inputs, rounded to the nearest: no data is needed,
and the same graph gives the same bytes. Tables that are looked up become bytes where they are most
of the file, as those of pretrained models are. Layers of a classifier that were measured multiply
whole numbers instead; those of a pretrained model are bytes in the file and floats in memory.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from export.pieces import with_branches
from serve.bundle import Precision
from serve.runtime.protocol import RowArray
from train.data.batch import Dataset

# The layers of a graph: products with a large matrix, as torch's exporter writes them. They are
# found and replaced.


CONTRIB = "com.microsoft"
# Smaller matrices fit the fast caches as they are: bytes would cost agreement and save no time.
LEAST_ELEMENTS = 32768


@dataclass(frozen=True, slots=True)
class Layer:
    """x times a large matrix, which stands (N, K), or else (K, N)."""

    x: str
    weight: str
    stands: bool
    bias: str


NOTHING_LARGE = (
    f"no matrix that it multiplies by has {LEAST_ELEMENTS:,} numbers or more, so all weights stay "
    "float32: 8 bits save nothing in a model this small, and --precision fp32 is the same bundle"
)


def matrices_of(graph: onnx.GraphProto, least: int) -> dict[str, TensorProto]:
    """The float32 matrices of a graph that have so many numbers or more, by name."""
    return {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.FLOAT
        and len(tensor.dims) == 2
        and tensor.dims[0] * tensor.dims[1] >= least
    }


class Layers:
    """Which nodes of a graph are layers, and their matrices."""

    def __init__(self, graph: onnx.GraphProto, least: int | None = None) -> None:
        """`least` numbers make a matrix large, if not LEAST_ELEMENTS."""
        least = LEAST_ELEMENTS if least is None else least
        self._graph = graph
        self._large = matrices_of(graph, least)
        self._transposed = {
            node.output[0]: node.input[0]
            for node in graph.node
            if node.op_type == "Transpose"
            and node.input[0] in self._large
            and _attributes(node).get("perm", [1, 0]) == [1, 0]
        }

    @property
    def some(self) -> bool:
        """Whether there are any."""
        return bool(self._large) and any(self.of(node) for node in self._graph.node)

    def knows(self, name: str) -> bool:
        """Whether that is a large matrix."""
        return name in self._large

    def of(self, node: onnx.NodeProto) -> Layer | None:
        """What the node multiplies, if it is a layer."""
        if node.domain or node.op_type not in ("MatMul", "Gemm"):
            return None
        facts = _attributes(node)
        if facts.get("transA", 0) or facts.get("alpha", 1) != 1 or facts.get("beta", 1) != 1:
            return None
        x, weight, bias = (*node.input, "")[:3]
        stands = bool(facts.get("transB", 0))
        if weight in self._transposed:
            weight, stands = self._transposed[weight], not stands
        return Layer(x, weight, stands, bias) if weight in self._large else None

    def matrix(self, layer: Layer) -> npt.NDArray[np.float32]:
        """Its matrix (N, K)."""
        values = numpy_helper.to_array(self._large[layer.weight])
        return values if layer.stands else values.T

    def digest(self, layer: Layer) -> str:
        """The same for equal matrices, whatever their graphs call them and how they stand."""
        matrix = np.ascontiguousarray(self.matrix(layer))
        return f"{matrix.shape} {hashlib.sha256(matrix.data).hexdigest()}"


def replace_nodes(
    model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], made: Sequence[TensorProto]
) -> None:
    """Give a graph these nodes and more tensors, in place, without what is then used by none."""
    graph = model.graph
    needed = {value.name for value in graph.output}
    kept: list[onnx.NodeProto] = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            needed.update(name for one in with_branches([node]) for name in one.input)
            kept.append(node)
    initializers = [tensor for tensor in (*graph.initializer, *made) if tensor.name in needed]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(reversed(kept))
    graph.initializer.extend(initializers)
    domains = {opset.domain for opset in model.opset_import}
    if CONTRIB not in domains and any(node.domain == CONTRIB for node in with_branches(kept)):
        model.opset_import.append(helper.make_opsetid(CONTRIB, 1))


def node_of(op: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    """A node of one output, by whose name it goes."""
    return helper.make_node(op, inputs, [output], name=output, **attributes)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


BLOCK = 64
ZERO = 128  # the byte of 0.0, as MatMulNBits takes it unless told otherwise
LARGEST = 127  # the farthest a byte is from ZERO, either way
UNEVEN_BLOCKS = 64, 32, 16, 8  # of weights that are floats in memory; the first that fits
TABLE_BLOCK = 64
LEAST_MERGED = 4096  # numbers of a matrix that is a part of others
LEAST_TABLE = 1 << 21  # numbers of a table that becomes bytes: 8 MB as float32
# Activations to 8 bits, a row and block at a time; otherwise it is many times slower than float32.
ACCURACY_LEVEL = 4


def check_precision(word: str) -> Precision:
    """The precision that the word names; ValueError says what there is instead."""
    if word in get_args(Precision):
        return cast(Precision, word)
    if "dynamic" in word.lower():
        raise ValueError(
            f"the precision {word} is not built: it rounds activations with one scale for a whole "
            "tensor, so an answer would depend on the requests that happen to share its batch, and "
            "a decoder's token on the tokens after it. Choose int8: 8-bit weights, with a scale "
            "for every 64 activations of one position, so that rows stay independent"
        )
    raise ValueError(f"unknown precision {word}: choose one of {', '.join(get_args(Precision))}")


def quantise(model: onnx.ModelProto, plain: bool, floats: bool = False) -> None:
    """Give a float32 graph of opset 21 or later 8-bit weights, in place.

    Plain, bytes pass DequantizeLinear into a float32 product, for any runtime. Otherwise products
    become MatMulNBits of ONNX Runtime. The bytes and the scales are the same.

    With `floats` a runtime makes float32 weights of the bytes when it loads the graph, plain or
    not: no activation is rounded, and a product takes as long as in float32.
    """
    quantising = _Quantising(model.graph, plain, floats)
    nodes = [made for node in model.graph.node for made in quantising.rewritten(node)]
    replace_nodes(model, nodes, list(quantising.made.values()))


def to_bytes(matrix: npt.NDArray[np.float32]) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Bytes (N, blocks, 64) and scales (N, blocks) of a matrix (N, K), the last block filled up."""
    N, K = matrix.shape
    blocks = -(-K // BLOCK)
    padded = np.zeros((N, blocks * BLOCK), dtype=np.float32)
    padded[:, :K] = matrix
    blocked = padded.reshape(N, blocks, BLOCK)
    scales = np.abs(blocked).max(axis=2) / np.float32(LARGEST)  # (N, blocks)
    scales[scales < np.finfo(np.float32).tiny] = 1  # no number of use, or none but 0
    return (np.rint(blocked / scales[:, :, None]) + ZERO).astype(np.uint8), scales


_MOST_HALF = float(np.finfo(np.float16).max)


def to_uneven_bytes(
    matrix: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Bytes (N, blocks, size), scales and least numbers (N, blocks, 1) of a matrix (N, K).

    Scales and least numbers have 16 bits, so rounded that no number of a block is beyond them.
    """
    N, K = matrix.shape
    size = next(size for size in (*UNEVEN_BLOCKS, K) if K % size == 0)
    blocked = matrix.reshape(N, K // size, size)
    lows = -_rounded_up(-blocked.min(axis=2, keepdims=True))  # (N, blocks, 1)
    above = blocked - lows.astype(np.float32)
    scales = _rounded_up(above.max(axis=2, keepdims=True) / np.float32(LEVELS))
    scales[scales == 0] = 1  # all of a block is the same
    return np.rint(above / scales.astype(np.float32)).astype(np.uint8), scales, lows


def table_to_bytes(
    table: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """Bytes (V, blocks, D / blocks) and scales (V, blocks, 1) of a table (V, D)."""
    V, D = table.shape
    blocked = table.reshape(V, D // TABLE_BLOCK if D % TABLE_BLOCK == 0 else 1, -1)
    scales = _rounded_up(np.abs(blocked).max(axis=2, keepdims=True) / np.float32(LARGEST))
    scales[scales == 0] = 1  # none but 0
    return np.rint(blocked / scales.astype(np.float32)).astype(np.int8), scales


def _rounded_up(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """The least numbers of 16 bits that are not below these."""
    if bool((values > _MOST_HALF).any()):
        raise ValueError(
            "a weight is so large that a scale of 16 bits for its bytes is not enough: use "
            "--precision fp32"
        )
    near = np.maximum(values, -_MOST_HALF).astype(np.float16)
    up = np.nextafter(near, np.float16(_MOST_HALF))
    return np.where(near.astype(np.float32) < values, up, near)


def looks_up_rows(node: onnx.NodeProto) -> bool:
    return all(each.i == 0 for each in node.attribute if each.name == "axis")


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix (N, K) that has become NAME.bytes, NAME.scales and, where plain, NAME.zeros."""

    name: str
    N: int
    K: int


class _Quantising:
    """The products of one graph, rewritten; a matrix that many of them use is made once."""

    def __init__(self, graph: onnx.GraphProto, plain: bool, floats: bool) -> None:
        self.plain, self.floats = plain, floats
        self.made: dict[str, onnx.TensorProto] = {}
        self._matrices: dict[tuple[str, bool], _Matrix] = {}
        self._layers = Layers(graph)
        self._constants = {tensor.name for tensor in graph.initializer}
        self._merged = matrices_of(graph, LEAST_MERGED)
        self._tables = matrices_of(graph, LEAST_TABLE)

    def rewritten(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The node, or what takes its place."""
        if node.op_type == "Gather" and node.input[0] in self._tables and looks_up_rows(node):
            return self._looked_up(node)
        if self.floats and self._constants.issuperset(filter(None, node.input)):
            self._constants.update(node.output)
            return self._of_bytes(node)
        layer = self._layers.of(node)
        if layer is None:
            return [node]
        key = layer.weight, layer.stands
        nodes: list[onnx.NodeProto] = []
        if key not in self._matrices:
            self._matrices[key] = matrix = self._matrix(layer)
            if self.floats:
                nodes += self._floats(matrix, self._layers.matrix(layer))
            else:
                self._in_bytes(matrix, self._layers.matrix(layer))
                nodes += self._dequantised(matrix) if self.plain else []
        matrix, (answer,) = self._matrices[key], node.output
        times = f"{answer}/times" if layer.bias else answer
        if self.plain or self.floats:
            nodes.append(node_of("MatMul", [layer.x, matrix.name], times))
        else:
            nodes.append(_times_bytes(layer.x, matrix, times))
        if layer.bias:
            nodes.append(node_of("Add", [times, layer.bias], answer))
        return nodes

    def _of_bytes(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """A node that makes weights of weights, which are bytes before."""
        nodes: list[onnx.NodeProto] = []
        for index, name in enumerate(node.input):
            if name not in self._merged:
                continue
            if (name, True) not in self._matrices:
                values = numpy_helper.to_array(self._merged[name])
                matrix = _Matrix(f"{name}.rows", *values.shape)
                self._matrices[name, True] = matrix
                nodes += self._floats(matrix, values)
            node.input[index] = f"{name}.rows/rows"
        return [*nodes, node]

    def _looked_up(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Rows of bytes, each times its scale."""
        table, index = node.input
        name, (answer,) = f"{table}.table", node.output
        if f"{name}.bytes" not in self.made:
            data, scales = table_to_bytes(numpy_helper.to_array(self._tables[table]))
            self._make(f"{name}.bytes", data)
            self._make(f"{name}.scales", scales)
            self._make(f"{name}.joined", np.array([0, 0, -1], dtype=np.int64))
        rows, wide, scales_of = f"{answer}/bytes", f"{answer}/wide", f"{answer}/scales"
        return [
            node_of("Gather", [f"{name}.bytes", index], rows),  # (B, N, blocks, D / blocks)
            node_of("Cast", [rows], wide, to=onnx.TensorProto.FLOAT),
            node_of("Gather", [f"{name}.scales", index], scales_of),  # (B, N, blocks, 1)
            node_of("Cast", [scales_of], f"{scales_of}/wide", to=onnx.TensorProto.FLOAT),
            node_of("Mul", [wide, f"{scales_of}/wide"], f"{answer}/blocks"),
            node_of("Reshape", [f"{answer}/blocks", f"{name}.joined"], answer),
        ]

    def _matrix(self, layer: Layer) -> _Matrix:
        shape = self._layers.matrix(layer).shape
        return _Matrix(f"{layer.weight}.{'rows' if layer.stands else 'columns'}", *shape)

    def _in_bytes(self, matrix: _Matrix, values: npt.NDArray[np.float32]) -> None:
        data, scales = to_bytes(values)
        self._make(f"{matrix.name}.bytes", data.reshape(len(data), -1) if self.plain else data)
        self._make(f"{matrix.name}.scales", scales)

    def _floats(self, matrix: _Matrix, values: npt.NDArray[np.float32]) -> list[onnx.NodeProto]:
        """The matrix as a value (K, N) of its own name; constant, so it is made once, at loading.

        Not by DequantizeLinear, which ONNX Runtime keeps for every call.
        """
        name = matrix.name
        data, scales, lows = to_uneven_bytes(values)
        self._make(f"{name}.bytes", data)
        self._make(f"{name}.scales", scales)
        self._make(f"{name}.lows", lows)
        self._make(f"{name}.shape", np.array([matrix.N, matrix.K], dtype=np.int64))
        return [
            *(
                node_of("Cast", [f"{name}.{part}"], f"{name}/{part}", to=onnx.TensorProto.FLOAT)
                for part in ("bytes", "scales", "lows")
            ),
            node_of("Mul", [f"{name}/bytes", f"{name}/scales"], f"{name}/above"),
            node_of("Add", [f"{name}/above", f"{name}/lows"], f"{name}/blocks"),
            node_of("Reshape", [f"{name}/blocks", f"{name}.shape"], f"{name}/rows"),
            node_of("Transpose", [f"{name}/rows"], name, perm=[1, 0]),
        ]

    def _dequantised(self, matrix: _Matrix) -> list[onnx.NodeProto]:
        """The matrix as a value (K, N) of its own name, by standard operators."""
        name = matrix.name
        zeros = np.full((matrix.N, -(-matrix.K // BLOCK)), ZERO, dtype=np.uint8)
        self._make(f"{name}.zeros", zeros)
        value = f"{name}/padded"
        inputs = [f"{name}.{part}" for part in ("bytes", "scales", "zeros")]
        nodes = [node_of("DequantizeLinear", inputs, value, axis=1, block_size=BLOCK)]
        if matrix.K % BLOCK:
            bounds = {f"{name}.from": 0, f"{name}.to": matrix.K, f"{name}.axis": 1}
            for bound, at in bounds.items():
                self._make(bound, np.array([at], dtype=np.int64))
            nodes.append(node_of("Slice", [value, *bounds], f"{name}/cut"))
            value = f"{name}/cut"
        return [*nodes, node_of("Transpose", [value], name, perm=[1, 0])]

    def _make(self, name: str, array: npt.NDArray[Any]) -> None:
        self.made[name] = numpy_helper.from_array(array, name)


def _times_bytes(x: str, matrix: _Matrix, answer: str) -> onnx.NodeProto:
    inputs = [x, f"{matrix.name}.bytes", f"{matrix.name}.scales"]
    return node_of(
        "MatMulNBits",
        inputs,
        answer,
        domain=CONTRIB,
        K=matrix.K,
        N=matrix.N,
        bits=8,
        block_size=BLOCK,
        accuracy_level=ACCURACY_LEVEL,
    )


# 8-bit products of whole numbers: what a classifier of fewer bits multiplies. A matrix becomes
# bytes with a scale for each output. What it multiplies becomes bytes by one scale and one zero,
# measured once and the same for ever: so an answer depends on no other row of its batch. Bytes of
# a matrix use half their range: processors without instructions of their own for 8 bits add two
# products in 16 bits, which 2 * 255 * 64 fits and 2 * 255 * 127 does not.


LARGEST_IN_MATRIX = 64  # the farthest a byte of a matrix is from 0
LEVELS = 255


class Range(NamedTuple):
    """The least and the greatest of what a layer multiplies, with 0 between them."""

    low: float
    high: float

    def scale(self) -> np.float32:
        scale = np.float32((self.high - self.low) / LEVELS)
        return scale if scale >= np.finfo(np.float32).tiny else np.float32(1)

    def zero(self) -> np.uint8:
        """The byte of 0."""
        return np.uint8(np.rint(-self.low / self.scale()))


Ranges = Mapping[str, Range]  # by the digest of the matrix


def use_integers(model: onnx.ModelProto, ranges: Ranges, plain: bool) -> None:
    """Give the layers whose range is known products of bytes, in place; others stay as they are.

    Plain, as QuantizeLinear and DequantizeLinear around float32 products, which runtimes know how
    to join. Otherwise as ONNX Runtime's operator, which adds the bias too. The bytes are the same.
    """
    writing = _Rewriting(model.graph, ranges, plain)
    nodes = [made for node in model.graph.node for made in writing.rewritten(node)]
    replace_nodes(model, nodes, list(writing.made.values()))


class _Rewriting:
    """The layers of one graph, rewritten; a matrix that many of them use is made once."""

    def __init__(self, graph: onnx.GraphProto, ranges: Ranges, plain: bool) -> None:
        self.plain = plain
        self.made: dict[str, onnx.TensorProto] = {}
        self._ranges, self._layers = ranges, Layers(graph)
        self._known: dict[tuple[str, bool], str | None] = {}  # the matrix in bytes
        self._sums = {} if plain else _sums(graph)
        self._left_out: set[str] = set()  # sums that a product makes

    def rewritten(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The node, or what takes its place."""
        if node.output and node.output[0] in self._left_out:
            return []
        layer = self._layers.of(node)
        if layer is None:
            return [node]
        nodes: list[onnx.NodeProto] = []
        key = layer.weight, layer.stands
        if key not in self._known:
            self._known[key] = self._in_bytes(layer)
            if self.plain and (name := self._known[key]) is not None:
                parts = [f"{name}.bytes", f"{name}.scales"]
                nodes.append(node_of("DequantizeLinear", parts, name, axis=1))
        matrix = self._known[key]
        if matrix is None:
            return [node]
        write = self._plain if self.plain else self._fused
        return nodes + write(layer, matrix, node.output[0])

    def _plain(self, layer: Layer, matrix: str, answer: str) -> list[onnx.NodeProto]:
        around = [f"{matrix}.scale", f"{matrix}.zero"]
        x, times = f"{answer}/x", f"{answer}/times" if layer.bias else answer
        nodes = [
            node_of("QuantizeLinear", [layer.x, *around], f"{x}/bytes"),
            node_of("DequantizeLinear", [f"{x}/bytes", *around], x),
            node_of("MatMul", [x, matrix], times),
        ]
        return [*nodes, node_of("Add", [times, layer.bias], answer)] if layer.bias else nodes

    def _fused(self, layer: Layer, matrix: str, answer: str) -> list[onnx.NodeProto]:
        bias = layer.bias
        if not bias and answer in self._sums:
            answer, bias = self._sums[answer]
            self._left_out.add(answer)
        x, scale, zero = f"{answer}/bytes", f"{matrix}.scale", f"{matrix}.zero"
        inputs = [x, f"{matrix}.bytes", scale, f"{matrix}.scales", zero, "", bias]
        return [
            node_of("QuantizeLinear", [layer.x, scale, zero], x),
            node_of("MatMulIntegerToFloat", inputs, answer, domain=CONTRIB),
        ]

    def _in_bytes(self, layer: Layer) -> str | None:
        measured = self._ranges.get(self._layers.digest(layer))
        if measured is None:
            return None
        name = f"{layer.weight}.{'rows' if layer.stands else 'columns'}"
        data, scales = to_integers(self._layers.matrix(layer))
        self._make(f"{name}.bytes", data)
        self._make(f"{name}.scales", scales)
        self._make(f"{name}.scale", np.array(measured.scale()))
        self._make(f"{name}.zero", np.array(measured.zero()))
        return name

    def _make(self, name: str, array: npt.NDArray[Any]) -> None:
        self.made[name] = numpy_helper.from_array(array, name)


def to_integers(
    matrix: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Bytes (K, N) and scales (N,) of a matrix (N, K)."""
    scales = np.abs(matrix).max(axis=1) / np.float32(LARGEST_IN_MATRIX)  # (N,)
    scales[scales < np.finfo(np.float32).tiny] = 1  # no number of use, or none but 0
    return np.ascontiguousarray(np.rint(matrix / scales[:, None]).astype(np.int8).T), scales


def _sums(graph: onnx.GraphProto) -> dict[str, tuple[str, str]]:
    """Of values to which only a bias is added: the sum, and the bias."""
    biases = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 1}
    uses: dict[str, int] = {value.name: 1 for value in graph.output}
    for node in graph.node:
        for name in node.input:
            uses[name] = uses.get(name, 0) + 1
    sums = {}
    for node in graph.node:
        if node.op_type == "Add" and not biases.isdisjoint(node.input):
            value, bias = sorted(node.input, key=biases.__contains__)
            if uses[value] == 1:
                sums[value] = node.output[0], bias
    return sums


# The range of the inputs of each layer of a classifier, measured by running the float32 graphs of
# all rungs on rows that the model was not trained on.


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
