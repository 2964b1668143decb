"""The matrix products of an encoder and nothing else: no graph of it can take less time than they.

The same runtime multiplies matrices of the same sizes, in float32 and in one thread, with buffers
bound in advance. It deliberately leaves out norms, activations, softmax, masks and every copy.
"""

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from serve.runtime.protocol import FloatArray
from serve.runtime.session import bind_input, bind_output
from train.recipe import ModelConfig

Shape = tuple[int, ...]


def products(model: ModelConfig, steps: int, rows: int, length: int) -> Callable[[], None]:
    """A call that multiplies what so many steps multiply."""
    layer = _session(_layer(model, rows, length))
    times = steps * model.layers

    def call() -> None:
        for _ in range(times):
            layer()

    return call


def _layer(model: ModelConfig, B: int, N: int) -> list[tuple[Shape, Shape, bool]]:
    """The two sides of each product of a layer, and whether the second one is a weight."""
    D, H, hidden = model.width, model.heads, model.hidden
    d = D // H
    return [
        ((B, N, D), (D, 3 * D), True),
        ((B, H, N, d), (B, H, d, N), False),
        ((B, H, N, N), (B, H, N, d), False),
        ((B, N, D), (D, D), True),
        ((B, N, D), (D, hidden), True),
        ((B, N, hidden), (hidden, D), True),
    ]


def _session(pairs: list[tuple[Shape, Shape, bool]]) -> Callable[[], None]:
    """One graph with all of the products, each from inputs of its own."""
    draw = np.random.default_rng(0)
    fed: dict[str, FloatArray] = {}
    made: dict[str, FloatArray] = {}
    weights, nodes = [], []
    for index, (left, right, is_weight) in enumerate(pairs):
        names = f"left{index}", f"right{index}", f"product{index}"
        matrix = draw.standard_normal(right, dtype=np.float32)
        fed[names[0]] = draw.standard_normal(left, dtype=np.float32)
        if is_weight:
            weights.append(numpy_helper.from_array(matrix, names[1]))
        else:
            fed[names[1]] = matrix
        made[names[2]] = np.empty((*left[:-1], right[-1]), dtype=np.float32)
        nodes.append(helper.make_node("MatMul", names[:2], names[2:]))
    inputs, outputs = ([_value(*one) for one in side.items()] for side in (fed, made))
    graph = helper.make_graph(nodes, "products", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 21)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    data = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, array in fed.items():
        bind_input(binding, name, array)
    for name, array in made.items():
        bind_output(binding, name, array)
    kept = (fed, made)  # the binding knows only addresses

    def call() -> None:
        assert kept
        session.run_with_iobinding(binding)

    return call


def _value(name: str, array: FloatArray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
