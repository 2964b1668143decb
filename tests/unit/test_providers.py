"""The providers of a session: asked for, got, or refused with what is missing."""

import importlib.util
import logging
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from serve.bundle import Bundle, BundleError, read_bundle
from serve.runtime import open_model
from serve.runtime import session as providers
from serve.runtime.protocol import Device, DeviceName
from serve.runtime.session import check_providers, graph_interface, missing, providers_for
from tests.fixtures.tiny_bundles import build_classify, build_generate

GPU = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
CPU = ["CPUExecutionProvider"]
ZOO = Path(__file__).parents[2] / "zoo"


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return build_generate(tmp_path / "bundle", steps=(1, 2), max_tokens=32)


@pytest.fixture
def gpu_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As onnxruntime-gpu is: it names its providers whether or not there is a GPU."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: GPU)
    monkeypatch.setattr(ort, "preload_dlls", lambda: None, raising=False)


def test_the_cpu_needs_nothing(bundle: Bundle) -> None:
    interface = graph_interface(bundle.manifest)
    assert providers_for(Device(), bundle, interface) == [("CPUExecutionProvider", {})]
    check_providers(CPU, Device(), "steps-1.onnx")
    assert Device().keeps_caches(bundle.manifest)


def test_where_rows_can_stop_early(tmp_path: Path) -> None:
    """Engines of one step are built where there are thresholds to stop at."""
    plain, engines = build_classify(tmp_path / "c").manifest, Device(engines=Path("engines"))
    calibrated = read_bundle(ZOO / "digits").manifest
    assert plain.calibration is None and calibrated.calibration is not None
    for device in (Device(), Device("cuda")):
        assert device.runs_single_steps(plain) and device.runs_single_steps(calibrated)
    assert not engines.runs_single_steps(plain) and engines.runs_single_steps(calibrated)
    assert not Device().runs_single_steps(read_bundle(ZOO / "shakespeare").manifest)


def test_cuda_computes_in_float32_and_may_fall_back(bundle: Bundle, gpu_package: None) -> None:
    (cuda, options), cpu = providers_for(Device("cuda"), bundle, graph_interface(bundle.manifest))
    assert (cuda, options) == ("CUDAExecutionProvider", {"device_id": "0", "use_tf32": "0"})
    assert cpu[0] == "CPUExecutionProvider"


def test_tensorrt_gets_one_profile_for_all_shapes_and_keeps_its_engines(
    bundle: Bundle, gpu_package: None, tmp_path: Path
) -> None:
    found = providers_for(Device("tensorrt"), bundle, graph_interface(bundle.manifest))
    assert [name for name, _ in found] == GPU
    options = found[0][1]
    assert options["trt_profile_min_shapes"] == "tokens:1x1,keep:1"
    assert options["trt_profile_opt_shapes"] == "tokens:32x16,keep:2"
    assert options["trt_profile_max_shapes"] == "tokens:64x32,keep:32"
    folder = Path(options["trt_engine_cache_path"])
    assert folder.is_dir() and folder.is_relative_to(tmp_path / "cache")
    assert options["trt_engine_cache_enable"] == options["trt_timing_cache_enable"] == "True"
    other = build_classify(tmp_path / "other")
    assert providers.cache_folder(other) != providers.cache_folder(bundle)


def test_without_a_place_for_engines_tensorrt_builds_them_at_every_start(
    bundle: Bundle,
    gpu_package: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = providers_for(Device("tensorrt"), bundle, graph_interface(bundle.manifest))
    assert not any("cache" in name for name in found[0][1])
    assert "built anew at every start" in caplog.text


@pytest.mark.parametrize("device", ["cuda", "tensorrt"])
def test_a_package_for_the_cpu_only_is_refused_with_what_to_install(
    bundle: Bundle, device: DeviceName
) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("onnxruntime-gpu is installed here")
    found = providers_for(Device(device), bundle, graph_interface(bundle.manifest))
    session = ort.InferenceSession(bundle.graph_path(1), providers=found)
    with pytest.raises(BundleError, match=rf"steps-1.*cannot run on {device}.*\.\[gpu\]"):
        check_providers(session.get_providers(), Device(device), "steps-1.onnx")


@pytest.mark.parametrize(
    ("loads", "installed", "reason"),
    [
        (False, True, "no NVIDIA driver"),
        (True, False, "the package tensorrt is not installed"),
        (True, True, "print_debug_info"),
    ],
)
def test_a_silent_fall_back_to_the_cpu_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, gpu_package: None, loads: bool, installed: bool, reason: str
) -> None:
    monkeypatch.setattr(providers, "_loads", lambda library: loads)
    spec = object() if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    for got in (CPU, GPU[1:]):
        with pytest.raises(BundleError, match=reason):
            check_providers(got, Device("tensorrt"), "steps-1.onnx")
    assert "libcuda.so.1" in missing("cuda") or loads
    check_providers(GPU, Device("tensorrt"), "steps-1.onnx")
    check_providers(GPU[1:], Device("cuda"), "steps-1.onnx")


def test_a_fall_back_that_is_allowed_is_logged(
    gpu_package: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "stepdial.runtime"):
        check_providers(CPU, Device("cuda", allow_cpu_fallback=True), "steps-1.onnx")
    assert "steps-1.onnx cannot run on cuda, only on CPUExecutionProvider" in caplog.text


def test_a_model_elsewhere_runs_whole_rungs_and_never_silently_on_the_cpu(bundle: Bundle) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("onnxruntime-gpu is installed here")
    with pytest.raises(BundleError, match=r"steps-1\.onnx: cannot run on cuda"):
        open_model(bundle, 1, Device("cuda")).warm_up()
    allowed = open_model(bundle, 1, Device("cuda", allow_cpu_fallback=True))
    decoder = allowed.decoder(2)
    assert decoder.bytes_for(16) == 0, "whole prefixes keep no caches"
    tokens = np.arange(1, 13, dtype=np.int64)[None]  # (1, 12)
    expected = open_model(bundle, 1).decoder(2).forward(tokens)
    np.testing.assert_allclose(decoder.forward(tokens), expected, atol=1e-5)


def test_a_model_on_engines_says_what_to_install(bundle: Bundle, tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("tensorrt is installed here")
    with pytest.raises(BundleError, match="TensorRT cannot be loaded"):
        open_model(bundle, device=Device(engines=tmp_path))
