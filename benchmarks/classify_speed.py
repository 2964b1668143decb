"""Milliseconds to classify a text on one core, beside eager PyTorch.

    python -m benchmarks.classify_speed

The model is a classifier of 3 layers and width 256 with random weights that reads 512 tokens, in
float32 and in whole numbers of 8 bits, as one whole graph and as graphs of one step. PyTorch runs
the model as it is, with its mask of padding, and also without one, since no text here is shorter.
Beside them stand the matrix products alone, which no graph can be faster than. All take turns in
one thread.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from benchmarks import reference
from benchmarks.lab import (
    Cell,
    Provenance,
    Result,
    Table,
    Target,
    clocked,
    interleave,
    median_ratio,
    parser,
    run,
)
from export.run import Origin
from serve.runtime import open_model
from serve.runtime.device import HOST
from serve.runtime.protocol import FloatArray, IntArray
from train.model import OTTransformer, as_embedded
from train.recipe import ModelConfig

# The matrix products of an encoder and nothing else: no graph of it can take less time than they.
# The same runtime multiplies matrices of the same sizes, in float32 and in one thread, with
# buffers bound in advance.


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
        HOST.bind_input(binding, name, array)
    for name, array in made.items():
        HOST.bind_output(binding, name, array)
    kept = (fed, made)  # the binding knows only addresses

    def call() -> None:
        assert kept
        session.run_with_iobinding(binding)

    return call


def _value(name: str, array: FloatArray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)


NAME = "classify_speed"
STEPS, BATCHES = 4, (1, 8)
WANTED_RATIO = 0.55
TORCH, UNMASKED = "torch", "torch, without a mask"
WHOLE, SINGLE = "whole graph", "single steps"
PRODUCTS = "fp32, products alone"

Call = Callable[[], object]


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, parsed.quick))


def measure(quick: bool, provenance: Provenance) -> Result:
    torch.set_num_threads(1)
    origin = reference.classifier(quick)
    rows: list[list[Cell]] = []
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as folder:
        ours = _our_ways(origin, Path(folder))
        for batch in BATCHES[:1] if quick else BATCHES:
            tokens = _tokens(origin, batch)  # (B, N)
            calls = _torch_calls(origin, tokens)
            calls |= {way: partial(call, tokens.numpy()) for way, call in ours.items()}
            difference = _difference(calls)
            calls[PRODUCTS] = products(origin.recipe.model, STEPS, *tokens.shape)
            timed = interleave(
                {way: partial(clocked, call, 0) for way, call in calls.items()},
                seconds=0 if quick else 25,
                least=1 if quick else 7,
            )
            cpu_ms = {way: [one.cpu_ms for one in samples] for way, samples in timed.items()}
            peer = min((TORCH, UNMASKED), key=lambda way: median(cpu_ms[way]))
            for way, samples in timed.items():
                ratio = median_ratio(cpu_ms[way], cpu_ms[peer])
                wall_ms = median([one.wall_ms for one in samples])
                rows.append([way, batch, median(cpu_ms[way]), wall_ms, ratio, len(samples)])
                if batch == 1 and way in (f"fp32, {WHOLE}", f"fp32, {SINGLE}", f"int8, {SINGLE}"):
                    what = f"{way}, batch 1, of the faster way of torch"
                    targets.append(Target(what, ratio, "<=", WANTED_RATIO, "times"))
        what = "largest difference of a logit from torch"
        targets.append(Target(what, difference, "<=", 1e-4))
    columns = ("way", "rows", "cpu ms", "wall ms", "of torch", "rounds")
    caption = (
        "Medians; of torch: of the faster of its two ways, the median of those in each round. "
        "Products alone: multiplying matrices of the same sizes, without anything between."
    )
    return provenance.result(
        NAME,
        "Classifying on one core",
        f"Texts of {tokens.shape[1]} tokens at {STEPS} Euler steps, in one thread. cpu: time of "
        "the thread on the processor; the same as wall on a machine at rest.",
        [Table(caption, columns, rows)],
        targets,
    )


def _our_ways(origin: Origin, folder: Path) -> dict[str, Callable[[IntArray], object]]:
    ways: dict[str, Callable[[IntArray], object]] = {}
    for precision, bundle in reference.bundles(origin, folder, (STEPS,)).items():
        model = open_model(bundle, threads=1)
        ways[f"{precision}, {WHOLE}"] = model.unrolled(STEPS).forward
        ways[f"{precision}, {SINGLE}"] = model.step_classifier(STEPS).run
    return ways


def _torch_calls(origin: Origin, tokens: Tensor) -> dict[str, Call]:
    model = origin.model
    assert isinstance(model, OTTransformer)

    @torch.inference_mode()
    def masked() -> Tensor:
        logits: Tensor = model(tokens, steps=STEPS).logits
        return logits

    @torch.inference_mode()
    def unmasked() -> Tensor:
        x = as_embedded(model.embed(tokens)).state  # (B, N, D)
        for _ in range(STEPS):
            x = x + model.T / STEPS * model.velocity(x)
        logits: Tensor = model.head(x)
        return logits

    return {TORCH: masked, UNMASKED: unmasked}


def _tokens(origin: Origin, batch: int) -> Tensor:
    """Texts as long as the window."""
    tokens = next(iter(origin.dataset.held_out(1))).inputs[0]
    assert tokens.shape[1] == origin.recipe.model.window
    return tokens.repeat(batch, 1)  # (B, N)


def _difference(calls: Mapping[str, Call]) -> float:
    """The farthest that a logit of float32 is from torch's, of its largest."""
    expected = np.asarray(calls[TORCH]())
    others = (np.asarray(call()) for way, call in calls.items() if not way.startswith("int8"))
    return max(float(np.abs(each - expected).max()) for each in others) / float(
        np.abs(expected).max()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
