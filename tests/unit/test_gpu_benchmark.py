"""The script for machines with a GPU: what it says where there is none, and that it runs."""

import json
import sys
from pathlib import Path

import onnxruntime as ort
import pytest

from benchmarks.gpu import NO_GPU, UNUSABLE, main
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
    assert main([str(translator)]) == NO_GPU == 3
    assert "no usable NVIDIA GPU" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    assert main([str(translator)]) == NO_GPU
    assert "pip install '.[gpu]'" in capsys.readouterr().err
    assert main([str(translator / "nothing")]) == UNUSABLE


@pytest.mark.parametrize("task", ["generate", "translate"])
def test_with_a_gpu_every_way_is_measured_or_skipped_with_the_reason(
    tmp_path: Path,
    translator: Path,
    task: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("onnxruntime-gpu is installed here")
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
    # The stand-in runs on onnxruntime, which has no kernels for bf16 on the CPU.
    assert set(record["skipped"]) == {"cuda", "tensorrt", "engines bf16"}
    assert "cannot run on cuda" in record["skipped"]["cuda"]
    assert {one["way"] for one in record["timed"]} == {"cpu", "engines fp32", "engines fp16"}
    assert all(one["median_ms"] > 0 for one in record["timed"])
    assert not record["broken"]
    assert record["host"]["gpu"] == "Fake GPU" and status == 0
    assert "Skipped" in capsys.readouterr().out
