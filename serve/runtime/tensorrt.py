"""Native TensorRT engines, run like sessions of onnxruntime: named arrays in, arrays out.

A shape that repeats is captured as a CUDA graph, which launches in one call.
"""

import importlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, cast, final

import numpy as np
import numpy.typing as npt

from serve.bundle import Bundle, BundleError, FileEntry, Manifest
from serve.bundle.folder import check_file, file_entry
from serve.bundle.part import FileName, Part, Sha256, inside_file, part, read_json, several, text
from serve.runtime.cache import CacheLayout
from serve.runtime.classifier import OrtClassifier, OrtStepClassifier
from serve.runtime.decoder import CachedDecoder, Pass, Passes, PastArray, WholePass
from serve.runtime.device import Array as DeviceOrHost
from serve.runtime.device import DeviceArray, DeviceCaches, KeptRows
from serve.runtime.prefix import OrtPrefixDecoder, OrtTranslator
from serve.runtime.protocol import (
    Device,
    FloatArray,
    IntArray,
    Unrolled,
    run_largest,
    rung_for,
)
from serve.runtime.session import (
    INSTALL,
    Dims,
    InterruptibleSession,
    Profile,
    StepSessions,
    bundle_sha256,
)

Array = npt.NDArray[np.generic]
_MOST_APART = (1 << 31) - 1  # bytes between pieces of one copy
_DRIVER_VERSION = Path("/proc/driver/nvidia/version")
LEAST_VERSION = (10, 6)  # since when a builder can be told to keep what is no number


def load_tensorrt() -> ModuleType:
    """The package tensorrt; BundleError says what to install."""
    try:
        library = importlib.import_module("tensorrt")
    except ImportError as error:
        raise BundleError(f"TensorRT cannot be loaded ({error}): {INSTALL}") from None
    version = tuple(int(part) for part in library.__version__.split(".")[:2])
    if version < LEAST_VERSION:
        raise BundleError(
            f"TensorRT {library.__version__} is too old, {'.'.join(map(str, LEAST_VERSION))} or "
            f"newer is needed: {INSTALL}"
        )
    return library


def open_cuda(number: int = 0) -> "Cuda":
    """The GPU of this number; BundleError says what is missing."""
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
    if number >= found:
        raise BundleError(
            f"there is no NVIDIA GPU {number}: the driver shows {found}, numbered from 0; choose "
            "another --device-number"
        )
    cuda = Cuda(runtime, number)
    cuda.use()
    return cuda


@final
class Cuda:
    """One GPU and one stream on it. A failed call raises an error that names it."""

    def __init__(self, runtime: ModuleType, number: int = 0) -> None:
        self._runtime = runtime
        self._number = number
        self._stream: Any = None

    @property
    def stream(self) -> int:
        """The handle of the stream, for TensorRT."""
        return int(self._opened_stream())

    def use(self) -> None:
        """Have the calls of this thread go to this GPU; CUDA asks for that in every thread."""
        self._call("cudaSetDevice", self._number)

    def count(self) -> int:
        """The number of GPUs."""
        return int(self._call("cudaGetDeviceCount"))

    def facts(self) -> dict[str, str]:
        """What an engine depends on, besides TensorRT itself."""
        properties = self._call("cudaGetDeviceProperties", self._number)
        cuda = int(self._call("cudaRuntimeGetVersion"))
        return {
            "gpu": properties.name.decode().rstrip("\0"),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "driver": self._driver(),
            "cuda": _dotted(cuda),
        }

    def allocate(self, size: int) -> int:
        """Allocate bytes on the GPU; returns the address."""
        return int(self._call("cudaMalloc", size))

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def upload(self, array: Array, address: int) -> None:
        """Start copying a contiguous array to the GPU."""
        self._copy(address, array.ctypes.data, array.nbytes, "cudaMemcpyHostToDevice")

    def clear(self, address: int, size: int) -> None:
        """Start filling bytes with zeros."""
        self._call("cudaMemsetAsync", address, 0, size, self._opened_stream())

    def copy_rows(
        self, target: int, every: int, source: int, source_every: int, size: int, count: int
    ) -> None:
        """Start copying `count` pieces of `size` bytes, so many bytes apart on each side."""
        if max(every, source_every) > _MOST_APART:
            for at in range(count):
                places = target + at * every, source + at * source_every
                self._copy(*places, size, "cudaMemcpyDeviceToDevice")
            return
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        stream = self._opened_stream()
        self._call(
            "cudaMemcpy2DAsync", target, every, source, source_every, size, count, kind, stream
        )

    def download(self, address: int, array: Array) -> None:
        """Start copying from the GPU into a contiguous array."""
        self._copy(array.ctypes.data, address, array.nbytes, "cudaMemcpyDeviceToHost")

    def wait(self) -> None:
        self._call("cudaStreamSynchronize", self._opened_stream())

    def capture(self, work: Callable[[], None]) -> Any:
        """The work that `work` puts on the stream, as a graph that can be launched again."""
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
        """Free a captured graph."""
        self._call("cudaGraphExecDestroy", executable)

    def close(self) -> None:
        """Close the stream, if one was opened."""
        if self._stream is not None:
            self._call("cudaStreamDestroy", self._stream)
            self._stream = None

    def _opened_stream(self) -> Any:
        if self._stream is None:
            # Otherwise nothing else could use the default stream while a graph is captured, as
            # TensorRT does when another thread loads a model.
            flag = self._runtime.cudaStreamNonBlocking
            self._stream = self._call("cudaStreamCreateWithFlags", flag)
        return self._stream

    def _copy(self, target: int, source: int, size: int, kind: str) -> None:
        kinds = self._runtime.cudaMemcpyKind
        stream = self._opened_stream()
        self._call("cudaMemcpyAsync", target, source, size, getattr(kinds, kind), stream)

    def _driver(self) -> str:
        """The driver's version, or the CUDA version it offers if the kernel tells no more."""
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


MAX_GRAPHS = 32  # of a model
# Inputs that all rows share; others, and all outputs, have one part a row.
_SHARED = frozenset({"keep"})
Key = tuple[tuple[str, Dims], ...]


@dataclass(frozen=True, slots=True)
class _Captured:
    """A captured graph, and the context that must stay unchanged as long as it lives."""

    executable: Any
    context: Any
    outputs: Mapping[str, Dims]


@final
class ContextPool:
    """The execution contexts and captured graphs of a model's engines.

    Calls run one after another, so all share one block of working memory, which is as large as the
    largest engine needs.
    """

    def __init__(self, library: ModuleType, cuda: Cuda) -> None:
        self._library = library
        self._cuda = cuda
        self._memory = self._size = 0  # its address and bytes
        self._contexts: dict[tuple[int, int], Any] = {}  # by engine and profile
        self._captured: dict[tuple[int, Key], _Captured] = {}  # by engine and shapes
        # The runtime is kept, since an engine must not outlive it.
        self.runtime = library.Runtime(library.Logger(library.Logger.WARNING))

    @property
    def full(self) -> bool:
        """Whether no more shapes can be captured."""
        return len(self._captured) >= MAX_GRAPHS

    def grow(self, size: int) -> None:
        """Have this much working memory; if it moves, contexts and graphs are made anew."""
        if size <= self._size:
            return
        self.forget()
        if self._memory:
            self._cuda.free(self._memory)
        self._memory = self._size = 0
        self._memory, self._size = self._cuda.allocate(size), size

    def context(self, engine: Any, index: int) -> Any:
        """The context of an engine's profile, for shapes that are not captured."""
        key = id(engine), index
        if key not in self._contexts:
            self._contexts[key] = self.new_context(engine, index)
        return self._contexts[key]

    def new_context(self, engine: Any, index: int) -> Any:
        strategy = self._library.ExecutionContextAllocationStrategy.USER_MANAGED
        context = engine.create_execution_context(strategy)
        if context is None:
            raise BundleError("TensorRT has no memory for another execution context")
        context.set_device_memory(self._memory, engine.device_memory_size_v2)
        context.set_optimization_profile_async(index, self._cuda.stream)
        self._cuda.wait()
        return context

    def captured(self, engine: Any, key: Key) -> _Captured | None:
        """The graph of these shapes, if it is kept."""
        return self._captured.get((id(engine), key))

    def keep(self, engine: Any, key: Key, captured: _Captured) -> None:
        self._captured[id(engine), key] = captured

    def discard_graphs(self, engine: Any = None) -> None:
        """Free the captured graphs of an engine, whose buffers move; of all if none is given."""
        self._cuda.wait()
        for key in [one for one in self._captured if engine is None or one[0] == id(engine)]:
            self._cuda.discard(self._captured.pop(key).executable)

    def forget(self, engine: Any = None) -> None:
        """Free the graphs and contexts of an engine, which must not outlive it; or of all."""
        self.discard_graphs(engine)
        for key in [one for one in self._contexts if engine is None or one[0] == id(engine)]:
            del self._contexts[key]

    def close(self) -> None:
        self.forget()
        if self._memory:
            self._cuda.free(self._memory)
            self._memory = self._size = 0
        self.runtime = None


@final
class TrtSession:
    """An engine with its buffers; its contexts and captured graphs are in the pool."""

    def __init__(
        self,
        library: ModuleType,
        cuda: Cuda,
        pool: ContextPool,
        plan: bytes,
        profiles: Sequence[Profile],
    ) -> None:
        self._cuda = cuda
        self._pool = pool
        self._engine = pool.runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise BundleError("TensorRT cannot load this engine; its log above says why")
        self._profiles = profiles
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        modes = library.TensorIOMode
        self._inputs = [one for one in names if self._engine.get_tensor_mode(one) == modes.INPUT]
        self._outputs = [one for one in names if one not in self._inputs]
        self._types = {one: library.nptype(self._engine.get_tensor_dtype(one)) for one in names}
        self._buffers: dict[str, tuple[int, int]] = {}  # name: (address, bytes)
        self._seen: set[Key] = set()
        pool.grow(max(1, self._engine.device_memory_size_v2))

    # As on a session of onnxruntime, of whose description only the name is used.

    def get_inputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in self._inputs]

    def get_outputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in self._outputs]

    def kind_of(self, name: str) -> "np.dtype[Any]":
        """The type of an input or output."""
        kind: np.dtype[Any] = np.dtype(self._types[name])
        return kind

    def launch(self, arrays: Mapping[str, DeviceArray]) -> None:
        """Put a run on the stream that reads and writes these arrays of the GPU.

        Outputs that are not among them go where nobody looks.
        """
        key: Key = tuple((name, arrays[name].shape) for name in self._inputs)
        context = self._pool.context(self._engine, self._choose(key))
        self._prepare(context, key, arrays)
        self._enqueue(context)

    def close(self) -> None:
        """Free the GPU's memory; nothing runs here any more."""
        self._pool.forget(self._engine)
        while self._buffers:
            _, (address, _) = self._buffers.popitem()
            self._cuda.free(address)
        self._engine = None

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]:
        """Run for these outputs; more rows than the engine takes are split into parts."""
        self._cuda.use()
        rows = max(len(array) for name, array in feeds.items() if name not in _SHARED)
        most = self.max_rows
        parts = []
        for start in range(0, rows, most):
            fed = {
                name: array if name in _SHARED else array[start : start + most]
                for name, array in feeds.items()
            }
            parts.append(self._run_part(outputs, fed))
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
        """Put the engine's work on the stream; returns the shapes of its outputs."""
        captured = self._pool.captured(self._engine, key)
        if captured is not None:
            self._cuda.launch(captured.executable)
            return captured.outputs
        # The first shapes that repeat are kept; replacing one at each call would cost more.
        if key in self._seen and not self._pool.full:
            return self._capture(key)
        self._seen.add(key)
        context = self._pool.context(self._engine, self._choose(key))
        shapes = self._prepare(context, key)
        self._enqueue(context)
        return shapes

    def _capture(self, key: Key) -> Mapping[str, Dims]:
        """Run a shape on a context of its own, and keep it as a graph."""
        context = self._pool.new_context(self._engine, self._choose(key))
        shapes = self._prepare(context, key)
        # TensorRT initialises in the first run with new shapes, which must not be captured.
        self._enqueue(context)
        self._cuda.wait()
        executable = self._cuda.capture(lambda: self._enqueue(context))
        self._pool.keep(self._engine, key, _Captured(executable, context, shapes))
        return shapes

    def _prepare(
        self, context: Any, key: Key, arrays: Mapping[str, DeviceArray] = MappingProxyType({})
    ) -> Mapping[str, Dims]:
        """Set a context's shapes and addresses; returns the shapes of the outputs.

        What is not among the arrays has a buffer of the session.
        """
        for name, shape in key:
            if not context.set_input_shape(name, shape):
                raise ValueError(f"the engine does not take {name} of shape {shape}")
        unknown = context.infer_shapes()
        if unknown:
            raise BundleError(f"TensorRT cannot tell the shape of {', '.join(unknown)}")
        shapes = {name: tuple(context.get_tensor_shape(name)) for name in self._outputs}
        for name, array in arrays.items():
            if name in shapes and array.shape != shapes[name]:
                raise BundleError(f"the engine gives {name} as {shapes[name]}, not {array.shape}")
        for name, shape in shapes.items():
            if name not in arrays:
                self._reserve(name, shape)
        for name in (*self._inputs, *self._outputs):
            own = self._buffers.get(name, (0, 0))[0]
            address = arrays[name].address if name in arrays else own
            if not context.set_tensor_address(name, address):
                raise BundleError(f"TensorRT does not take the address of {name}")
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
        """A buffer that is large enough. If it moves, captured graphs are dropped."""
        size = max(1, int(np.prod(shape)) * np.dtype(self._types[name]).itemsize)
        address, has = self._buffers.get(name, (0, 0))
        if size <= has:
            return
        if address:
            self._pool.discard_graphs(self._engine)
            del self._buffers[name]
            self._cuda.free(address)
        self._buffers[name] = (self._cuda.allocate(size), size)

    @property
    def max_rows(self) -> int:
        """The most rows of a call."""
        name = next(one for one in self._inputs if one not in _SHARED)
        return max(profile[name].max[0] for profile in self._profiles)


# Decoders with caches. The engine of a step takes the keys and values of earlier positions and
# gives those of the new ones, which are then copied behind them, all on the GPU. So a row of a
# buffer has its positions one behind the other: (buffers, rows, capacity, heads, head_width).


class _Block:
    """Memory of the GPU, freed when nothing uses it any more."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self._address = cuda.allocate(max(1, size))
        weakref.finalize(self, cuda.free, self._address).atexit = False

    def data_ptr(self) -> int:
        return self._address


@final
class TrtMemory:
    """Arrays and caches in the memory of a GPU."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def empty(self, shape: Dims, kind: npt.DTypeLike) -> DeviceArray:
        dtype = np.dtype(kind)
        self.cuda.use()  # the device is chosen anew in each thread
        return DeviceArray(
            _Block(self.cuda, int(np.prod(shape)) * dtype.itemsize), tuple(shape), dtype
        )

    def hold(self, array: Array) -> DeviceArray:
        held = self.empty(array.shape, array.dtype)
        self.write(held, array)
        return held

    def write(self, target: DeviceOrHost, values: Array) -> None:
        """Copy to the GPU, and wait: until then CUDA may still read the values."""
        assert isinstance(target, DeviceArray) and target.shape == values.shape
        assert target.dtype == values.dtype
        source = np.ascontiguousarray(values)
        self.cuda.upload(source, target.address)
        self.cuda.wait()

    def read(self, array: DeviceOrHost) -> Array:
        """Wait for the stream; the contents on the host."""
        assert isinstance(array, DeviceArray)
        values: Array = np.empty(array.shape, dtype=array.dtype)
        self.cuda.download(array.address, values)
        self.cuda.wait()
        return values

    def cache_block(self, layout: CacheLayout, rows: int, capacity: int) -> DeviceArray:
        shape = (layout.buffers, rows, capacity, layout.heads, layout.head_width)
        block = self.empty(shape, layout.kind)
        # What is not there yet has no weight, but must be a number.
        self.cuda.clear(block.address, int(np.prod(shape)) * layout.kind.itemsize)
        return block

    def move(self, target: DeviceArray, parts: Sequence[KeptRows]) -> None:
        place, to = 0, _Rows.of(target)
        for kept in parts:
            assert (np.diff(kept.order) == 1).all(), "buffers that change places"
            source = _Rows.of(kept.block)
            for row in kept.rows:
                self.cuda.copy_rows(
                    target.address + place * to.row,
                    to.buffer,
                    kept.block.address + row * source.row,
                    source.buffer,
                    min(kept.held, kept.block.shape[2], target.shape[2]) * to.position,
                    target.shape[0],
                )
                place += 1
        self.cuda.wait()  # before a block that was moved is freed


class _Rows(NamedTuple):
    """The bytes of a position, a row and a buffer of caches."""

    position: int
    row: int
    buffer: int

    @classmethod
    def of(cls, block: DeviceArray) -> Self:
        _, rows, capacity, heads, width = block.shape
        position = heads * width * block.dtype.itemsize
        return cls(position, capacity * position, rows * capacity * position)


@final
class TrtPasses(Passes):
    """Passes on the engines of embedding, step and head."""

    def __init__(self, sessions: StepSessions, manifest: Manifest, memory: TrtMemory) -> None:
        """The sessions' own memory is not used: what passes read and write is on the GPU."""
        super().__init__(sessions, manifest)
        self.memory = memory

    def caches(self, layout: CacheLayout, lead: int) -> DeviceCaches:
        return DeviceCaches(layout, self.memory)

    def open(
        self,
        caches: Sequence[DeviceOrHost],
        tokens: IntArray,
        past: PastArray,
        keep: IntArray,
    ) -> Pass:
        most = engine_of_session(self.sessions.step).max_rows
        parts = [slice(first, first + most) for first in range(0, len(tokens), most)]
        passes = [
            TrtPass(self, [_device(one)[part] for one in caches], tokens[part], past[part], keep)
            for part in parts
        ]
        return passes[0] if len(passes) == 1 else _PassOfParts(tokens, passes)

    def scratch(self, layout: CacheLayout, rows: int, positions: int) -> Sequence[DeviceArray]:
        caches = DeviceCaches(layout, self.memory)
        caches.reserve(0, 0, rows, positions)
        return caches.arrays


@final
class _PassOfParts(Pass):
    """A pass of more rows than the engines take: one part after another."""

    def __init__(self, tokens: IntArray, parts: Sequence["TrtPass"]) -> None:
        self.tokens, self.steps = tokens, parts[0].steps
        self._parts = parts

    def begin(self) -> None:
        for one in self._parts:
            one.begin()

    def advance(self, first: int, end: int) -> None:
        for one in self._parts:
            one.advance(first, end)

    def end(self) -> FloatArray:
        return np.concatenate([part.end() for part in self._parts])


ALIGNMENT = 256  # bytes, of every address that TensorRT takes


@final
class TrtPass(WholePass):
    """A pass through the engines; what it reads and writes stays on the GPU."""

    def __init__(
        self,
        passes: TrtPasses,
        caches: Sequence[DeviceArray],
        tokens: IntArray,
        past: PastArray,
        keep: IntArray,
    ) -> None:
        sessions, memory = passes.sessions, passes.memory
        self._cuda, self._caches = memory.cuda, caches
        self._embed, self._step, self._head = (
            engine_of_session(one) for one in (sessions.embed, sessions.step, sessions.head)
        )
        # The new keys and values of all steps, in the order that the caches have in memory.
        (rows, length), (_, _, *heads) = tokens.shape, caches[0].shape
        shape, dtype = (rows, length, *heads), caches[0].dtype
        each = int(np.prod(shape)) * dtype.itemsize
        self._length, self._new_bytes = length, -(-each // ALIGNMENT) * ALIGNMENT
        self._new = memory.empty((len(caches), self._new_bytes), np.uint8)
        self._places = sorted(cache.address for cache in caches)
        made = [
            DeviceArray(
                self._new.value,
                shape,
                dtype,
                self._places.index(cache.address) * self._new_bytes,
            )
            for cache in caches
        ]
        super().__init__(passes, memory, caches, made, tokens, past, keep)

    def begin(self) -> None:
        self._cuda.use()
        self.write_given()
        self._embed.launch(self.embedded)

    def advance(self, first: int, end: int) -> None:
        self._cuda.use()
        for arrays in self.stepped[first:end]:
            self._step.launch(arrays)
        if end == self.steps:  # a chunk of a prompt ends here, without logits
            self._keep_new()

    def end(self) -> FloatArray:
        self._cuda.use()
        self._head.launch(self.read_out)
        return self.memory.read(self.logits)  # type: ignore[return-value]  # float32

    def _keep_new(self) -> None:
        """Put the new keys and values of each row behind those that there are."""
        cache, (first, second) = self._caches[0], self._places[:2]
        position = int(np.prod(cache.shape[2:])) * cache.dtype.itemsize
        row = cache.shape[1] * position
        new_row = self._length * position
        for index, past in enumerate(self.past.tolist()):
            self._cuda.copy_rows(
                first + index * row + past * position,
                second - first,
                self._new.address + index * new_row,
                self._new_bytes,
                new_row,
                len(self._caches),
            )


def engine_of_session(session: object) -> TrtSession:
    """A session of an engine, where sessions of onnxruntime may be too."""
    assert isinstance(session, TrtSession)
    return session


def _device(buffer: DeviceOrHost) -> DeviceArray:
    assert isinstance(buffer, DeviceArray)
    return buffer


# engines.json: the engines in a folder, their bundle and their machine. An engine runs only where
# it was built, so this is checked before one is loaded.


ENGINES_FILE = "engines.json"
TIMING_FILE = "timing.cache"
SCHEMA_VERSION: Final = 2  # 1 had no engines of one step
Precision = Literal["fp32", "fp16", "bf16"]

_AGAIN = "build the engines here: stepdial export BUNDLE --target tensorrt"
_WORDS = {
    "gpu": "the GPU",
    "compute_capability": "the compute capability",
    "driver": "the NVIDIA driver",
    "cuda": "CUDA",
    "tensorrt": "TensorRT",
}


Fact = Annotated[str, text(256)]


@part
class Host(Part):
    """The machine an engine was built on."""

    gpu: Fact
    compute_capability: Fact
    driver: Fact
    cuda: Fact
    tensorrt: Fact


@part
class TrtEngine(Part):
    """The engine of one graph of the bundle."""

    graph: FileName
    file: FileName
    entry: FileEntry
    profiles: Annotated[tuple[Profile, ...], several(16)]


@part
class EnginesManifest(Part):
    """The contents of engines.json."""

    name: Annotated[str, text()]
    bundle_sha256: Sha256  # of manifest.json, which has the hashes of all other files
    precision: Precision
    host: Host
    engines: Annotated[tuple[TrtEngine, ...], several(4096)]
    schema_version: Literal[2] = SCHEMA_VERSION

    def engine(self, graph: str) -> TrtEngine:
        """The engine of a graph of the bundle."""
        for engine in self.engines:
            if engine.graph == graph:
                return engine
        raise BundleError(f"has no engine for {graph}; {_AGAIN}", file=ENGINES_FILE)


def engine_of(graph: str, path: Path, profiles: Sequence[Profile]) -> TrtEngine:
    """The entry of an engine that was just written."""
    return TrtEngine(graph, path.name, file_entry(path), tuple(profiles))


def read_engines(folder: Path, bundle: Bundle, here: Host) -> EnginesManifest:
    """The engines of a bundle, all files checked; BundleError if they are not for this machine."""
    path = folder / ENGINES_FILE
    if not path.is_file():
        raise BundleError(
            f"has no {ENGINES_FILE}, so it holds no engines; {_AGAIN}", file=str(folder)
        )
    value = read_json(path)
    with inside_file(path):
        manifest = EnginesManifest.from_json(value)
        if manifest.bundle_sha256 != bundle_sha256(bundle):
            raise BundleError(
                f"holds engines of another bundle than {bundle.folder}, or of an older export of "
                f"it; {_AGAIN}"
            )
        check_host(manifest.host, here)
    for engine in manifest.engines:
        check_file(folder / engine.file, engine.entry, verify=True)
    return manifest


def check_host(built: Host, here: Host) -> None:
    """BundleError with every difference between the build machine and this one."""
    differences = [
        f"{word} is {getattr(here, field)} instead of {getattr(built, field)}"
        for field, word in _WORDS.items()
        if getattr(here, field) != getattr(built, field)
    ]
    if differences:
        raise BundleError(
            f"holds engines that were built elsewhere and run only there: {'; '.join(differences)}"
            f"; {_AGAIN}"
        )


def this_host(cuda: Cuda) -> Host:
    """This machine, as engines depend on it."""
    return Host(**cuda.facts(), tensorrt=load_tensorrt().__version__)


def engines_of(folder: Path, bundle: Bundle) -> Path:
    """The engines of a bundle: in the folder itself, or in its subfolder of the model's name."""
    named = folder / bundle.manifest.name
    return named if (named / ENGINES_FILE).is_file() else folder


@final
class TrtModel:
    """All rungs of a bundle as engines on one GPU, opened when first needed."""

    def __init__(self, bundle: Bundle, folder: Path, number: int = 0) -> None:
        self._library = load_tensorrt()
        self._cuda = open_cuda(number)
        self._device = Device(engines=folder, number=number)
        self.bundle = bundle
        self._folder = folder
        self._engines = read_engines(folder, bundle, this_host(self._cuda))
        self._pool = ContextPool(self._library, self._cuda)
        self._sessions: dict[str, TrtSession] = {}
        self._memory = TrtMemory(self._cuda)

    @property
    def precision(self) -> Precision:
        """The precision that the engines compute in."""
        return self._engines.precision

    @property
    def most_parts(self) -> int:
        return 1  # a GPU splits the rows itself

    @property
    def single_steps(self) -> bool:
        return self._device.runs_single_steps(self.bundle.manifest)

    def classifier(self, steps: int) -> OrtClassifier:
        rung = rung_for(self.bundle.manifest, steps, "classify", "tag")
        return OrtClassifier(self._session(rung.graph), self.bundle.manifest)

    def step_classifier(self, steps: int) -> OrtStepClassifier:
        rung_for(self.bundle.manifest, steps, "classify", "tag")
        if not self.single_steps:
            raise BundleError(
                f"{self.bundle.manifest.name} has one engine for each step count, which cannot "
                "stop early: export the run with calibration, and build engines of that bundle"
            )
        return OrtStepClassifier(self._step_sessions(), self.bundle.manifest, steps)

    def decoder(self, steps: int) -> CachedDecoder | OrtPrefixDecoder:
        manifest = self.bundle.manifest
        rung = rung_for(manifest, steps, "generate")
        if not manifest.keeps_caches:
            return OrtPrefixDecoder(self._session(rung.graph), manifest)
        passes = TrtPasses(self._step_sessions(), manifest, self._memory)
        kind = engine_of_session(passes.sessions.step).kind_of(passes.names[0])
        # A part of a bucket may end where TensorRT takes no address; whole ones do not.
        layout = replace(CacheLayout.of(manifest, rung), kind=kind, whole_buckets=True)
        return CachedDecoder(passes, layout)

    def unrolled(self, steps: int) -> Unrolled:
        """The rung in the form that there is here: of a decoder with caches, its steps."""
        if self.bundle.manifest.labelled:
            return self.classifier(steps)
        return self.decoder(steps)

    def translator(self, steps: int) -> OrtTranslator:
        rung = rung_for(self.bundle.manifest, steps, "translate")
        assert rung.encoder is not None
        return OrtTranslator(
            self._session(rung.encoder), self._session(rung.graph), self.bundle.manifest
        )

    def mix(self) -> None:
        return None

    def warm_up(self) -> None:
        for steps in self.bundle.manifest.steps:
            run_largest(self, steps)

    def close(self) -> None:
        """Free the GPU's memory."""
        self._cuda.use()
        while self._sessions:
            self._sessions.popitem()[1].close()
        self._pool.close()
        self._cuda.close()

    @property
    def opening(self) -> bool:
        return False  # all are open after warm-up

    def interrupt(self) -> None:
        """A started engine cannot be stopped."""

    def resume(self) -> None:
        """Nothing was stopped."""

    def _step_sessions(self) -> StepSessions:
        """The engines of embedding, step and head."""
        manifest = self.bundle.manifest
        assert manifest.step is not None
        embed, step, head = (
            cast("InterruptibleSession", self._session(graph))
            for graph in (manifest.step.embed, manifest.step.step, manifest.step.head)
        )
        return StepSessions(manifest, embed, step, step, head)

    def _session(self, graph: str) -> TrtSession:
        if graph not in self._sessions:
            self._cuda.use()
            engine = self._engines.engine(graph)
            path = self._folder / engine.file
            with inside_file(path):
                self._sessions[graph] = TrtSession(
                    self._library, self._cuda, self._pool, path.read_bytes(), engine.profiles
                )
        return self._sessions[graph]
