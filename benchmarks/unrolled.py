"""A rung as one graph with caches: what a server runs that has a graph and a batch per step count.

Made from the graphs of one step, with the same operators and the same bytes of weights, so that
only the way of running differs. Knows graphs and buffers; deliberately nothing of who is compared.
"""

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from serve.bundle import Bundle
from serve.runtime.cache import CacheLayout, RowCaches
from serve.runtime.protocol import FloatArray, IntArray
from serve.runtime.session import bind_input, bind_output, cache_names


def open_unrolled(bundle: Bundle, steps: int, folder: Path, threads: int) -> ort.InferenceSession:
    """A session of its own for one rung, as its graph stands in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(bundle.folder / bundle.manifest.weights, folder)
    path = folder / f"cached-{steps}.onnx"
    onnx.save(unrolled(bundle, steps), path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def unrolled(bundle: Bundle, steps: int) -> onnx.ModelProto:
    """Embed, so many copies of the step, head; every step has caches of its own."""
    files = bundle.manifest.step
    assert files is not None and bundle.manifest.method == "euler"
    embed, step, head = (
        onnx.load(bundle.folder / name, load_external_data=False)
        for name in (files.embed, files.step, files.head)
    )
    size = np.array([bundle.manifest.T / steps], dtype=np.float32)
    weights = {"h": numpy_helper.from_array(size, "h")}
    nodes = _copied(embed, "embed", {})
    inputs = list(embed.graph.input)
    outputs: list[onnx.ValueInfoProto] = []
    x = "embed/x"
    for index in range(steps):
        here = f"step{index}"
        own = {value.name for value in step.graph.input if value.name.startswith(("k_", "v_"))}
        names = {"x": x, "h": "h", "seqlens": "embed/seqlens", "total": "embed/total"}
        nodes += _copied(step, here, names | {name: f"{name}_{index}" for name in own})
        inputs += [_renamed(one, index) for one in step.graph.input if one.name in own]
        given = [one for one in step.graph.output if one.name != "y"]
        outputs += [_renamed(one, index, f"{here}/{one.name}") for one in given]
        x = f"{here}/y"
    nodes += _copied(head, "head", {"x": x})
    inputs += [one for one in head.graph.input if one.name == "keep"]
    outputs.append(helper.make_tensor_value_info("head/logits", TensorProto.FLOAT, None))
    for model in (embed, step, head):
        weights |= {tensor.name: tensor for tensor in model.graph.initializer}
    graph = helper.make_graph(nodes, "cached", inputs, outputs, list(weights.values()))
    return helper.make_model(graph, opset_imports=step.opset_import, ir_version=step.ir_version)


def _copied(model: onnx.ModelProto, prefix: str, names: dict[str, str]) -> list[onnx.NodeProto]:
    """The nodes; values that they make get the prefix, weights keep their names."""
    made = {value for node in model.graph.node for value in node.output}
    copies = []
    for node in model.graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{prefix}/{node.name}"
        for values in (copy.input, copy.output):
            for at, value in enumerate(values):
                values[at] = f"{prefix}/{value}" if value in made else names.get(value, value)
        copies.append(copy)
    return copies


def _renamed(value: onnx.ValueInfoProto, index: int, name: str = "") -> onnx.ValueInfoProto:
    renamed = onnx.ValueInfoProto()
    renamed.CopyFrom(value)
    renamed.name = name or f"{value.name}_{index}"
    return renamed


class UnrolledRows:
    """Rows of one rung on a graph of its own, with caches that grow like those of the server."""

    def __init__(
        self, session: ort.InferenceSession, bundle: Bundle, steps: int, rows: int
    ) -> None:
        manifest = bundle.manifest
        self._session, self._rows = session, rows
        names = cache_names(1, manifest.shape.layers)
        self._slots = [
            (f"{name}_{s}", f"step{s}/{name}_out") for s in range(steps) for name in names
        ]
        self._caches = RowCaches(CacheLayout.of(manifest, manifest.rung(steps)))
        self._tokens = np.zeros((rows, 1), dtype=np.int64)  # (B, 1)
        self.past = np.zeros(rows, dtype=np.int32)  # (B,)
        self._logits = np.empty(
            (rows, 1, manifest.text_tokenizer.vocab_size), dtype=np.float32
        )  # (B, 1, V)
        self._binding: ort.IOBinding | None = None

    def read(self, prompt: IntArray) -> FloatArray:
        """All rows begin anew with this prompt (S,), one after the other; logits (B, V)."""
        self._caches.shrink(0, 0, 0)
        self._caches.reserve(0, 0, self._rows, len(prompt) + 1)
        self._binding = None
        found = []
        for row in range(self._rows):
            last = np.array([len(prompt) - 1], dtype=np.int64)
            logits = np.empty((1, 1, self._logits.shape[2]), dtype=np.float32)
            past = np.zeros(1, dtype=np.int32)
            binding = self._bound(prompt[None], past, last, logits, row, row + 1)
            self._session.run_with_iobinding(binding)
            found.append(logits[0, 0])
        self.past[:] = len(prompt)
        return np.stack(found)

    def step(self, tokens: IntArray) -> FloatArray:
        """One token a row (B,) to its logits (B, V)."""
        longest = int(self.past.max())
        if self._caches.reserve(self._rows, longest, self._rows, longest + 1):
            self._binding = None
        if self._binding is None:
            first = np.zeros(1, dtype=np.int64)
            self._binding = self._bound(self._tokens, self.past, first, self._logits, 0, self._rows)
        self._tokens[:, 0] = tokens
        self._session.run_with_iobinding(self._binding)
        self.past += 1
        return self._logits[:, 0]

    def _bound(
        self,
        tokens: IntArray,
        past: np.ndarray,
        keep: IntArray,
        logits: FloatArray,
        first: int,
        end: int,
    ) -> ort.IOBinding:
        binding = self._session.io_binding()
        self._kept = (tokens, past, keep, logits)  # bound by address
        for name, array in (("tokens", tokens), ("past", past), ("keep", keep)):
            bind_input(binding, name, array)
        for (taken, given), array in zip(self._slots, self._caches.arrays, strict=True):
            bind_input(binding, taken, array[first:end])
            bind_output(binding, given, array[first:end])
        bind_output(binding, "head/logits", logits)
        return binding
