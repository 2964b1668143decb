"""Native TensorRT engines of a bundle: one a graph, in a folder of their own, verified.

Knows the folder and its engines.json; how an engine is made is told by export.tensorrt_network.
"""

import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import onnx

from export.tensorrt_network import GraphSource, build_plan
from export.tensorrt_precision import lower_products
from export.tensorrt_verify import verify_engines
from serve.bundle import Bundle, BundleError, open_staging
from serve.runtime.interface import Nodes, encoder_interface, graph_interface
from serve.runtime.trt_device import load_tensorrt, open_cuda
from serve.runtime.trt_manifest import (
    ENGINES_FILE,
    TIMING_FILE,
    Engine,
    EnginesManifest,
    Precision,
    bundle_sha256,
    engine_of,
)
from serve.runtime.trt_model import this_host
from serve.runtime.trt_shapes import DEFAULT_ROWS, profiles

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What kind of engines."""

    precision: Precision = "fp16"
    rows: int = DEFAULT_ROWS  # the most in one call; more run one part after another

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"an engine takes at least 1 row a call, not {self.rows}")


def build_engines(bundle: Bundle, target: Path, request: EngineRequest, say: Say = print) -> None:
    """Build and verify an engine a graph; the folder is there whole or not at all.

    Engines that lie at `target` already are replaced, and their timings used again.
    """
    check_engines(bundle.manifest.name, bundle.manifest.precision, target)
    library, cuda = load_tensorrt(), open_cuda()
    timings = target / TIMING_FILE
    with open_staging(target) as staging:
        if timings.is_file():
            shutil.copyfile(timings, staging / TIMING_FILE)
        engines = tuple(
            _build(library, bundle, graph, inputs, staging, request, say)
            for graph, inputs in _graphs(bundle)
        )
        manifest = EnginesManifest(
            name=bundle.manifest.name,
            bundle_sha256=bundle_sha256(bundle),
            precision=request.precision,
            host=this_host(cuda),
            engines=engines,
        )
        text = json.dumps(manifest.to_json(), indent=1) + "\n"
        (staging / ENGINES_FILE).write_text(text, encoding="utf-8")
        verify_engines(bundle, staging, say)
        if target.exists():
            shutil.rmtree(target)
        os.rename(staging, os.path.realpath(target))
    say(shlex.join(["next:", "stepdial", "serve", str(bundle.folder), "--engines", str(target)]))


def _graphs(bundle: Bundle) -> Iterator[tuple[str, Nodes]]:
    """Every graph that a rung needs, with its inputs."""
    manifest = bundle.manifest
    for rung in manifest.rungs:
        if rung.encoder is not None:
            yield rung.encoder, encoder_interface(manifest).inputs
        yield rung.graph, graph_interface(manifest).inputs


def _build(
    library: ModuleType,
    bundle: Bundle,
    graph: str,
    inputs: Nodes,
    staging: Path,
    request: EngineRequest,
    say: Say,
) -> Engine:
    began = time.perf_counter()
    path = bundle.folder / graph
    model = onnx.load(path, load_external_data=False)
    check_operators(model, str(path))
    lower_products(model, request.precision)
    shapes = profiles(inputs, bundle.manifest, request.rows)
    timings = staging / TIMING_FILE
    plan, known = build_plan(
        library,
        GraphSource(model.SerializeToString(), str(path)),
        shapes,
        timings.read_bytes() if timings.is_file() else b"",
        allow_tf32=request.precision != "fp32",
    )
    timings.write_bytes(known)
    file = f"{path.stem}.engine"
    (staging / file).write_bytes(plan)
    say(f"{file}: {len(plan) / 1e6:.1f} MB, built in {time.perf_counter() - began:.1f} s")
    return engine_of(graph, staging / file, shapes)


def check_operators(model: onnx.ModelProto, file: str) -> None:
    """BundleError unless all operators are plain ones; which of those it has, the parser says."""
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx"):
            raise BundleError(
                f"has the operator {node.op_type} of {node.domain}, which only onnxruntime knows; "
                "export the bundle again",
                file=file,
            )


def check_engines(name: str, precision: str, target: Path) -> None:
    """BundleError unless engines of a model with weights of that precision can be built there."""
    if precision != "fp32":
        raise BundleError(
            f"{name} has {precision} weights, but engines are built from fp32: export it with "
            "--precision fp32, and choose the engines' own precision"
        )
    if os.path.lexists(target) and not (target / ENGINES_FILE).is_file():
        raise BundleError("exists and holds no engines: name another folder", file=str(target))
    load_tensorrt()
    open_cuda()
