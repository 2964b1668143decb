"""16-bit bundles: verified and compared at the export, half the file, and the answers of fp32."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper

from export.__main__ import main
from export.half import Half, Products, to_half, use_half
from export.half_bundle import halve_bundle
from export.inspect import describe
from export.pieces import OPSET
from export.run import ExportRequest, export_run
from export.verify import VerificationError
from serve.bundle import Bundle, read_bundle
from serve.runtime import open_model
from serve.runtime.protocol import IntArray, largest_row
from tests.fixtures.tiny_runs import tiny_label_run, tiny_text_run
from tests.tracing import trace_once
from train.data.batch import Batch

pytestmark = pytest.mark.long
HALVES = pytest.mark.parametrize("half", ["fp16", "bf16"])
ZOO = Path(__file__).parents[2] / "zoo" / "shakespeare"
STEPS = (1, 2, 3)
AGREEMENT, LOSS = 0.99, 0.002  # at least, and at most
ROWS = 6


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text_run(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def large_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text_run(
        tmp_path_factory.mktemp("large"),
        *("model.width=320", "model.hidden=1280", "model.heads=5", "model.layers=5"),
        "optim.iterations=1",
        "run.evaluate_every=1",
    )


@pytest.fixture(scope="module")
def label_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    return tiny_label_run(folder, "model.width=64", "model.hidden=128")


@pytest.fixture(scope="module")
def label_floats(label_run: Path) -> Bundle:
    with pytest.MonkeyPatch.context() as patch:
        trace_once(patch)
        return export(label_run, label_run.with_name("floats"))


@pytest.fixture(scope="module")
def written() -> Batch:
    """What the decoder of the zoo wrote."""
    return written_by(read_bundle(ZOO), ROWS)


def export(run: Path, target: Path, half: Half | None = None, method: str = "euler") -> Bundle:
    request = ExportRequest(target, STEPS, method, precision=half or "fp32", latency=False)
    return export_run(run, request, say=lambda line: None)


def check_quality(bundle: Bundle) -> None:
    for rung in bundle.manifest.rungs:
        assert 0 < rung.verified.max_abs_error <= rung.verified.tolerance
        assert rung.against_fp32 is not None
        assert rung.against_fp32.top1_agreement >= AGREEMENT
        assert abs(rung.against_fp32.change) <= LOSS


@HALVES
@pytest.mark.parametrize("method", ["euler", "ab2", "heun"])
def test_every_rung_of_a_decoder_is_verified_and_compared(
    text_run: Path, tmp_path: Path, method: str, half: Half
) -> None:
    bundle = export(text_run, tmp_path / "b", half, method)
    check_quality(bundle)
    assert (bundle.manifest.cache, bundle.manifest.precision) == ("kv_fp16", half)
    assert f"  {half}, 16-bit caches, " in describe(bundle)
    card = (bundle.folder / "README.md").read_text(encoding="utf-8")
    assert f"{half}, 16-bit caches." in card
    decoder = open_model(bundle).decoder(3)
    whole = open_model(bundle).unrolled(3)
    tokens = np.arange(1, 21, dtype=np.int64)[None]
    assert np.abs(decoder.forward(tokens) - whole.forward(tokens)).max() < 0.01


@HALVES
def test_a_classifier_too_in_half_the_file(
    label_run: Path, label_floats: Bundle, tmp_path: Path, half: Half
) -> None:
    bundle = export(label_run, tmp_path / "b", half)
    check_quality(bundle)
    assert bundle.manifest.cache == "none"
    sizes = [one.weights_path.stat().st_size for one in (bundle, label_floats)]
    assert sizes[0] < 0.65 * sizes[1]
    for rung in bundle.manifest.rungs:
        graph = onnx.load(str(bundle.graph_path(rung.steps)), load_external_data=False).graph
        assert {node.domain for node in graph.node} == {""}


@pytest.mark.parametrize("shape", ["whole", "steps"])
def test_a_graph_of_either_kind_that_is_wrong_is_found(
    written: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """A rung has a graph of all its steps beside those of one step that the server runs."""

    def broken(model: onnx.ModelProto, half: Half, products: Products) -> None:
        if (shape == "whole") == (products != "own"):
            for tensor in model.graph.initializer:
                values = numpy_helper.to_array(tensor)
                if values.ndim == 2 and values.dtype == np.float32 and min(values.shape) > 60:
                    tensor.CopyFrom(numpy_helper.from_array(values * 0, tensor.name))
        use_half(model, half, products)

    monkeypatch.setattr("export.half_bundle.use_half", broken)
    floats, target = read_bundle(ZOO), tmp_path / "b"
    with pytest.raises(VerificationError, match="off by"):
        halve_bundle(floats, target, "fp16", lambda: iter([written]), lambda line: None)
    assert not target.exists()


@HALVES
def test_the_decoder_of_the_zoo_answers_as_in_float32_at_every_rung(
    written: Batch, tmp_path: Path, half: Half
) -> None:
    """On text that the model wrote itself; and one that goes on greedily goes the same way."""
    floats = read_bundle(ZOO)
    bundle = halve_bundle(floats, tmp_path / "b", half, lambda: iter([written]), lambda line: None)
    check_quality(bundle)
    same = counted = 0
    for steps in bundle.manifest.steps:
        pair = [open_model(one).decoder(steps).open_batch() for one in (floats, bundle)]
        prompt = np.asarray(written.inputs[0])[0, :64]
        tokens = [int(batch.add(prompt).argmax()) for batch in pair]
        for _ in range(64):
            same, counted = same + (tokens[0] == tokens[1]), counted + 1
            tokens = [int(batch.step(np.array(tokens[:1]))[0].argmax()) for batch in pair]
    assert same >= AGREEMENT * counted


def written_by(bundle: Bundle, rows: int) -> Batch:
    """Rows that fill the window, drawn from the model's own distribution."""
    chance = np.random.default_rng(0)
    length = bundle.manifest.text_input.max_tokens
    batch = open_model(bundle).decoder(1).open_batch()
    tokens = np.zeros((rows, length + 1), dtype=np.int64)
    tokens[:, 0] = chance.integers(1, bundle.manifest.text_tokenizer.vocab_size, rows)
    logits = np.stack([batch.add(row[:1]) for row in tokens])
    for at in range(1, length + 1):
        drawn = logits + chance.gumbel(size=logits.shape)
        tokens[:, at] = drawn.argmax(-1)
        if at < length:
            logits = batch.step(tokens[:, at].copy())
    return Batch((torch.from_numpy(tokens[:, :-1]),), torch.from_numpy(tokens[:, 1:]))


@HALVES
def test_a_decoder_of_six_million_weights_answers_as_in_float32(
    large_run: Path, tmp_path: Path, half: Half
) -> None:
    request = ExportRequest(tmp_path / "b", (1, 2, 4), precision=half, samples=64, latency=False)
    bundle = export_run(large_run, request, say=lambda line: None)
    assert 6e6 < bundle.manifest.shape.parameters < 7e6
    check_quality(bundle)


def test_only_graphs_that_the_manifest_names_get_16_bits(
    label_floats: Bundle, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(label_floats.folder, tmp_path / "copied"))
    first = label_floats.manifest.rungs[0].graph
    shutil.copy(copied / first, copied / "old.onnx")
    (copied / f"._{first}").write_bytes(b"\0\5\26\7")  # as a Mac leaves it
    batch = Batch((torch.ones(2, 5, dtype=torch.long),), torch.zeros(2, dtype=torch.long))
    made = halve_bundle(
        read_bundle(copied), tmp_path / "b", "fp16", lambda: iter([batch]), lambda line: None
    )
    assert "old.onnx" not in made.manifest.files and not (made.folder / "old.onnx").exists()


def test_where_it_cannot_be_written_is_said_before_it_is_measured(
    label_floats: Bundle, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is no bundle"):
        halve_bundle(label_floats, tmp_path / "notes", "fp16", Iterator)


def test_a_bundle_gets_16_bits_from_the_command(
    text_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    floats = export(text_run, tmp_path / "f")
    data = str(text_run.parent / "corpus.txt")
    target = tmp_path / "b"
    words = ["export", str(floats.folder), "--precision", "fp16", "--data", data]
    assert main([*words, "--out", str(target), "--no-calibrate"]) == 0
    made = read_bundle(target)
    check_quality(made)
    direct = export(text_run, tmp_path / "d", "fp16")
    assert made.weights_path.stat().st_size == direct.weights_path.stat().st_size
    tokens = np.arange(1, 21, dtype=np.int64)[None]
    for steps in STEPS:
        answers = [open_model(one).decoder(steps).forward(tokens) for one in (made, direct)]
        assert np.array_equal(answers[0], answers[1])
    capsys.readouterr()
    assert main([*words, "--out", str(tmp_path / "c"), "--steps", "1"]) == 2
    assert "--steps needs the run" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is fp16, 16-bit caches already"):
        halve_bundle(made, tmp_path / "c", "bf16", Iterator)


def test_a_weight_too_large_for_the_type_is_refused() -> None:
    values = np.array([[1.0, 7e4]], dtype=np.float32)
    with pytest.raises(ValueError, match=r"a weight of 7e\+04 is beyond the numbers of fp16: use"):
        to_half(values, "fp16")
    found = onnx.numpy_helper.to_array(to_half(values, "bf16", "w")).astype(np.float32)
    assert np.abs(found / values - 1).max() < 2.0**-8


@HALVES
@pytest.mark.parametrize("products", ["shared", "own", "float"])
def test_values_that_are_used_in_other_ways_stay_right(half: Half, products: Products) -> None:
    """A table that is looked up, multiplied with, and added to, in one graph."""
    node, helper = onnx.helper.make_node, onnx.helper
    table = np.random.default_rng(0).standard_normal((24, 24)).astype(np.float32)
    nodes = [
        node("Gather", ["w", "i"], ["x"]),
        node("Transpose", ["w"], ["turned"], perm=[1, 0]),
        node("MatMul", ["x", "turned"], ["a"]),
        node("Gemm", ["a", "w", "b"], ["c"], transB=1),
        node("Add", ["w", "b"], ["d"]),
        node("MatMul", ["c", "d"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("i", onnx.TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 24])],
        [onnx.numpy_helper.from_array(table, "w"), onnx.numpy_helper.from_array(table[0], "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    use_half(model, half, products)
    onnx.checker.check_model(model, full_check=True)
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    again = {"w.fp16.2"} if (half, products) == ("fp16", "own") else set()
    assert kinds.keys() == {f"w.{half}", "b", *again}
    session = ort.InferenceSession(model.SerializeToString())
    index: IntArray = np.array([3, 5])
    (answer,) = session.run(None, {"i": index})
    expected = (table[index] @ table.T @ table.T + table[0]) @ (table + table[0])
    assert np.abs(answer - expected).max() <= 0.05 * np.abs(expected).max()


def test_a_classifier_made_of_a_bundle_says_that_it_has_no_early_answers(tmp_path: Path) -> None:
    floats = read_bundle(ZOO.parent / "digits")
    assert floats.manifest.calibration is not None
    pixels = np.random.default_rng(0).standard_normal((8, *largest_row(floats.manifest).shape))
    rows = torch.from_numpy(pixels.astype(np.float32))
    batch = Batch((rows,), torch.zeros(8, dtype=torch.int64))
    said: list[str] = []
    bundle = halve_bundle(floats, tmp_path / "b", "fp16", lambda: [batch], said.append)
    assert said[0].startswith("requests with max_disagreement will be refused")
    assert bundle.manifest.calibration is None
    for steps in bundle.manifest.steps:
        pair = [open_model(one).classifier(steps).run(rows.numpy()) for one in (floats, bundle)]
        assert 0 < np.abs(pair[0] - pair[1]).max() < 0.05
