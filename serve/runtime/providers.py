"""Where onnxruntime runs a graph: its execution providers, and whether a session really got them.

onnxruntime only logs it when a provider cannot be made, and runs on the CPU instead; here that is
an error that says what is missing. Knows devices and packages; not what is run.
"""

import ctypes
import hashlib
import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import onnxruntime as ort

from serve.bundle import MANIFEST_FILE, Bundle, BundleError
from serve.runtime.interface import Interface
from serve.runtime.place import Device, Place
from serve.runtime.trt_shapes import Profile, one_profile

Provider = tuple[str, dict[str, str]]

INSTALL = "pip install '.[gpu]' in an environment without onnxruntime, which excludes it"
_CPU: Provider = ("CPUExecutionProvider", {})
_NAMES = {"cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
_DRIVER = "libcuda.so.1"
_log = logging.getLogger("stepdial.runtime")


def providers_for(device: Device, bundle: Bundle, interface: Interface) -> list[Provider]:
    """The providers of a session, the wanted one first, less those that are not installed."""
    if device == "cpu":
        return [_CPU]
    _load_libraries(device)
    wanted: list[Provider] = [("CUDAExecutionProvider", {"use_tf32": "0"}), _CPU]
    if device == "tensorrt":
        profile = one_profile(interface.inputs, bundle.manifest)
        wanted.insert(0, (_NAMES["tensorrt"], _tensorrt_options(cache_folder(bundle), profile)))
    available = ort.get_available_providers()
    return [provider for provider in wanted if provider[0] in available]


def check_providers(got: Sequence[str], place: Place, file: str) -> None:
    """BundleError unless a session got the provider of its device: `session.get_providers()`."""
    if place.device == "cpu" or _NAMES[place.device] in got:
        return
    problem = f"cannot run on {place.device}, only on {', '.join(got)}: {missing(place.device)}"
    if not place.allow_cpu_fallback:
        raise BundleError(
            f"{problem}; or serve with --device cpu, or with --allow-cpu-fallback", file=file
        )
    _log.warning("%s %s", file, problem)


def missing(device: Device) -> str:
    """What has to be installed for this device to work, as far as can be told."""
    if _NAMES.get(device) not in ort.get_available_providers():
        return f"this onnxruntime ({ort.__version__}) is for the CPU only: {INSTALL}"
    if not _loads(_DRIVER):
        return (
            f"there is no NVIDIA driver ({_DRIVER} cannot be loaded): install it, or start the "
            "container with --gpus all"
        )
    if device == "tensorrt" and importlib.util.find_spec("tensorrt") is None:
        return f"the package tensorrt is not installed: {INSTALL}"
    return (
        "onnxruntime could not start it, and its log above says why; python -c 'import "
        "onnxruntime; onnxruntime.print_debug_info()' lists the CUDA libraries that it finds"
    )


def cache_folder(bundle: Bundle) -> Path:
    """Where the engines of onnxruntime's TensorRT provider are kept: not in the sealed bundle."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256((bundle.folder / MANIFEST_FILE).read_bytes()).hexdigest()
    return Path(root) / "stepdial" / "tensorrt" / f"{bundle.manifest.name}-{digest[:16]}"


def _tensorrt_options(folder: Path, profile: Profile) -> dict[str, str]:
    """Engines are kept; and made once for all shapes, instead of again for each larger one."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(folder),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(folder),
    }
    for side in ("min", "opt", "max"):
        shapes = {name: getattr(bounds, side) for name, bounds in profile.items()}
        options[f"trt_profile_{side}_shapes"] = ",".join(
            f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items()
        )
    return options


def _load_libraries(device: Device) -> None:
    """Load the CUDA and TensorRT libraries that came as Python packages, where there are any."""
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    if device == "tensorrt" and importlib.util.find_spec("tensorrt") is not None:
        importlib.import_module("tensorrt")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
