"""A stand-in for the package tensorrt, for machines without a GPU.

It has the names and the rules that the documentation gives, and onnxruntime in place of kernels; so
everything up to the driver call runs for real.
"""

import ctypes
import json
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from tests.fake_cuda import FakeCuda

NUMPY = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


@dataclass
class Built:
    """What a builder was told, for tests to look at."""

    flags: int = 0
    builder_flags: set[str] = field(default_factory=set)
    profiles: list[dict[str, Any]] = field(default_factory=list)
    timings: bytes = b""


class FakeTensorrt(ModuleType):
    """The part of tensorrt 10.14 that is used; `built` says what each build was told."""

    class Logger:
        WARNING = 2

        def __init__(self, severity: int) -> None:
            assert severity == self.WARNING

    class TensorIOMode(IntEnum):
        INPUT = 1
        OUTPUT = 2

    class NetworkDefinitionCreationFlag(IntEnum):
        STRONGLY_TYPED = 1

    class BuilderFlag(IntEnum):
        TF32 = 6
        STRICT_NANS = 24

    class ExecutionContextAllocationStrategy(IntEnum):
        USER_MANAGED = 2

    def __init__(self, cuda: FakeCuda, version: str = "10.14.1.48") -> None:
        super().__init__("tensorrt")
        self.cuda, self.__version__ = cuda, version
        self.built: list[Built] = []
        self.parse_error = ""

    def nptype(self, kind: Any) -> Any:
        return kind

    def Builder(self, logger: Any) -> "FakeBuilder":
        return FakeBuilder(self)

    def OnnxParser(self, network: Any, logger: Any) -> "FakeParser":
        return FakeParser(self, network)

    def Runtime(self, logger: Any) -> "FakeRuntime":
        return FakeRuntime(self)


class FakeParser:
    def __init__(self, library: FakeTensorrt, network: "FakeNetwork") -> None:
        self._library, self._network = library, network

    @property
    def num_errors(self) -> int:
        return 1

    def get_error(self, index: int) -> str:
        return self._library.parse_error

    def parse(self, model: bytes, path: str | None = None) -> bool:
        if self._library.parse_error:
            return False
        self._network.read(model, Path(str(path)))
        return True


class FakeNetwork:
    def __init__(self) -> None:
        self.model, self.path = b"", Path()
        self._names: list[str] = []

    def read(self, model: bytes, path: Path) -> None:
        self.model, self.path = model, path
        self._names = [node.name for node in onnx.load_from_string(model).graph.input]

    @property
    def num_inputs(self) -> int:
        return len(self._names)

    def get_input(self, index: int) -> Any:
        tensor = ModuleType("tensor")
        tensor.name = self._names[index]  # type: ignore[attr-defined]  # a namespace
        return tensor


class FakeProfile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        assert all(low <= usual <= high for low, usual, high in zip(min, opt, max, strict=True))
        self.shapes[input] = [list(min), list(opt), list(max)]


class FakeCache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> memoryview:
        return memoryview(self.data + b"+")


class FakeConfig:
    def __init__(self, built: Built) -> None:
        self._built = built
        self._cache = FakeCache(b"")

    def set_flag(self, flag: Any) -> None:
        self._built.builder_flags.add(flag.name)

    def clear_flag(self, flag: Any) -> None:
        self._built.builder_flags.discard(flag.name)

    def add_optimization_profile(self, profile: FakeProfile) -> int:
        self._built.profiles.append(profile.shapes)
        return len(self._built.profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> FakeCache:
        return FakeCache(bytes(serialized_timing_cache))

    def set_timing_cache(self, cache: FakeCache, ignore_mismatch: bool) -> bool:
        if cache.data.startswith(b"other GPU"):
            return False
        self._cache, self._built.timings = cache, cache.data
        return True

    def get_timing_cache(self) -> FakeCache:
        return self._cache


class FakeBuilder:
    def __init__(self, library: FakeTensorrt) -> None:
        self._library = library
        # TF32 is on unless it is cleared.
        library.built.append(Built(builder_flags={"TF32"}))

    def create_network(self, flags: int) -> FakeNetwork:
        self._library.built[-1].flags = flags
        return FakeNetwork()

    def create_builder_config(self) -> FakeConfig:
        return FakeConfig(self._library.built[-1])

    def create_optimization_profile(self) -> FakeProfile:
        return FakeProfile()

    def build_serialized_network(self, network: FakeNetwork, config: FakeConfig) -> Any:
        told = {"folder": str(network.path.parent), "profiles": self._library.built[-1].profiles}
        return memoryview(json.dumps(told).encode() + b"\n" + network.model)


class FakeRuntime:
    def __init__(self, library: FakeTensorrt) -> None:
        self._library = library

    def deserialize_cuda_engine(self, plan: bytes) -> "FakeEngine | None":
        if self._library.cuda.legacy():
            return None
        told, _, model = plan.partition(b"\n")
        try:
            return FakeEngine(self._library, json.loads(told), model)
        except Exception:  # onnxruntime has no base class of its own
            return None


class FakeEngine:
    device_memory_size_v2 = 64

    def __init__(self, library: FakeTensorrt, told: dict[str, Any], model: bytes) -> None:
        self.library, self.profiles = library, told["profiles"]
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", told["folder"]
        )
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.inputs = {node.name: node for node in self.session.get_inputs()}
        self.outputs = {node.name: node for node in self.session.get_outputs()}

    @property
    def num_io_tensors(self) -> int:
        return len(self.inputs) + len(self.outputs)

    def get_tensor_name(self, index: int) -> str:
        names: list[str] = [*self.inputs, *self.outputs]
        return names[index]

    def get_tensor_mode(self, name: str) -> Any:
        modes = self.library.TensorIOMode
        return modes.INPUT if name in self.inputs else modes.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return NUMPY[(self.inputs | self.outputs)[name].type]

    def create_execution_context(self, strategy: Any) -> "FakeContext":
        return FakeContext(self)


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._profile = -1
        self._has_memory = False
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size <= len(self._engine.library.cuda.memory[memory])
        self._has_memory = True

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if profile_index >= len(self._engine.profiles):
            raise RuntimeError("Error in set optimization profile async.")
        self._profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self._engine.profiles[self._profile][name]
        self._shapes[name] = shape
        return all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))

    def infer_shapes(self) -> list[str]:
        return [name for name in self._engine.inputs if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> list[int]:
        sizes: dict[Any, int] = {}
        for one, shape in self._shapes.items():
            sizes |= dict(zip(self._engine.inputs[one].shape, shape, strict=True))
        return [sizes.get(side, side) for side in self._engine.outputs[name].shape]

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if memory % 256:
            return False
        self._engine.library.cuda.check(memory, 1)
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        cuda = self._engine.library.cuda
        assert self._has_memory and isinstance(stream_handle, int)
        # A captured graph keeps the shapes and addresses of its capture.
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        cuda.put(stream_handle, lambda: self._work(shapes, addresses))
        return True

    def _work(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        cuda, engine = self._engine.library.cuda, self._engine
        feeds = {}
        for name, shape in shapes.items():
            kind = np.dtype(engine.get_tensor_dtype(name))
            size = int(np.prod(shape)) * kind.itemsize
            cuda.check(addresses[name], size)
            data = ctypes.string_at(addresses[name], size)
            feeds[name] = np.frombuffer(data, kind).reshape(shape)
        outputs = list(engine.outputs)
        for name, array in zip(outputs, engine.session.run(outputs, feeds), strict=True):
            cuda.check(addresses[name], array.nbytes)
            ctypes.memmove(addresses[name], array.ctypes.data, array.nbytes)
