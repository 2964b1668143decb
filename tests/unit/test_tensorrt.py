"""Native engines up to the driver call: precision, network, profiles, manifest, running, errors."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from export.attention import write_out_fused
from export.run import ExportRequest, export_run
from export.tensorrt import TOLERANCES, EngineRequest, build_engines, largest_error
from serve.bundle import AgainstFp32, Bundle, BundleError, read_bundle
from serve.runtime import Device, open_model
from serve.runtime.session import encoder_interface, graph_interface, profiles
from serve.runtime.tensorrt import (
    ENGINES_FILE,
    TIMING_FILE,
    Precision,
    TrtMemory,
    TrtModel,
    TrtSession,
    load_tensorrt,
    open_cuda,
)
from tests.fake_cuda import FakeCuda
from tests.fake_tensorrt import FakeTensorrt
from tests.fixtures.tiny_bundles import build_classify, build_generate
from tests.fixtures.tiny_families import build_image, build_points, build_prefix, build_translate
from tests.fixtures.tiny_runs import tiny_label_run

ZOO = Path(__file__).parents[2] / "zoo"
FAMILIES: dict[str, Callable[[Path], Bundle]] = {
    "text": lambda folder: build_classify(folder, steps=(1, 2)),
    "image": build_image,
    "points": build_points,
    "decoder": lambda folder: build_generate(folder, steps=(1, 2), max_tokens=20),
    "decoder of one rung": lambda folder: build_prefix(folder, max_tokens=20),
    "translator": lambda folder: build_translate(folder, max_tokens=20, target_max_tokens=12),
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", made)
    return made


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> FakeTensorrt:
    made = FakeTensorrt(cuda)
    monkeypatch.setitem(sys.modules, "tensorrt", made)
    return made


def build(bundle: Bundle, folder: Path, precision: Precision = "fp32", rows: int = 4) -> list[str]:
    said: list[str] = []
    build_engines(bundle, folder, EngineRequest(precision, rows), said.append)
    return said


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_of_every_family_answer_as_the_cpu_does(
    tmp_path: Path, library: FakeTensorrt, cuda: FakeCuda, family: str
) -> None:
    bundle = FAMILIES[family](tmp_path / "bundle")
    said = build(bundle, tmp_path / "engines")
    graphs = [graph for rung in bundle.manifest.rungs for graph in rung.graphs.values()]
    if family == "decoder":  # any rung runs on the engines of one step
        assert bundle.manifest.step is not None
        graphs = list(bundle.manifest.step.graphs.values())
    names = {path.name for path in (tmp_path / "engines").iterdir()}
    assert names == {f"{Path(one).stem}.engine" for one in graphs} | {ENGINES_FILE, TIMING_FILE}
    assert "next: stepdial serve" in said[-1]
    engines, reference = TrtModel(bundle, tmp_path / "engines"), open_model(bundle)
    engines.warm_up()
    for steps in bundle.manifest.steps:
        assert largest_error(engines, reference, steps) < 1e-5
    if family == "decoder":
        assert not cuda.captures
    else:  # verifying runs every shape three times, so the last time as a graph
        assert 0 < cuda.captures <= cuda.launches


def test_engines_are_there_all_the_time_while_others_replace_them(
    tmp_path: Path, library: FakeTensorrt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kills the process then must not leave half a folder, which is never replaced."""
    bundle = build_classify(tmp_path / "bundle", steps=(1,))
    build(bundle, tmp_path / "engines")
    (tmp_path / "link").symlink_to("engines")
    removed = shutil.rmtree

    def remove(path: Path, ignore_errors: bool = False) -> None:
        assert (tmp_path / "engines" / ENGINES_FILE).is_file()
        removed(path, ignore_errors)
        assert (tmp_path / "engines" / ENGINES_FILE).is_file()

    monkeypatch.setattr(shutil, "rmtree", remove)
    build(bundle, tmp_path / "engines", "fp16")
    build(bundle, tmp_path / "link", "fp32")
    assert json.loads((tmp_path / "link" / ENGINES_FILE).read_text())["precision"] == "fp32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "engines", "link"]


def test_the_network_is_built_as_documented(tmp_path: Path, library: FakeTensorrt) -> None:
    bundle = build_classify(tmp_path / "bundle", steps=(1, 2))
    build(bundle, tmp_path / "engines", "fp32", rows=8)
    first, second = library.built
    strongly_typed = 1 << library.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    assert first.flags == second.flags == strongly_typed
    assert first.builder_flags == {"STRICT_NANS"}, "fp32 without TF32"
    single, many = first.profiles
    assert single == {"tokens": [[1, 1], [1, 24], [1, 48]]}
    assert many == {"tokens": [[1, 1], [4, 24], [8, 48]]}
    # The second graph is built with the timings of the first, and both with those kept before.
    assert (first.timings, second.timings) == (b"", b"+")
    build(bundle, tmp_path / "engines", "fp16")
    assert library.built[2].timings == b"++" and "TF32" in library.built[2].builder_flags
    (tmp_path / "engines" / TIMING_FILE).write_bytes(b"other GPU")
    build(bundle, tmp_path / "engines")
    assert library.built[4].timings == b"", "timings of another GPU are left out"


def test_profiles_cover_the_limits_of_the_manifest(tmp_path: Path) -> None:
    bundle = build_translate(tmp_path / "t", max_tokens=40, target_max_tokens=24)
    manifest = bundle.manifest
    _, many = profiles(graph_interface(manifest).inputs, manifest, 6)
    assert many["tokens"].max == (6, 24) and many["source"].max == (6, 40)
    assert many["memory"].opt == (3, 20, 16) and many["keep"].max == (24,)
    (single,) = profiles(encoder_interface(manifest).inputs, manifest, 1)
    assert single["source"].max == (1, 40)


def session_of(bundle: Bundle, folder: Path) -> TrtSession:
    model = TrtModel(bundle, folder)
    return model._session(bundle.manifest.rungs[0].graph)


def test_a_shape_that_repeats_is_captured_and_survives_larger_ones(
    tmp_path: Path, library: FakeTensorrt, cuda: FakeCuda
) -> None:
    bundle = build_points(tmp_path / "bundle")
    build(bundle, tmp_path / "engines")
    session, reference = session_of(bundle, tmp_path / "engines"), open_model(bundle)
    random = np.random.default_rng(0)
    cuda.launches = 0
    for count in (5, 5, 5, 9, 5, 5, 5):
        rows = random.standard_normal((2, count, 3)).astype(np.float32)
        got: Any = session.run(["logits"], {"points": rows})[0]
        np.testing.assert_allclose(got, reference.unrolled(1).forward(rows), atol=1e-6)
    # The larger buffer took the first graph with it; the shape was then captured again.
    assert len(cuda.graphs) == 1 and cuda.launches == 3


@pytest.mark.parametrize("family", ["text", "decoder", "translator"])
def test_a_model_that_leaves_gives_the_memory_of_the_gpu_back(
    tmp_path: Path, library: FakeTensorrt, cuda: FakeCuda, family: str
) -> None:
    bundle = FAMILIES[family](tmp_path / "bundle")
    build(bundle, tmp_path / "engines")
    assert (cuda.memory, cuda.graphs, cuda.streams) == ({}, [], {}), "building leaves some"
    held = []
    for _ in range(3):
        engines, reference = TrtModel(bundle, tmp_path / "engines"), open_model(bundle)
        engines.warm_up()
        largest_error(engines, reference, bundle.manifest.steps[-1])
        held.append((len(cuda.memory), len(cuda.graphs), len(cuda.streams)))
        engines.close()
        assert (cuda.memory, cuda.graphs, cuda.streams) == ({}, [], {})
    assert held[0] == held[1] == held[2]
    memory, graphs, streams = held[0]
    assert memory > 0 and streams > 0 and (graphs > 0) == (family != "decoder")


def test_a_model_may_load_while_a_shape_of_another_is_captured(
    tmp_path: Path, library: FakeTensorrt, cuda: FakeCuda
) -> None:
    bundle = build_image(tmp_path / "bundle")
    build(bundle, tmp_path / "engines")
    loaded: list[TrtSession] = []
    open_cuda().capture(lambda: loaded.append(session_of(bundle, tmp_path / "engines")))
    assert loaded


def test_engines_of_a_model_share_contexts_memory_and_the_limit_of_graphs(
    tmp_path: Path, library: FakeTensorrt, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.runtime.tensorrt.MAX_GRAPHS", 3)
    bundle = build_points(tmp_path / "bundle")
    build(bundle, tmp_path / "engines")
    model, reference = TrtModel(bundle, tmp_path / "engines"), open_model(bundle)
    random = np.random.default_rng(0)
    ladder = bundle.manifest.steps
    assert len(ladder) > 1
    for count in (5, 9):
        rows = random.standard_normal((2, count, 3)).astype(np.float32)
        for _ in range(3):
            for steps in ladder:
                got = model.classifier(steps).run(rows)
                np.testing.assert_allclose(got, reference.unrolled(steps).forward(rows), atol=1e-6)
    assert model._pool.full and len(cuda.graphs) == 3
    assert len(model._pool._contexts) <= len(ladder)  # one profile of each ran besides
    buffers = sum(len(session._buffers) for session in model._sessions.values())
    assert len(cuda.memory) == buffers + 1  # one block of working memory for all engines
    model.close()
    assert not cuda.memory and not cuda.graphs


def test_engines_run_on_the_gpu_that_is_asked_for(
    tmp_path: Path, library: FakeTensorrt, cuda: FakeCuda
) -> None:
    bundle = build_points(tmp_path / "bundle")
    build(bundle, tmp_path / "engines")
    with pytest.raises(BundleError, match="no NVIDIA GPU 1: the driver shows 1, numbered from 0"):
        open_model(bundle, device=Device(engines=tmp_path / "engines", number=1))
    cuda.gpus = 2
    model = open_model(bundle, device=Device(engines=tmp_path / "engines", number=1))
    cuda.device = 0  # as a thread has it that has not asked for another
    model.warm_up()
    assert cuda.device == 1


def test_what_was_written_to_the_gpu_may_change_at_once(cuda: FakeCuda) -> None:
    memory, values = TrtMemory(open_cuda()), np.arange(4)
    held = memory.hold(values)
    values[:] = 0
    assert memory.read(held).tolist() == [0, 1, 2, 3]


def test_pieces_too_far_apart_for_one_copy_have_one_each(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.runtime.tensorrt._MOST_APART", 7)
    cuda.most_pitch = 7
    memory = TrtMemory(open_cuda())
    source = memory.hold(np.arange(20, dtype=np.uint8))
    target = memory.hold(np.zeros(15, dtype=np.uint8))
    memory.cuda.copy_rows(target.address, 10, source.address, 8, 3, 2)
    assert memory.read(target).tolist() == [0, 1, 2, *[0] * 7, 8, 9, 10, 0, 0]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.long
def test_a_decoder_keeps_its_caches_on_the_gpu(
    tmp_path: Path, library: FakeTensorrt, cuda: FakeCuda, precision: Precision, rows: int
) -> None:
    """Rows that come, go and grow past a bucket; engines of 2 rows take 3 in two parts."""
    bundle = build_generate(tmp_path / "bundle", steps=(1, 2, 4), max_tokens=100)
    build(bundle, tmp_path / "engines", precision, rows)
    step = library.built[1]
    assert len(library.built) == 3, "embedding, step and head, whatever the number of rungs"
    for profile, most in zip(step.profiles, (1, rows), strict=True):
        low, usual, high = profile["k_0_0"]
        assert (low, high) == ([1, 1, 2, 16], [most, 128, 2, 16]) and usual[1] == 64
        assert profile["x"] == [[1, 1, 32], [max(1, most // 2), 1, 32], [most, 100, 32]]
    models = TrtModel(bundle, tmp_path / "engines"), open_model(bundle)
    vocab_size = bundle.manifest.text_tokenizer.vocab_size
    tolerance = {"fp32": 1e-5, "fp16": TOLERANCES["fp16"]}[precision]
    for steps in bundle.manifest.steps:
        batches = [one.decoder(steps).open_batch() for one in models]
        chance = np.random.default_rng(0)
        for length in (5, 70, 12):
            tokens = chance.integers(1, vocab_size, length)
            check_close([batch.add(tokens) for batch in batches], tolerance)
        cuda.crossed = {True: 0, False: 0}
        for _ in range(20):
            tokens = chance.integers(1, vocab_size, 3)
            check_close([batch.step(tokens) for batch in batches], tolerance)
        # Tokens and lengths go in, and logits come out; times once, in the first pass.
        assert cuda.crossed[False] == 20 * 3 * vocab_size * 4
        assert cuda.crossed[True] <= 20 * 3 * (8 + 4) + 2 * (4 * 3 * steps + 8 + 12 * 3)
        for batch in batches:
            batch.remove(0)
        tokens = chance.integers(1, vocab_size, 4)
        check_close([batch.step(tokens[:2]) for batch in batches], tolerance)
        assert batches[0].lengths == batches[1].lengths
        while batches[0].lengths:
            batches[0].remove(0)
        assert batches[0].nbytes == 0
        check_close([one.decoder(steps).forward(tokens[None]) for one in models], tolerance)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_caches_of_any_length_lie_where_tensorrt_takes_them(
    tmp_path: Path, library: FakeTensorrt, cuda: FakeCuda, precision: Precision
) -> None:
    bundle = build_generate(tmp_path / "bundle", steps=(1, 2), max_tokens=31)
    build(bundle, tmp_path / "engines", precision, rows=2)  # which verifies 3 rows
    decoder = TrtModel(bundle, tmp_path / "engines").decoder(2)
    batch = decoder.open_batch()
    for length in (29, 7, 30):
        batch.add(np.arange(1, 1 + length) % 7)
    batch.step(np.ones(3, dtype=np.int64))
    assert batch.nbytes <= decoder.bytes_for(31, 3)


def check_close(pair: list[Any], tolerance: float) -> None:
    error = float(np.abs(pair[0] - pair[1]).max() / np.abs(pair[1]).max())
    assert 0 <= error < tolerance


def test_engines_of_one_step_answer_early(
    tmp_path: Path, library: FakeTensorrt, cuda: FakeCuda
) -> None:
    bundle = read_bundle(ZOO / "digits")
    assert bundle.manifest.calibration is not None and bundle.manifest.step is not None
    build(bundle, tmp_path / "engines", rows=8)
    model = open_model(bundle, device=Device(engines=tmp_path / "engines"))
    assert model.single_steps
    model.warm_up()
    rows = np.random.default_rng(2).standard_normal((5, 1, 28, 28)).astype(np.float32)
    steps = bundle.manifest.full_steps
    reference = open_model(bundle).step_classifier(steps)
    margins = np.sort(np.diff(np.sort(reference.jumps(rows), axis=-1)[..., -2:]).ravel())
    threshold = float(margins[len(margins) // 2] + margins[len(margins) // 2 + 1]) / 2
    found = model.step_classifier(steps).early(rows, threshold)
    wanted = reference.early(rows, threshold)
    assert found.evaluations.tolist() == wanted.evaluations.tolist()
    assert 0 < found.evaluations.min() < steps
    check_close([found.logits, wanted.logits], 1e-4)
    model.close()
    assert not cuda.memory
    # Without thresholds there is nothing to stop at, and no engine of a step.
    other = build_points(tmp_path / "points")
    build(other, tmp_path / "others")
    plain = open_model(other, device=Device(engines=tmp_path / "others"))
    assert not plain.single_steps
    with pytest.raises(
        BundleError, match="one engine for each step count, which cannot stop early"
    ):
        plain.step_classifier(1)


def test_more_rows_than_the_engine_takes_run_one_part_after_another(
    tmp_path: Path, library: FakeTensorrt
) -> None:
    bundle = build_image(tmp_path / "bundle")
    build(bundle, tmp_path / "engines", rows=2)
    rows = np.random.default_rng(1).standard_normal((5, 1, 6, 5)).astype(np.float32)
    got = TrtModel(bundle, tmp_path / "engines").classifier(2).run(rows)
    np.testing.assert_allclose(got, open_model(bundle).unrolled(2).forward(rows), atol=1e-6)


def test_engines_are_refused_elsewhere_with_the_reason(
    tmp_path: Path, library: FakeTensorrt, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = build_image(tmp_path / "bundle")
    engines = tmp_path / "engines"
    build(bundle, engines)
    with pytest.raises(BundleError, match="engines of another bundle"):
        TrtModel(build_points(tmp_path / "other"), engines)
    with pytest.raises(BundleError, match=r"has no engines\.json"):
        TrtModel(bundle, tmp_path / "bundle")
    library.__version__ = "10.16.0.72"
    monkeypatch.setattr(cuda, "cudaRuntimeGetVersion", lambda: (0, 12090))
    with pytest.raises(BundleError) as caught:
        TrtModel(bundle, engines)
    assert "CUDA is 12.9 instead of 13.4" in str(caught.value)
    assert "TensorRT is 10.16.0.72 instead of 10.14.1.48" in str(caught.value)


@pytest.mark.parametrize("field", ["gpu", "compute_capability", "driver", "cuda", "tensorrt"])
def test_an_engine_is_tied_to_every_part_of_its_host(
    tmp_path: Path, library: FakeTensorrt, field: str
) -> None:
    bundle = build_image(tmp_path / "bundle")
    build(bundle, tmp_path / "engines")
    path = tmp_path / "engines" / ENGINES_FILE
    value = json.loads(path.read_text())
    value["host"][field] += "x"
    path.write_text(json.dumps(value))
    with pytest.raises(BundleError, match="built elsewhere and run only there"):
        TrtModel(bundle, tmp_path / "engines")


def test_a_damaged_folder_is_refused(tmp_path: Path, library: FakeTensorrt) -> None:
    bundle = build_image(tmp_path / "bundle")
    engines = tmp_path / "engines"
    build(bundle, engines)
    plan = engines / "steps-1.engine"
    data = plan.read_bytes()
    plan.write_bytes(data[:-1])
    with pytest.raises(BundleError, match="truncated"):
        TrtModel(bundle, engines)
    plan.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BundleError, match="altered"):
        TrtModel(bundle, engines)
    plan.write_bytes(data)
    path = engines / ENGINES_FILE
    whole = json.loads(path.read_text())
    changes: tuple[dict[str, Any], ...] = (
        {"schema_version": 1},
        {"precision": "int4"},
        {"engines": [whole["engines"][0] | {"file": "../x"}]},
        {"engines": [whole["engines"][0] | {"profiles": [{"pixels": {"min": [0]}}]}]},
        {"host": {}},
        {"unknown": 1},
    )
    for change in changes:
        path.write_text(json.dumps(whole | change))
        with pytest.raises(BundleError, match=r"engines\.json"):
            TrtModel(bundle, engines)


def test_what_cannot_be_built_says_why_and_leaves_nothing(
    tmp_path: Path, library: FakeTensorrt, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = build_image(tmp_path / "bundle")
    against = AgainstFp32(top1_agreement=1.0, change=0.0, samples=1)
    ladder = tuple(replace(rung, against_fp32=against) for rung in bundle.manifest.rungs)
    manifest = replace(bundle.manifest, precision="int8", rungs=ladder)
    eight_bit = replace(bundle, manifest=manifest)
    with pytest.raises(BundleError, match="int8 weights"):
        build(eight_bit, tmp_path / "engines")
    library.parse_error = "UNSUPPORTED_NODE: Frobnicate"
    with pytest.raises(BundleError, match=r"parser of TensorRT 10\.14.*Frobnicate"):
        build(bundle, tmp_path / "engines")
    library.parse_error = ""
    with pytest.raises(BundleError, match="exists and holds no engines"):
        build(bundle, tmp_path / "bundle")
    monkeypatch.setitem(TOLERANCES, "fp32", -1.0)
    with pytest.raises(BundleError, match="the engine of 1 step is off by"):
        build(bundle, tmp_path / "engines")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_without_the_packages_or_a_gpu_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = build_image(tmp_path / "bundle")
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(BundleError, match=r"TensorRT cannot be loaded.*pip install -e '\.\[gpu\]'"):
        build(bundle, tmp_path / "engines")
    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorrt(FakeCuda(), version="8.6.1"))
    with pytest.raises(BundleError, match=r"8\.6\.1 is too old, 10\.6 or newer"):
        load_tensorrt()
    # 10.5 has no STRICT_NANS.
    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorrt(FakeCuda(), version="10.5.0.18"))
    with pytest.raises(BundleError, match=r"10\.5\.0\.18 is too old"):
        load_tensorrt()
    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorrt(FakeCuda(), version="10.6.0.26"))
    assert load_tensorrt().__version__ == "10.6.0.26"
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(BundleError, match="cuda-python cannot be loaded"):
        open_cuda()
    for broken, reason in ((FakeCuda(gpus=0), "no NVIDIA GPU here"), (FakeCuda(status=35), "35")):
        monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", broken)
        with pytest.raises(BundleError, match=reason):
            open_cuda()


@pytest.mark.parametrize("name", ["digits", "logic", "padded"])
def test_the_fused_attention_of_a_step_written_out_answers_alike(name: str, tmp_path: Path) -> None:
    if name == "padded":
        run = tiny_label_run(tmp_path)
        request = ExportRequest(tmp_path / "b", (1, 2), samples=16, latency=False)
        folder = export_run(run, request, say=lambda line: None).folder
    else:
        folder = ZOO / name
    model = onnx.load(str(folder / "step.onnx"))
    assert any(node.op_type == "MultiHeadAttention" for node in model.graph.node)
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    write_out_fused(plain)
    assert {node.domain for node in plain.graph.node} == {""}
    random = np.random.default_rng(0)
    given = {}
    for port in model.graph.input:
        facts = port.type.tensor_type
        shape = [one.dim_value or (3 if i == 0 else 7) for i, one in enumerate(facts.shape.dim)]
        if facts.elem_type == onnx.TensorProto.BOOL:
            given[port.name] = np.arange(shape[1])[None] < np.array([7, 5, 1])[:, None]
        else:
            given[port.name] = random.standard_normal(shape).astype(np.float32)
    found = [
        ort.InferenceSession(one.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            None, given
        )
        for one in (model, plain)
    ]
    for fused, written in zip(*found, strict=True):
        np.testing.assert_allclose(fused, written, atol=2e-6, rtol=1e-5)
