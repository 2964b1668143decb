"""The graphs that TensorRT is given: their operators, and their matrix products in 16 bits."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from export.attention import write_out_caches
from export.tensorrt import (
    TOLERANCES,
    check_engines,
    check_operators,
    lower_products,
    sample_rows,
)
from serve.bundle import BundleError, read_bundle
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
    """Of the bundles that engines are built from; the others are refused (next test)."""
    return [
        path.parent / rung["graph"]
        for path in sorted(zoo.glob("*/manifest.json"))
        if (manifest := json.loads(path.read_text()))["precision"] == "fp32"
        for rung in manifest["rungs"]
    ]


def test_a_bundle_of_8_bits_gets_no_engines(tmp_path: Path) -> None:
    manifest = read_bundle(ZOO / "topics").manifest
    with pytest.raises(BundleError, match="topics has int8 weights, but engines are built from"):
        check_engines(manifest.name, manifest.precision, tmp_path / "engines")


def test_the_check_of_operators_finds_what_the_parser_would_refuse() -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["n"]),
        helper.make_node("ReduceSum", ["x", "axes"], ["s"]),
        helper.make_node("LayerNormalization", ["x", "g"], ["y", "mean"]),
        helper.make_node("MatMulNBits", ["x"], ["z"], domain="com.microsoft"),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [], []), opset_imports=[helper.make_opsetid("", 25)]
    )
    assert unsupported(model) == [
        "LayerNormalization with more than its first output",
        "ReduceSum with computed axes",
        "com.microsoft.MatMulNBits",
        "onnx.NonZero",
        "opset 25 of onnx",
    ]


def test_an_operator_of_onnxruntime_alone_is_named() -> None:
    contrib = helper.make_node("GroupQueryAttention", ["q"], ["y"], domain="com.microsoft")
    graph = helper.make_graph([contrib], "g", [], [])
    with pytest.raises(BundleError, match="which only onnxruntime knows"):
        check_operators(helper.make_model(graph), "step.onnx")


@pytest.mark.parametrize("rotary", [0, 16, 32])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("half", [False, True])
def test_attention_to_a_past_is_that_of_the_operator_with_caches(
    rotary: int, kv_heads: int, half: bool
) -> None:
    """A token of each of several rows, a chunk behind a past, and several rows from the start."""
    H, K, d, capacity = 4, kv_heads, 32, 24
    kind = onnx.TensorProto.FLOAT
    model = one_attention(H, K, d, rotary)
    explicit = onnx.ModelProto()
    explicit.CopyFrom(model)
    write_out_caches(explicit, onnx.TensorProto.FLOAT16 if half else kind)
    onnx.checker.check_model(explicit)
    assert unsupported(explicit) == []
    assert "total" not in {port.name for port in explicit.graph.input}
    chance = np.random.default_rng(rotary + kv_heads)
    sessions = [
        ort.InferenceSession(one.SerializeToString(), providers=["CPUExecutionProvider"])
        for one in (model, explicit)
    ]
    for pasts, length in (([3, 17, 0], 1), ([7], 5), ([0, 0], 4)):
        rows, past = len(pasts), np.array(pasts, dtype=np.int32)
        qkv = chance.standard_normal((rows, length, (H + 2 * K) * d)).astype(np.float32)
        k, v = chance.standard_normal((2, rows, K, capacity, d)).astype(np.float32)
        feeds = {"qkv": qkv, "seqlens": past + np.int32(length - 1)}
        total = np.array(past.max() + length, dtype=np.int32)
        wanted, keys, values = sessions[0].run(
            ["y", "k_out", "v_out"], feeds | {"total": total, "k": k, "v": v}
        )
        turned = [one.transpose(0, 2, 1, 3) for one in (k, v)]
        if half:
            turned = [one.astype(np.float16) for one in turned]
        found, new_keys, new_values = sessions[1].run(
            ["y", "k_out", "v_out"], feeds | {"k": turned[0], "v": turned[1]}
        )
        np.testing.assert_allclose(found, wanted, atol=5e-3 if half else 2e-6)
        for row, first in enumerate(pasts):
            for new, whole in ((new_keys, keys), (new_values, values)):
                behind = whole[row, :, first : first + length].transpose(1, 0, 2)
                np.testing.assert_allclose(new[row], behind, atol=5e-3 if half else 2e-6)


def one_attention(heads: int, kv_heads: int, width: int, rotary: int) -> onnx.ModelProto:
    value, kinds = helper.make_tensor_value_info, onnx.TensorProto
    tables = {}
    if rotary:
        angles = np.arange(64)[:, None] / 10 ** np.linspace(0, 2, rotary // 2)  # (64, rotary / 2)
        made = {"cos": np.cos(angles), "sin": np.sin(angles)}
        tables = {name: one.astype(np.float32) for name, one in made.items()}
    node = helper.make_node(
        "GroupQueryAttention",
        ["qkv", "", "", "k", "v", "seqlens", "total", *tables],
        ["y", "k_out", "v_out"],
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=kv_heads,
        do_rotary=int(rotary > 0),
    )
    caches: list[str | int] = ["batch", kv_heads, "capacity", width]
    graph = helper.make_graph(
        [node],
        "g",
        [
            value("qkv", kinds.FLOAT, ["batch", "length", (heads + 2 * kv_heads) * width]),
            value("seqlens", kinds.INT32, ["batch"]),
            value("total", kinds.INT32, []),
            value("k", kinds.FLOAT, caches),
            value("v", kinds.FLOAT, caches),
        ],
        [
            value("y", kinds.FLOAT, ["batch", "length", heads * width]),
            value("k_out", kinds.FLOAT, caches),
            value("v_out", kinds.FLOAT, caches),
        ],
        [onnx.numpy_helper.from_array(one, name) for name, one in tables.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
