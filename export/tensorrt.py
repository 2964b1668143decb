"""Native TensorRT engines of a bundle: one per graph, verified, in a folder of their own."""

import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper

from export.attention import write_out_caches, write_out_fused
from export.pieces import with_branches
from serve.bundle import (
    Bundle,
    BundleError,
    ImageInput,
    Manifest,
    PointsInput,
    open_staging,
    steps_in_words,
)
from serve.bundle.folder import rename_in
from serve.runtime import OpenedModel, open_model
from serve.runtime.protocol import Device, FloatArray, IntArray, RowArray
from serve.runtime.session import (
    DEFAULT_ROWS,
    Nodes,
    Profile,
    bundle_sha256,
    profiles,
)
from serve.runtime.tensorrt import (
    ENGINES_FILE,
    TIMING_FILE,
    EnginesManifest,
    Precision,
    TrtEngine,
    TrtModel,
    engine_of,
    load_tensorrt,
    open_cuda,
    this_host,
)

# Engines against the same graphs on the CPU, on random rows of every size that matters.


# The largest error of a logit over the largest logit: 8 and 11 bits of mantissa are 4e-3 and 5e-4
# a product, which grow over the products of a rung.
TOLERANCES: dict[Precision, float] = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}
_SEED, _DECODED = 0, 6


def verify_engines(bundle: Bundle, folder: Path, say: Callable[[str], None]) -> None:
    """BundleError, naming the rung, when engines and CPU are further apart than they may be."""
    engines, reference = TrtModel(bundle, folder), open_model(bundle)
    tolerance = TOLERANCES[engines.precision]
    try:
        for steps in bundle.manifest.steps:
            count, error = steps_in_words(steps), largest_error(engines, reference, steps)
            if not error <= tolerance:
                raise BundleError(
                    f"the engine of {count} is off by {error:.2g} of the largest logit, more "
                    f"than {tolerance:g}: build it with more bits, for example fp32"
                )
            say(f"{count}: off by {error:.1e} of the largest logit, at most {tolerance:g}")
    finally:
        engines.close()


def largest_error(found: OpenedModel, reference: OpenedModel, steps: int) -> float:
    """Over rows of several sizes: the largest difference, over the largest number of its kind."""
    manifest = reference.bundle.manifest
    random = np.random.default_rng(_SEED)
    worst = 0.0
    for rows in sample_rows(manifest, random):
        wanted = _answers(reference, steps, rows)
        scales = [max(float(np.abs(one).max()), 1e-6) for one in wanted]
        # The second time captures a graph, which the third one runs.
        for _ in range(3):
            answers = _answers(found, steps, rows)
            for answer, right, scale in zip(answers, wanted, scales, strict=True):
                error = float(np.abs(answer - right).max())
                worst = max(worst, error / scale if np.isfinite(error) else float("inf"))
    return worst


def sample_rows(manifest: Manifest, random: np.random.Generator) -> Iterator[RowArray]:
    """One row and some rows, of the least, a middling and the greatest length."""
    for rows in (1, 3):
        match manifest.input:
            case ImageInput(channels=channels, height=height, width=width):
                yield random.standard_normal((rows, channels, height, width)).astype(np.float32)
            case PointsInput(max_points=most, dimensions=dimensions):
                for count in _lengths(most):
                    yield random.standard_normal((rows, count, dimensions)).astype(np.float32)
            case text:
                for length in _lengths(text.max_tokens):
                    yield sample_tokens(manifest, random, (rows, length))


def sample_tokens(
    manifest: Manifest, random: np.random.Generator, shape: tuple[int, int]
) -> IntArray:
    """Tokens that texts turn into."""
    tokenizer = manifest.text_tokenizer
    usable = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.special_ids)
    tokens: IntArray = random.choice(usable, shape).astype(np.int64)
    return tokens


def _lengths(most: int) -> list[int]:
    return sorted({1, max(1, most // 2), most})


def _answers(model: OpenedModel, steps: int, rows: RowArray) -> list[FloatArray]:
    """The logits, and the embeddings if there are any."""
    manifest = model.bundle.manifest
    if manifest.embedding is not None:
        run = model.classifier(steps)
        return [run.run(rows), run.embed(rows)]
    if manifest.keeps_caches:
        return [model.unrolled(steps).forward(rows), *_decoded(model, steps, rows)]
    if manifest.task != "translate":
        return [model.unrolled(steps).forward(rows)]
    assert manifest.target_max_tokens is not None
    source = rows.astype(np.int64)
    # What the answers say means nothing, so they are the sources themselves.
    answers = source[:, : manifest.target_max_tokens]
    return [model.translator(steps).forward(source, answers)]


def _decoded(model: OpenedModel, steps: int, rows: RowArray) -> Iterator[FloatArray]:
    """Logits while rows are read in part, go on token by token, and all but one leave."""
    batch, (first, *rest) = model.decoder(steps).open_batch(), rows.astype(np.int64)
    half = max(1, len(first) // 2)
    for place, row in enumerate((first, *rest)):
        yield batch.add(row[: max(1, half - place)])
    for token in first[half : half + _DECODED]:
        yield batch.step(np.full(len(rows), token))
    while len(batch.lengths) > 1:
        batch.remove(0)
    if batch.lengths[0] < len(first):
        yield batch.step(first[-1:])


# One graph to one serialized TensorRT engine: the only place that calls TensorRT's builder.


@dataclass(frozen=True, slots=True)
class GraphSource:
    """A graph as bytes, and the file beside which its weights lie."""

    data: bytes
    path: str


def build_plan(
    library: ModuleType,
    source: GraphSource,
    profiles: Sequence[Profile],
    timings: bytes,
    allow_tf32: bool,
) -> tuple[bytes, bytes]:
    """The engine, and the timings that make the next build quicker."""
    logger = library.Logger(library.Logger.WARNING)
    builder = library.Builder(logger)
    flags = 1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    _parse(library, network, logger, source)
    config = builder.create_builder_config()
    if allow_tf32:
        config.set_flag(library.BuilderFlag.TF32)
    else:
        config.clear_flag(library.BuilderFlag.TF32)
    # Attention asks whether a score is no number, which must not be optimised away.
    config.set_flag(library.BuilderFlag.STRICT_NANS)
    for profile in profiles:
        _add_profile(builder, network, config, profile)
    _set_timings(config, timings)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BundleError(
            "TensorRT could not build an engine of it; its log above says why", file=source.path
        )
    return bytes(plan), bytes(config.get_timing_cache().serialize())


def _parse(library: ModuleType, network: Any, logger: Any, source: GraphSource) -> None:
    parser = library.OnnxParser(network, logger)
    if parser.parse(source.data, path=source.path):
        return
    problems = [str(parser.get_error(index)) for index in range(parser.num_errors)]
    raise BundleError(
        f"cannot be read by the parser of TensorRT {library.__version__}: {'; '.join(problems)}",
        file=source.path,
    )


def _add_profile(builder: Any, network: Any, config: Any, profile: Profile) -> None:
    names = {network.get_input(index).name for index in range(network.num_inputs)}
    if names != set(profile):
        raise BundleError(
            f"has the inputs {', '.join(sorted(names))} instead of {', '.join(sorted(profile))}; "
            "export the bundle again"
        )
    made = builder.create_optimization_profile()
    for name, bounds in profile.items():
        made.set_shape(name, bounds.min, bounds.opt, bounds.max)
    if config.add_optimization_profile(made) < 0:
        raise BundleError("TensorRT refused an optimization profile; its log above says why")


def _set_timings(config: Any, timings: bytes) -> None:
    """Start from timings kept before, unless they are of another GPU or version."""
    cache = config.create_timing_cache(timings)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)


# Matrix products in 16-bit floats, said in the graph itself. TensorRT's networks are strongly
# typed: an operator computes in the type of its inputs. So a cast is put before every float input
# of a matrix product and one behind it, and all else, and what goes in and out, stays float32.


_PRODUCTS = ("MatMul", "Gemm")
_TYPES = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}


def lower_products(model: ModelProto, precision: Precision) -> None:
    """Make every matrix product compute in this precision; in place."""
    if precision == "fp32":
        return
    nodes: list[NodeProto] = []
    lowered: dict[str, str] = {}  # a name to its cast: a weight is cast once for all steps
    for node in model.graph.node:
        if node.op_type not in _PRODUCTS:
            nodes.append(node)
            continue
        for index, name in enumerate(node.input):
            if name not in lowered:
                lowered[name] = f"{name}_{precision}"
                nodes.append(_cast(name, lowered[name], _TYPES[precision]))
            node.input[index] = lowered[name]
        output = node.output[0]
        node.output[0] = f"{output}_{precision}"
        nodes += [node, _cast(node.output[0], output, TensorProto.FLOAT)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _cast(source: str, target: str, kind: int) -> NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"product_{target}", to=kind)


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
            _build(library, bundle, graph, staging, request, say) for graph in _graphs(bundle)
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
        rename_in(staging, Path(os.path.realpath(target)))
    say(shlex.join(["next:", "stepdial", "serve", str(bundle.folder), "--engines", str(target)]))


def _graphs(bundle: Bundle) -> Iterator[str]:
    """Every graph that is run: of decoders with caches, the steps; of others, the whole rungs.

    With thresholds for early answers, the steps of a classifier too.
    """
    manifest = bundle.manifest
    if not manifest.keeps_caches:
        for rung in manifest.rungs:
            yield from (graph for graph in (rung.encoder, rung.graph) if graph is not None)
    engines = Device(engines=bundle.folder)
    if manifest.keeps_caches or engines.runs_single_steps(manifest):
        assert manifest.step is not None
        yield from manifest.step.graphs.values()


def graph_for(bundle: Bundle, graph: str, precision: Precision) -> ModelProto:
    """The graph as TensorRT gets it, of float32 weights that lie beside the bundle's."""
    path, manifest = bundle.folder / graph, bundle.manifest
    model = onnx.load(path, load_external_data=False)
    if manifest.step is not None and graph == manifest.step.step:
        if manifest.keeps_caches:
            caches = TensorProto.FLOAT if precision == "fp32" else TensorProto.FLOAT16
            write_out_caches(model, caches)
        else:
            write_out_fused(model)
    check_operators(model, str(path))
    lower_products(model, precision)
    return model


_WORDS = frozenset({"batch", "length", "count", "source_length", "kept", "capacity"})


def inputs_of(model: ModelProto, manifest: Manifest) -> Nodes:
    """The inputs of a graph; an open size with a word of its own is that of the positions."""
    positions = "count" if isinstance(manifest.input, PointsInput) else "length"
    found: Nodes = {}
    for port in model.graph.input:
        sizes = (dim.dim_param or dim.dim_value for dim in port.type.tensor_type.shape.dim)
        found[port.name] = (
            "",
            tuple(
                positions if isinstance(size, str) and size not in _WORDS else size
                for size in sizes
            ),
        )
    return found


def _build(
    library: ModuleType,
    bundle: Bundle,
    graph: str,
    staging: Path,
    request: EngineRequest,
    say: Say,
) -> TrtEngine:
    began = time.perf_counter()
    path = bundle.folder / graph
    model = graph_for(bundle, graph, request.precision)
    shapes = profiles(inputs_of(model, bundle.manifest), bundle.manifest, request.rows)
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
    for node in with_branches(model.graph.node):
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
