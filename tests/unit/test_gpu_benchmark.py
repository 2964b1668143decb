"""The script for machines with a GPU: what it says where there is none, and that it runs."""

import json
import sys
from pathlib import Path

import onnxruntime as ort
import pytest
import torch

from benchmarks.gpu import writing
from benchmarks.gpu.__main__ import NO_GPU, UNUSABLE, main
from serve.bundle import AgainstFp32
from serve.runtime import open_model
from tests.fake_cuda import FakeCuda
from tests.fake_tensorrt import FakeTensorrt
from tests.fixtures.tiny_bundles import build_generate
from tests.fixtures.tiny_families import build_translate


@pytest.fixture
def translator(tmp_path: Path) -> Path:
    build_translate(tmp_path / "bundle", steps=(1,), max_tokens=12, target_max_tokens=8)
    return tmp_path / "bundle"


def test_without_a_gpu_it_says_what_is_missing(
    translator: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", FakeCuda(status=35))
    assert main([str(translator), "--calls", "1"]) == NO_GPU == 3
    assert "No GPU was used: there is no usable NVIDIA GPU" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    assert main([str(translator), "--calls", "1"]) == NO_GPU
    assert "pip install -e '.[gpu]'" in capsys.readouterr().out
    assert main([str(translator / "nothing")]) == UNUSABLE


@pytest.mark.parametrize("task", ["generate", "translate"])
def test_with_a_gpu_every_way_is_measured_or_skipped_with_the_reason(
    tmp_path: Path,
    translator: Path,
    task: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers() or torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.setattr(writing, "ROWS", (1, 3))
    # Of the tokens of a model with random weights, some in 16 bits are near ties.
    monkeypatch.setattr(writing, "AGREEMENT", 0.9)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cuda)
    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorrt(cuda))
    folder = translator
    if task == "generate":
        folder = build_generate(tmp_path / "decoder", steps=(1,), max_tokens=12).folder
    kept = tmp_path / "kept.json"
    status = main([str(folder), "--calls", "1", "--results", str(kept)])
    record = json.loads(kept.read_text())
    (found,) = record["bundles"].values()
    # The stand-in runs on onnxruntime, which has no kernels for bf16 on the CPU.
    assert {"cuda", "tensorrt", "engines bf16"} <= set(found["skipped"])
    assert not any(way.startswith("engines fp") for way in found["skipped"])
    assert "cannot run on cuda" in found["skipped"]["cuda"]
    assert {one["way"] for one in found["calls"]} == {"cpu", "engines fp32", "engines fp16"}
    assert all(one["median_ms"] > 0 for one in found["calls"])
    assert not found["broken"]
    assert record["host"]["gpu"] == "Fake GPU" and status == 0
    assert "Skipped" in capsys.readouterr().out


def test_the_one_command_measures_what_runs_here_and_says_what_it_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers() or torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", FakeCuda(status=35))
    monkeypatch.setattr(writing, "ROWS", (1, 3))
    # Of 96 tokens of a model with random weights, one in bf16 is a near tie.
    monkeypatch.setattr(writing, "AGREEMENT", 0.95)
    decoder = build_generate(tmp_path / "decoder", steps=(1, 2), max_tokens=24).folder
    build_translate(tmp_path / "pairs", steps=(1,), max_tokens=12, target_max_tokens=8)
    kept = tmp_path / "kept.json"
    words = [str(decoder), str(tmp_path / "pairs"), "--calls", "1", "--results", str(kept)]
    assert main(words) == NO_GPU == 3
    said = capsys.readouterr().out
    assert "No GPU was used: there is no usable NVIDIA GPU" in said
    assert "### tiny-generate: tokens a second" in said
    assert "* stepdial cuda fp16: " in said and "cannot run on cuda" in said
    record = json.loads(kept.read_text())["bundles"]["tiny-generate"]
    ways = {one["way"] for one in record["writing"]}
    assert ways == {"stepdial cpu fp32", "stepdial cpu fp16", "stepdial cpu bf16"}
    assert all(one["tokens_a_second"] > 0 for one in record["writing"])
    skipped = set(record["skipped"])
    assert {"cuda", "tensorrt", "stepdial cuda fp16", "stepdial cuda bf16"} <= skipped
    assert {"PyTorch with caches fp16", "transformers bf16", "CTranslate2 fp16"} <= skipped
    assert record["skipped"]["PyTorch with caches fp16"] == "torch sees no CUDA device"
    assert not record["broken"]
    assert main([str(tmp_path / "nothing")]) == UNUSABLE == 2


def test_peers_write_as_many_tokens_as_ours(tmp_path: Path) -> None:
    """On the CPU, where they are not timed: that they run at all, and with their caches rightly."""
    bundle = build_generate(tmp_path / "decoder", steps=(1, 2), max_tokens=24)
    shape = writing.Shape.of(bundle, 2)
    assert writing.writer(open_model(bundle), shape)(3) == 3 * shape.answer
    made = writing.peers(shape, tmp_path, "cpu")
    for name in ("PyTorch with caches bf16", "transformers bf16"):
        assert made[name]()(3) == 3 * shape.answer
    torch.manual_seed(0)
    model = writing._TorchDecoder(shape).eval()
    tokens = torch.randint(1, shape.vocabulary, (2, 6))

    def caches() -> list[tuple[torch.Tensor, torch.Tensor]]:
        size = (2, shape.heads, shape.prompt + shape.answer, shape.width // shape.heads)
        return [(torch.zeros(size), torch.zeros(size)) for _ in range(2 * shape.layers)]

    with torch.inference_mode():
        at_once, kept = model(tokens, 0, caches()), caches()
        model(tokens[:, :5], 0, kept)
        one_more = model(tokens[:, 5:], 5, kept)
    torch.testing.assert_close(at_once, one_more)
    wrong = AgainstFp32(0.98, 0.0, 100)
    assert not writing.Written("x", 1, 1, 1.0, wrong).right
