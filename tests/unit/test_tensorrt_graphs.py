"""The graphs that TensorRT is given: their operators, and their matrix products in 16 bits."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from export.tensorrt import TOLERANCES, check_operators, lower_products, sample_rows
from serve.bundle import BundleError
from serve.runtime import open_model
from serve.runtime.tensorrt import Precision
from tests.fixtures.tiny_bundles import build_classify, build_generate
from tests.fixtures.tiny_families import build_image, build_points, build_prefix, build_translate
from tests.tensorrt_operators import unsupported

ZOO = Path(__file__).parents[2] / "zoo"
BUILDERS = (
    build_classify,
    build_generate,
    build_image,
    build_points,
    build_prefix,
    build_translate,
)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_lowered_products_stay_close_and_nothing_else_changes(
    tmp_path: Path, precision: Precision
) -> None:
    bundle = build_classify(tmp_path / "bundle", steps=(1, 2))
    path = bundle.graph_path(2)
    model = onnx.load(path)
    before = [(node.op_type, node.name) for node in model.graph.node]
    lower_products(model, precision)
    onnx.checker.check_model(model)
    kept = [
        (one.op_type, one.name) for one in model.graph.node if not one.name.startswith("product_")
    ]
    assert kept == before
    products = [one for one in model.graph.node if one.op_type in ("MatMul", "Gemm")]
    ends = [name for one in products for name in (*one.input, *one.output)]
    assert all(name.endswith(f"_{precision}") for name in ends)
    reference = open_model(bundle).unrolled(2)
    for rows in sample_rows(bundle.manifest, np.random.default_rng(0)):
        if precision == "fp16":
            session = ort.InferenceSession(
                model.SerializeToString(), providers=["CPUExecutionProvider"]
            )
            (got,) = session.run(["logits"], {"tokens": rows})
        else:  # onnxruntime has no kernels for bf16 on the CPU
            (got,) = ReferenceEvaluator(model).run(["logits"], {"tokens": rows})
        wanted = reference.forward(rows)
        error = np.abs(got - wanted).max() / np.abs(wanted).max()
        assert 0 < error < TOLERANCES[precision]


def test_the_parser_knows_every_operator_of_every_rung(tmp_path: Path) -> None:
    found = {str(path.relative_to(ZOO)): path for path in rung_graphs(ZOO)}
    for build in BUILDERS:
        bundle = build(tmp_path / build.__name__)
        for rung in bundle.manifest.rungs:
            graphs = [bundle.folder / graph for graph in rung.graphs.values()]
            found |= {f"{build.__name__} {path.name}": path for path in graphs}
    problems = {
        name: unsupported(onnx.load(path, load_external_data=False)) for name, path in found.items()
    }
    assert len(problems) > 20 and not any(problems.values()), problems


def rung_graphs(zoo: Path) -> list[Path]:
    return [
        path.parent / rung["graph"]
        for path in sorted(zoo.glob("*/manifest.json"))
        for rung in json.loads(path.read_text())["rungs"]
    ]


def test_the_check_of_operators_finds_what_the_parser_would_refuse() -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["n"]),
        helper.make_node("ReduceSum", ["x", "axes"], ["s"]),
        helper.make_node("LayerNormalization", ["x", "g"], ["y", "mean"]),
        helper.make_node("MatMulNBits", ["x"], ["z"], domain="com.microsoft"),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [], []), opset_imports=[helper.make_opsetid("", 26)]
    )
    assert unsupported(model) == [
        "LayerNormalization with more than its first output",
        "ReduceSum with computed axes",
        "com.microsoft.MatMulNBits",
        "onnx.NonZero",
        "opset 26 of onnx",
    ]


def test_an_operator_of_onnxruntime_alone_is_named() -> None:
    contrib = helper.make_node("GroupQueryAttention", ["q"], ["y"], domain="com.microsoft")
    graph = helper.make_graph([contrib], "g", [], [])
    with pytest.raises(BundleError, match="which only onnxruntime knows"):
        check_operators(helper.make_model(graph), "step.onnx")
