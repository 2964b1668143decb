"""The GPU as the runtime of native engines uses it: memory, one stream, captured graphs.

The only place that calls CUDA, through NVIDIA's cuda-python; knows nothing of TensorRT.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, final

import numpy as np
import numpy.typing as npt

from serve.bundle import BundleError
from serve.runtime.providers import INSTALL

Array = npt.NDArray[np.generic]
_DRIVER_VERSION = Path("/proc/driver/nvidia/version")


def load_tensorrt() -> ModuleType:
    """The package tensorrt; BundleError saying what to install."""
    try:
        library = importlib.import_module("tensorrt")
    except ImportError as error:
        raise BundleError(f"TensorRT cannot be loaded ({error}): {INSTALL}") from None
    if int(library.__version__.split(".")[0]) < 10:
        raise BundleError(
            f"TensorRT {library.__version__} is too old, 10 or newer is needed: {INSTALL}"
        )
    return library


def open_cuda() -> "Cuda":
    """The first GPU; BundleError saying what is missing."""
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise BundleError(f"cuda-python cannot be loaded ({error}): {INSTALL}") from None
    try:
        found = Cuda(runtime).count()
    except (BundleError, RuntimeError) as error:  # cuda-python raises where there is no driver
        raise BundleError(
            f"there is no usable NVIDIA GPU ({error}): install its driver, or start the container "
            "with --gpus all; stepdial serve --device cpu needs none"
        ) from None
    if found == 0:
        raise BundleError(
            "there is no NVIDIA GPU here: use a machine that has one, or stepdial serve --device "
            "cpu, which needs none"
        )
    return Cuda(runtime)


@final
class Cuda:
    """One GPU and one stream on it; every failed call is an error that names it."""

    def __init__(self, runtime: ModuleType) -> None:
        self._runtime = runtime
        self._stream: Any = None

    @property
    def stream(self) -> int:
        """The handle of the stream, as TensorRT takes it."""
        return int(self._opened_stream())

    def count(self) -> int:
        """How many GPUs there are."""
        return int(self._call("cudaGetDeviceCount"))

    def facts(self) -> dict[str, str]:
        """What an engine is tied to, apart from TensorRT itself."""
        properties = self._call("cudaGetDeviceProperties", 0)
        cuda = int(self._call("cudaRuntimeGetVersion"))
        return {
            "gpu": properties.name.decode().rstrip("\0"),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "driver": self._driver(),
            "cuda": _dotted(cuda),
        }

    def allocate(self, size: int) -> int:
        """The address of so many bytes on the GPU."""
        return int(self._call("cudaMalloc", size))

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def upload(self, array: Array, address: int) -> None:
        """Begin to copy a contiguous array to the GPU."""
        self._copy(address, array.ctypes.data, array.nbytes, "cudaMemcpyHostToDevice")

    def download(self, address: int, array: Array) -> None:
        """Begin to copy from the GPU into a contiguous array."""
        self._copy(array.ctypes.data, address, array.nbytes, "cudaMemcpyDeviceToHost")

    def wait(self) -> None:
        """Until all that was begun is done."""
        self._call("cudaStreamSynchronize", self._opened_stream())

    def capture(self, work: Callable[[], None]) -> Any:
        """What `work` puts on the stream, as a graph that can be launched again and again."""
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self._opened_stream(), mode)
        try:
            work()
        finally:
            graph = self._call("cudaStreamEndCapture", self._opened_stream())
        executable = self._call("cudaGraphInstantiate", graph, 0)
        self._call("cudaGraphDestroy", graph)
        return executable

    def launch(self, executable: Any) -> None:
        self._call("cudaGraphLaunch", executable, self._opened_stream())

    def discard(self, executable: Any) -> None:
        """Give back what a captured graph holds."""
        self._call("cudaGraphExecDestroy", executable)

    def close(self) -> None:
        """Give the stream back, if one was opened."""
        if self._stream is not None:
            self._call("cudaStreamDestroy", self._stream)
            self._stream = None

    def _opened_stream(self) -> Any:
        if self._stream is None:
            self._stream = self._call("cudaStreamCreate")
        return self._stream

    def _copy(self, target: int, source: int, size: int, kind: str) -> None:
        kinds = self._runtime.cudaMemcpyKind
        stream = self._opened_stream()
        self._call("cudaMemcpyAsync", target, source, size, getattr(kinds, kind), stream)

    def _driver(self) -> str:
        """The driver's own version, or of CUDA as it offers it where the kernel tells no more."""
        try:
            words = _DRIVER_VERSION.read_text(encoding="ascii").split()
            return next(word for word in words if word.count(".") >= 1 and word[0].isdigit())
        except (OSError, StopIteration):
            return f"CUDA {_dotted(int(self._call('cudaDriverGetVersion')))}"

    def _call(self, name: str, *arguments: object) -> Any:
        """The value of a call, which returns its error first; BundleError names the error."""
        status, *values = getattr(self._runtime, name)(*arguments)
        if int(status):
            _, text = self._runtime.cudaGetErrorString(status)
            raise BundleError(f"{name} failed: {text.decode()}")
        return values[0] if values else None


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
