"""The memory of the device that a model runs on: arrays, their binding, and KV caches.

There are two kinds. `HostMemory` is numpy arrays, bound by address. `ProviderMemory` is the memory
of an execution provider: arrays are OrtValues, and nothing crosses to the host but what `write` and
`read` move, which are tokens and logits. Caches there grow by a graph that runs on the provider.
"""

from collections.abc import Sequence
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from serve.runtime.cache import CacheLayout, RowCaches
from serve.runtime.protocol import Device

HostArray = npt.NDArray[np.generic]
Shape = tuple[int, ...]
_CUDA = "CUDAExecutionProvider"


@final
class DeviceArray:
    """An array in a device's memory, or a part of one along its first axis."""

    def __init__(
        self, value: ort.OrtValue, shape: Shape, dtype: "np.dtype[Any]", offset_bytes: int = 0
    ) -> None:
        self.value = value  # keeps the memory
        self.shape, self.dtype = shape, dtype
        self._offset_bytes = offset_bytes

    @property
    def address(self) -> int:
        return int(self.value.data_ptr()) + self._offset_bytes

    def __getitem__(self, part: slice) -> "DeviceArray":
        first, end, step = part.indices(self.shape[0])
        assert step == 1, "parts have no gaps"
        row_bytes = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        return DeviceArray(
            self.value,
            (end - first, *self.shape[1:]),
            self.dtype,
            self._offset_bytes + first * row_bytes,
        )


Array = HostArray | DeviceArray  # of one kind of memory each


class Caches(Protocol):
    """The KV caches of a batch: an array (rows, heads, capacity, head_width) a buffer."""

    @property
    def layout(self) -> CacheLayout: ...

    @property
    def version(self) -> int:
        """Changes whenever buffers move."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory held now."""
        ...

    @property
    def arrays(self) -> Sequence[Any]:
        """The buffers (Array), step by step; the used rows are the first."""
        ...

    def reserve(self, used: int, held: int, rows: int, positions: int) -> bool:
        """Make room for rows of up to this many positions; True if the buffers moved.

        The first `used` rows keep their positions, which are `held` at most.
        """
        ...

    def join(self, lengths: Sequence[int], other: Any, length: int, positions: int) -> None:
        """Append the only row of other caches, which has so many positions.

        The rows here have these lengths; each may grow to `positions`.
        """
        ...

    def leave(self, row: int, lengths: Sequence[int], positions: int) -> None:
        """Remove one of the rows of these lengths; the last takes its number.

        Room for this many positions stays.
        """
        ...


class Memory(Protocol):
    """Where arrays and caches of sessions are."""

    def empty(self, shape: Shape, kind: npt.DTypeLike) -> Array:
        """A new array, with any contents."""
        ...

    def hold(self, array: HostArray) -> Array:
        """The array where sessions read it; on the host the same array."""
        ...

    def write(self, target: Array, values: HostArray) -> None:
        """Give what `hold` made the values that its array has now."""
        ...

    def read(self, array: Array) -> HostArray:
        """The contents of a whole array, as it was made, on the host."""
        ...

    def bind_input(self, binding: ort.IOBinding, name: str, array: Array) -> None:
        """Let the graph read this array."""
        ...

    def bind_output(self, binding: ort.IOBinding, name: str, array: Array) -> None:
        """Let the graph write this array."""
        ...

    def caches(self, layout: CacheLayout, lead: int = 1) -> Caches:
        """Caches without rows; `lead` as of RowCaches, where rows can speculate."""
        ...


def memory_for(device: Device, providers: Sequence[str]) -> Memory:
    """The memory of a session that runs on these providers."""
    if device.name == "cpu" or _CUDA not in providers:
        return HOST
    return ProviderMemory("cuda", device.number, cuda_provider(device))


def cuda_provider(device: Device, tf32: bool = False) -> tuple[str, dict[str, str]]:
    """The CUDA provider of this device, with its options."""
    options = {"device_id": str(device.number), "use_tf32": str(int(tf32))}
    if device.memory_mb is not None:
        options["gpu_mem_limit"] = str(device.memory_mb << 20)
        # Otherwise the arena doubles when it grows, past what the limit leaves to others.
        options["arena_extend_strategy"] = "kSameAsRequested"
    return _CUDA, options


@final
class HostMemory:
    """Arrays of numpy. The caller keeps each alive, contiguous and unmoved while it is bound."""

    def empty(self, shape: Shape, kind: npt.DTypeLike) -> HostArray:
        return np.empty(shape, dtype=kind)

    def hold(self, array: HostArray) -> HostArray:
        return array

    def write(self, target: Array, values: HostArray) -> None:
        assert target is values, "the graph reads the array itself"

    def read(self, array: Array) -> HostArray:
        assert isinstance(array, np.ndarray)
        return array

    def bind_input(self, binding: ort.IOBinding, name: str, array: Array) -> None:
        assert isinstance(array, np.ndarray)
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, _address(array))

    def bind_output(self, binding: ort.IOBinding, name: str, array: Array) -> None:
        assert isinstance(array, np.ndarray)
        binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, _address(array))

    def caches(self, layout: CacheLayout, lead: int = 1) -> RowCaches:
        return RowCaches(layout, lead)


def _address(array: HostArray) -> int:
    assert array.flags.c_contiguous
    address: int = array.__array_interface__["data"][0]
    return address


HOST = HostMemory()


@final
class ProviderMemory:
    """Arrays in the memory of an execution provider, as OrtValues; counts what crosses."""

    def __init__(self, kind: str, number: int, provider: tuple[str, dict[str, str]]) -> None:
        """`kind` is ONNX Runtime's name of the memory, such as cuda."""
        self.kind, self.number = kind, number
        self.written_bytes = self.read_bytes = 0
        self._provider = provider
        self._copies: dict[tuple[np.dtype[Any], bool], ort.InferenceSession] = {}

    def empty(self, shape: Shape, kind: npt.DTypeLike) -> DeviceArray:
        dtype = np.dtype(kind)
        value = ort.OrtValue.ortvalue_from_shape_and_type(
            list(shape), dtype.type, self.kind, self.number
        )
        return DeviceArray(value, shape, dtype)

    def hold(self, array: HostArray) -> DeviceArray:
        held = self.empty(array.shape, array.dtype)
        self.write(held, array)
        return held

    def write(self, target: Array, values: HostArray) -> None:
        assert isinstance(target, DeviceArray) and target.shape == values.shape
        target.value.update_inplace(np.ascontiguousarray(values))
        self.written_bytes += values.nbytes

    def read(self, array: Array) -> HostArray:
        assert isinstance(array, DeviceArray)
        values: HostArray = array.value.numpy()
        assert values.shape == array.shape, "part of an array"
        self.read_bytes += values.nbytes
        return values

    def bind_input(self, binding: ort.IOBinding, name: str, array: Array) -> None:
        binding.bind_input(name, *self._bound(array))

    def bind_output(self, binding: ort.IOBinding, name: str, array: Array) -> None:
        binding.bind_output(name, *self._bound(array))

    def caches(self, layout: CacheLayout, lead: int = 1) -> "DeviceCaches":
        return DeviceCaches(layout, self)

    def copies(self, kind: "np.dtype[Any]", joins: bool) -> ort.InferenceSession:
        """The session of `copy_graph` for arrays of this type."""
        key = kind, joins
        if key not in self._copies:
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            options.log_severity_level = 3
            self._copies[key] = ort.InferenceSession(
                copy_graph(kind, joins), options, providers=[self._provider]
            )
        return self._copies[key]

    def _bound(self, array: Array) -> tuple[str, int, type[np.generic], Shape, int]:
        assert isinstance(array, DeviceArray)
        return self.kind, self.number, array.dtype.type, array.shape, array.address


@final
class DeviceCaches:
    """The caches of a batch as one array (buffers, rows, heads, capacity, head_width) of a device.

    It has no row and no position to spare but up to the next bucket: rows that join or leave, and
    positions beyond, move it, in one call of a copying graph.
    """

    def __init__(self, layout: CacheLayout, memory: ProviderMemory) -> None:
        self.layout = layout
        self.version = 0
        self.rows = self.capacity = self.nbytes = 0
        self.arrays: list[DeviceArray] = []
        self._memory = memory
        self._block: DeviceArray | None = None

    def reserve(self, used: int, held: int, rows: int, positions: int) -> bool:
        capacity = self.layout.capacity_for(positions)
        if rows <= self.rows and capacity <= self.capacity:
            return False
        assert used in (0, rows), "rows come by joining"
        self._move(list(range(used)), held, max(capacity, self.capacity), rows)
        return True

    def join(self, lengths: Sequence[int], other: Any, length: int, positions: int) -> None:
        assert isinstance(other, DeviceCaches) and other.rows == 1
        capacity = max(self.layout.capacity_for(positions), self.capacity)
        held = max(lengths, default=0)
        self._move(list(range(len(lengths))), held, capacity, len(lengths) + 1, other, length)

    def leave(self, row: int, lengths: Sequence[int], positions: int) -> None:
        last = len(lengths) - 1
        kept = [last if index == row else index for index in range(last)]
        held = max((lengths[index] for index in kept), default=0)
        self._move(kept, held, self.layout.capacity_for(positions), last)

    def _move(
        self,
        kept: list[int],
        held: int,
        capacity: int,
        rows: int,
        other: "DeviceCaches | None" = None,
        length: int = 0,
    ) -> None:
        """A new block with these rows' first `held` positions, and those of the other's row."""
        layout, memory = self.layout, self._memory
        block = None
        if rows:
            shape = (layout.buffers, rows, layout.heads, capacity, layout.head_width)
            block = memory.empty(shape, layout.kind)
            if kept:
                assert self._block is not None
                self._copy(block, kept, held, other, length)
            elif other is not None:
                assert other._block is not None
                other._copy(block, [0], length, None, 0)
        self._block, self.rows, self.capacity = block, rows, capacity if rows else 0
        self.nbytes = rows * layout.buffers * layout.heads * capacity * self._position_bytes
        self.arrays = []
        if block is not None:
            for index in range(layout.buffers):
                buffer = block[index : index + 1]
                self.arrays.append(
                    DeviceArray(block.value, buffer.shape[1:], buffer.dtype, index * self._stride)
                )
        self.version += 1

    @property
    def _position_bytes(self) -> int:
        return self.layout.head_width * self.layout.kind.itemsize

    @property
    def _stride(self) -> int:
        return self.rows * self.layout.heads * self.capacity * self._position_bytes

    def _copy(
        self,
        block: DeviceArray,
        kept: list[int],
        held: int,
        other: "DeviceCaches | None",
        length: int,
    ) -> None:
        assert self._block is not None
        capacity = block.shape[3]
        session = self._memory.copies(self.layout.kind, other is not None)
        binding = session.io_binding()
        given = {
            "rows": np.array(kept, dtype=np.int64),
            "held": np.array([held], dtype=np.int64),
            "pads": _pads(capacity - min(held, self.capacity)),
        }
        self._memory.bind_input(binding, "kept", self._block)
        if other is not None:
            assert other._block is not None
            given["more_held"] = np.array([length], dtype=np.int64)
            given["more_pads"] = _pads(capacity - min(length, other.capacity))
            self._memory.bind_input(binding, "more", other._block)
        for name, array in given.items():
            binding.bind_cpu_input(name, array)
        self._memory.bind_output(binding, "moved", block)
        session.run_with_iobinding(binding)


def _pads(more: int) -> npt.NDArray[np.int64]:
    """So many positions more behind those that there are."""
    pads = np.zeros(10, dtype=np.int64)
    pads[5 + 3] = more
    return pads


# The graph that copies caches on the device. It is written here as the bytes of an ONNX file, since
# the server has no library that writes them: each field is its number, its length, its bytes.


_KINDS = {np.dtype(np.float32): 1, np.dtype(np.int8): 3, np.dtype(np.float16): 10}
_INT64, _OPSET, _IR_VERSION = 7, 21, 10


def copy_graph(kind: "np.dtype[Any]", joins: bool) -> bytes:
    """kept (N, R, H, P, d), rows (K,), held (1,), pads (10,) to moved (N, K, H, P', d).

    With `joins`, the rows of `more` come behind them, cut and filled up the same way.
    """
    nodes = [_node("Gather", ["kept", "rows"], "picked", axis=1)]
    nodes += _resized("picked", "held", "pads", "moved/kept" if joins else "moved")
    floats, numbers = ["kept"], ["rows", "held", "pads"]
    if joins:
        nodes += _resized("more", "more_held", "more_pads", "moved/more")
        nodes.append(_node("Concat", ["moved/kept", "moved/more"], "moved", axis=1))
        floats, numbers = [*floats, "more"], [*numbers, "more_held", "more_pads"]
    parts = [_field(1, node) for node in nodes] + [_field(2, b"copies")]
    for name, value in (("first", 0), ("axis", 3)):
        tensor = _number(1, 1) + _number(2, _INT64) + _field(8, name.encode())
        parts.append(_field(5, tensor + _field(9, value.to_bytes(8, "little"))))
    parts += [_field(11, _port(name, _KINDS[kind], 5)) for name in floats]
    parts += [_field(11, _port(name, _INT64, 1)) for name in numbers]
    parts.append(_field(12, _port("moved", _KINDS[kind], 5)))
    opset = _field(8, _field(1, b"") + _number(2, _OPSET))
    return _number(1, _IR_VERSION) + opset + _field(7, b"".join(parts))


def _resized(value: str, held: str, pads: str, answer: str) -> list[bytes]:
    """The first positions of a value, and others that are 0."""
    return [
        _node("Slice", [value, "first", held, "axis"], f"{value}/held"),
        _node("Pad", [f"{value}/held", pads], answer),
    ]


def _node(op: str, inputs: Sequence[str], output: str, axis: int | None = None) -> bytes:
    parts = [_field(1, name.encode()) for name in inputs]
    parts += [_field(2, output.encode()), _field(3, output.encode()), _field(4, op.encode())]
    if axis is not None:
        parts.append(_field(5, _field(1, b"axis") + _number(3, axis) + _number(20, 2)))
    return b"".join(parts)


def _port(name: str, kind: int, dimensions: int) -> bytes:
    sizes = [_field(1, _field(2, f"{name}_{axis}".encode())) for axis in range(dimensions)]
    tensor = _number(1, kind) + _field(2, b"".join(sizes))
    return _field(1, name.encode()) + _field(2, _field(1, tensor))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the least first; all but the last have the eighth set."""
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])
