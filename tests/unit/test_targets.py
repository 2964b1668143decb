"""`stepdial export --target`: engines and repositories, from a bundle that exists."""

import json
import sys
from pathlib import Path

import pytest

from export.__main__ import main
from export.targets import TARGETS
from tests.fake_cuda import FakeCuda
from tests.fake_tensorrt import FakeTensorrt
from tests.fixtures.tiny_families import build_image


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return build_image(tmp_path / "bundle").folder


def test_a_repository_is_written_of_a_bundle(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "repository"
    assert main(["export", str(bundle), "--target", "triton", "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {f"tiny-image-steps-{n}" for n in (1, 2, 4)}
    assert "next: tritonserver" in capsys.readouterr().out
    assert main(["export", str(bundle), "--target", "triton", "--out", str(out)]) == 2
    assert "exists: remove it" in capsys.readouterr().err


def test_engines_are_built_of_a_bundle_or_the_reason_is_said(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["export", str(bundle), "--target", "tensorrt", "--engine-precision", "fp32"]
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert main(command) == 2
    assert "TensorRT cannot be loaded" in capsys.readouterr().err
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cuda)
    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorrt(cuda))
    assert main([*command, "--engine-rows", "2"]) == 0
    assert (tmp_path / "bundles" / "tiny-image-tensorrt" / "engines.json").is_file()
    assert main([*command, "--engine-rows", "0"]) == 2
    assert "at least 1 row" in capsys.readouterr().err


def test_what_no_target_can_be_made_of_a_run_is_said_before_it_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    writes, labels = {"classes": 0}, ["a", "b"]
    for run, sizes, names, target, said in (
        ("decoder", writes, None, ["triton"], "decoder writes text, but a Triton repository"),
        ("odd", {"classes": 2}, ["a\nb", "c"], ["triton"], "has a label of several lines"),
        ("here", {"classes": 2}, labels, ["triton"], "here-triton: exists: remove it"),
        ("gpu", {"classes": 2}, labels, ["tensorrt"], "TensorRT cannot be loaded"),
        ("gpu", {"classes": 2}, labels, ["tensorrt", "--precision", "int8"], "built from fp32"),
        ("gpu", {"classes": 2}, labels, ["tensorrt", "--engine-rows", "0"], "at least 1 row"),
    ):
        (tmp_path / run).mkdir(exist_ok=True)
        facts = {"recipe": {"name": run}, "sizes": sizes, "labels": names}
        (tmp_path / run / "recipe.json").write_text(json.dumps(facts))
        (tmp_path / "bundles" / "here-triton").mkdir(parents=True, exist_ok=True)
        assert main(["export", run, "--target", *target]) == 2
        assert said in capsys.readouterr().err


def test_an_unknown_target_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "x", "--target", "coreml"])
    said = capsys.readouterr().err
    assert all(target in said for target in TARGETS)
