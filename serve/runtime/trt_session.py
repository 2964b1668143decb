"""One TensorRT engine that runs as an onnxruntime session would: named arrays in, arrays out.

A shape that comes again is captured as a CUDA graph, which is launched in one call instead of a
call a kernel. Knows engines and shapes; neither bundles nor what the arrays mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, final

import numpy as np
import numpy.typing as npt

from serve.bundle import BundleError
from serve.runtime.trt_device import Array, Cuda
from serve.runtime.trt_shapes import Dims, Profile

MAX_GRAPHS = 32
# Inputs that all rows share; the others, and all outputs, have one part a row.
_SHARED = frozenset({"keep"})
Key = tuple[tuple[str, Dims], ...]


@dataclass(frozen=True, slots=True)
class InputName:
    """What the classes that run sessions ask of an input."""

    name: str


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, and the context that must live and stay as it is for as long as the graph does."""

    executable: Any
    context: Any
    outputs: Mapping[str, Dims]


@final
class TrtSession:
    """A context a profile, and one a captured graph; all take turns with one block of memory."""

    def __init__(
        self, library: ModuleType, cuda: Cuda, plan: bytes, profiles: Sequence[Profile]
    ) -> None:
        self._library = library
        self._cuda = cuda
        # The runtime is kept: an engine must not outlive it.
        self._runtime = library.Runtime(library.Logger(library.Logger.WARNING))
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise BundleError("TensorRT cannot load this engine; its log above says why")
        self._profiles = profiles
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        modes = library.TensorIOMode
        self._inputs = [one for one in names if self._engine.get_tensor_mode(one) == modes.INPUT]
        self._outputs = [one for one in names if one not in self._inputs]
        self._types = {one: library.nptype(self._engine.get_tensor_dtype(one)) for one in names}
        self._buffers: dict[str, tuple[int, int]] = {}  # name: address and size in bytes
        self._contexts: dict[int, Any] = {}
        self._captured: dict[Key, _Captured] = {}
        self._seen: set[Key] = set()
        self._memory = cuda.allocate(max(1, self._engine.device_memory_size_v2))

    @property
    def graphs(self) -> int:
        """Shapes that run as a captured graph."""
        return len(self._captured)

    def get_inputs(self) -> list[InputName]:
        """As a session of onnxruntime has it."""
        return [InputName(name) for name in self._inputs]

    def close(self) -> None:
        """Give the memory of the GPU back; nothing runs here any more."""
        self._discard_graphs()
        self._contexts.clear()
        while self._buffers:
            _, (address, _) = self._buffers.popitem()
            self._cuda.free(address)
        if self._memory:
            self._cuda.free(self._memory)
            self._memory = 0
        self._engine = self._runtime = None  # in this order: see above

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]:
        """These outputs; more rows than the engine takes run one part after another."""
        rows = max(len(array) for name, array in feeds.items() if name not in _SHARED)
        most = self._max_rows()
        parts = [
            self._run_part(
                outputs, {name: _rows(name, array, start, most) for name, array in feeds.items()}
            )
            for start in range(0, rows, most)
        ]
        return [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]

    def _run_part(self, outputs: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]:
        arrays = {
            name: np.ascontiguousarray(feeds[name], dtype=self._types[name])
            for name in self._inputs
        }
        key: Key = tuple((name, arrays[name].shape) for name in self._inputs)
        for name, array in arrays.items():
            self._reserve(name, array.shape)
            self._cuda.upload(array, self._buffers[name][0])
        shapes = self._execute(key)
        answers: list[Array] = []
        for name in outputs:
            answer: Array = np.empty(shapes[name], dtype=self._types[name])
            self._cuda.download(self._buffers[name][0], answer)
            answers.append(answer)
        self._cuda.wait()
        return answers

    def _execute(self, key: Key) -> Mapping[str, Dims]:
        """Put the engine's work on the stream; the shapes of its outputs."""
        if key in self._captured:
            captured = self._captured[key]
            self._cuda.launch(captured.executable)
            return captured.outputs
        # The first shapes that repeat are kept: to replace one by another at each call costs more.
        if key in self._seen and len(self._captured) < MAX_GRAPHS:
            return self._capture(key)
        self._seen.add(key)
        index = self._choose(key)
        if index not in self._contexts:
            self._contexts[index] = self._make_context(index)
        context = self._contexts[index]
        shapes = self._prepare(context, key)
        self._enqueue(context)
        return shapes

    def _capture(self, key: Key) -> Mapping[str, Dims]:
        """Run a shape on a context of its own, and keep that as a graph."""
        context = self._make_context(self._choose(key))
        shapes = self._prepare(context, key)
        # TensorRT sets itself up in the first run with new shapes, which must not be captured.
        self._enqueue(context)
        self._cuda.wait()
        executable = self._cuda.capture(lambda: self._enqueue(context))
        self._captured[key] = _Captured(executable, context, shapes)
        return shapes

    def _make_context(self, index: int) -> Any:
        strategy = self._library.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise BundleError("TensorRT has no memory for another execution context")
        context.set_device_memory(self._memory, self._engine.device_memory_size_v2)
        if not context.set_optimization_profile_async(index, self._cuda.stream):
            raise BundleError(f"TensorRT refused the optimization profile {index}")
        self._cuda.wait()
        return context

    def _prepare(self, context: Any, key: Key) -> Mapping[str, Dims]:
        """Tell a context its shapes and addresses; the shapes of the outputs."""
        for name, shape in key:
            if not context.set_input_shape(name, shape):
                raise ValueError(f"the engine does not take {name} of shape {shape}")
        unknown = context.infer_shapes()
        if unknown:
            raise BundleError(f"TensorRT cannot tell the shape of {', '.join(unknown)}")
        shapes = {name: tuple(context.get_tensor_shape(name)) for name in self._outputs}
        for name, shape in shapes.items():
            self._reserve(name, shape)
        for name in (*self._inputs, *self._outputs):
            context.set_tensor_address(name, self._buffers[name][0])
        return shapes

    def _enqueue(self, context: Any) -> None:
        if not context.execute_async_v3(stream_handle=self._cuda.stream):
            raise BundleError("TensorRT failed to run the engine; its log above says why")

    def _choose(self, key: Key) -> int:
        """The first profile that takes these shapes."""
        for index, profile in enumerate(self._profiles):
            if all(profile[name].holds(shape) for name, shape in key):
                return index
        shapes = ", ".join(f"{name} {shape}" for name, shape in key)
        raise ValueError(f"no profile of the engine takes {shapes}")

    def _reserve(self, name: str, shape: Dims) -> None:
        """A buffer that is large enough; captured graphs know the old address, so they go."""
        size = max(1, int(np.prod(shape)) * np.dtype(self._types[name]).itemsize)
        address, has = self._buffers.get(name, (0, 0))
        if size <= has:
            return
        if address:
            self._discard_graphs()
            del self._buffers[name]
            self._cuda.free(address)
        self._buffers[name] = (self._cuda.allocate(size), size)

    def _discard_graphs(self) -> None:
        self._cuda.wait()
        for captured in self._captured.values():
            self._cuda.discard(captured.executable)
        self._captured.clear()

    def _max_rows(self) -> int:
        name = next(one for one in self._inputs if one not in _SHARED)
        return max(profile[name].max[0] for profile in self._profiles)


def _rows(name: str, array: Array, start: int, count: int) -> npt.NDArray[np.generic]:
    return array if name in _SHARED else array[start : start + count]
