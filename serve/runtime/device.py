"""The memory of the device that a model runs on: arrays, their binding, and KV caches.

There are two kinds. `HostMemory` is numpy arrays, bound by address. `ProviderMemory` is the memory
of an execution provider: arrays are OrtValues, and nothing crosses to the host but what `write` and
`read` move, which are tokens, lengths and logits. Caches there grow, and states are picked and
joined, by small graphs that run on the provider.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from serve.runtime.cache import CacheLayout, RowCaches, new_version, places
from serve.runtime.protocol import Device, FloatArray

HostArray = npt.NDArray[np.generic]
Shape = tuple[int, ...]
_CUDA = "CUDAExecutionProvider"


@final
@dataclass(frozen=True, slots=True, eq=False)
class DeviceArray:
    """An array in a device's memory, or a part of one along its first axis."""

    value: Any  # keeps the memory, and has `data_ptr()`: an OrtValue, or a block
    shape: Shape
    dtype: "np.dtype[Any]"
    offset_bytes: int = 0

    @property
    def address(self) -> int:
        return int(self.value.data_ptr()) + self.offset_bytes

    def __getitem__(self, part: slice) -> "DeviceArray":
        first, end, step = part.indices(self.shape[0])
        assert step == 1, "parts have no gaps"
        row_bytes = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        return DeviceArray(
            self.value,
            (end - first, *self.shape[1:]),
            self.dtype,
            self.offset_bytes + first * row_bytes,
        )


Array = HostArray | DeviceArray  # of one kind of memory each


class ArrayMemory(Protocol):
    """Where arrays are."""

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
    """Arrays of numpy. The caller keeps each alive, contiguous and unmoved while it is bound.

    Besides, as in ProviderMemory, where caches are, and what runs there without leaving.
    """

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
        """Let the graph read this array."""
        assert isinstance(array, np.ndarray)
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, _address(array))

    def bind_output(self, binding: ort.IOBinding, name: str, array: Array) -> None:
        """Let the graph write this array."""
        assert isinstance(array, np.ndarray)
        binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, _address(array))

    def caches(self, layout: CacheLayout, lead: int = 1) -> RowCaches:
        """Caches without rows; `lead` as of RowCaches."""
        return RowCaches(layout, lead)

    def run(
        self, session: ort.InferenceSession, outputs: Sequence[str], feeds: Mapping[str, Array]
    ) -> list[Array]:
        """These outputs of a graph, which stay where they are made. Feeds may be of the host."""
        made: list[Array] = session.run(outputs, feeds)
        return made

    def pick(self, array: Array, rows: npt.NDArray[np.int64]) -> HostArray:
        """These rows of an array (B, ...)."""
        assert isinstance(array, np.ndarray)
        picked: HostArray = array[rows]
        return picked

    def joined(self, parts: Sequence[Array]) -> HostArray:
        """The rows of all parts, one part behind the other."""
        return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])

    def jumped(self, x: Array, y: Array, left: HostArray) -> HostArray:
        """x + left (y - x), in this order; where `left` is 1, exactly y."""
        assert isinstance(x, np.ndarray) and isinstance(y, np.ndarray)
        states: FloatArray = np.subtract(y, x, dtype=np.float32)
        states *= left.astype(np.float32)
        states += x.astype(np.float32, copy=False)
        return np.where(left == 1, y, states)


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
        self._graphs: dict[bytes, ort.InferenceSession] = {}

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
        return DeviceCaches(layout, self, lead)

    def cache_block(self, layout: CacheLayout, rows: int, capacity: int) -> DeviceArray:
        shape = (layout.buffers, rows, layout.heads, capacity, layout.head_width)
        return self.empty(shape, layout.kind)

    def move(self, target: DeviceArray, parts: Sequence["KeptRows"]) -> None:
        first, *more = parts
        session = self.session(copy_graph(target.dtype, joins=bool(more)))
        binding = session.io_binding()
        capacity = target.shape[3]
        given = {"rows": np.array(first.rows, dtype=np.int64)}
        for part, name, before in zip(parts, ("kept", "more"), ("", "more_"), strict=False):
            given[f"{before}order"] = part.order
            given[f"{before}held"] = np.array([part.held], dtype=np.int64)
            given[f"{before}pads"] = _pads(capacity - min(part.held, part.block.shape[3]))
            self.bind_input(binding, name, part.block)
        for name, array in given.items():
            binding.bind_cpu_input(name, array)
        self.bind_output(binding, "made", target)
        session.run_with_iobinding(binding)

    def run(
        self, session: ort.InferenceSession, outputs: Sequence[str], feeds: Mapping[str, Array]
    ) -> list[Array]:
        binding = session.io_binding()
        held = {  # until the run has ended
            name: self.hold(array) if isinstance(array, np.ndarray) else array
            for name, array in feeds.items()
        }
        for name, array in held.items():
            self.bind_input(binding, name, array)
        for name in outputs:
            binding.bind_output(name, self.kind, self.number)
        session.run_with_iobinding(binding)
        return [
            DeviceArray(value, tuple(value.shape()), _OF_NUMBER[value.element_type()])
            for value in binding.get_outputs()
        ]

    def pick(self, array: Array, rows: npt.NDArray[np.int64]) -> DeviceArray:
        assert isinstance(array, DeviceArray)
        graph = pick_graph(array.dtype, len(array.shape))
        return self._computed(graph, {"all": array, "rows": rows})

    def joined(self, parts: Sequence[Array]) -> DeviceArray:
        first, *others = parts
        for other in others:
            graph = join_graph(first.dtype, len(first.shape))
            first = self._computed(graph, {"first": first, "second": other})
        assert isinstance(first, DeviceArray)
        return first

    def jumped(self, x: Array, y: Array, left: HostArray) -> DeviceArray:
        graph = jump_graph(len(x.shape))
        sizes = left.astype(np.float32).reshape(left.shape or (1,) * len(x.shape))
        return self._computed(graph, {"x": x, "y": y, "left": sizes})

    def session(self, graph: bytes) -> ort.InferenceSession:
        """The session of one of the graphs below."""
        if graph not in self._graphs:
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            options.log_severity_level = 3
            self._graphs[graph] = ort.InferenceSession(graph, options, providers=[self._provider])
        return self._graphs[graph]

    def _computed(self, graph: bytes, feeds: Mapping[str, Array]) -> DeviceArray:
        (made,) = self.run(self.session(graph), ["made"], feeds)
        assert isinstance(made, DeviceArray)
        return made

    def _bound(self, array: Array) -> tuple[str, int, type[np.generic], Shape, int]:
        assert isinstance(array, DeviceArray)
        return self.kind, self.number, array.dtype.type, array.shape, array.address


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows of a block of caches that go into another block."""

    block: DeviceArray  # (buffers, rows, ...)
    order: npt.NDArray[np.int64]  # of its buffers in the other block
    rows: Sequence[int]
    held: int  # positions of each, at most


class CacheMemory(Protocol):
    """A device's memory, as its caches need it."""

    def cache_block(self, layout: CacheLayout, rows: int, capacity: int) -> DeviceArray:
        """A new array (buffers, rows, ...) for keys and values of so many positions."""
        ...

    def move(self, target: DeviceArray, parts: Sequence[KeptRows]) -> None:
        """Fill a block with the rows of one part or two, one behind the other."""
        ...


@final
class DeviceCaches:
    """The caches of a batch as one array (buffers, rows, ...) of a device.

    The buffers of all steps lie one behind the other for each buffer of a step, with steps `lead`
    apart next to each other, as in RowCaches. There is no row and no position to spare but up to
    the next bucket: rows that join or leave, and positions beyond, move it, on the device.
    """

    def __init__(self, layout: CacheLayout, memory: CacheMemory, lead: int = 1) -> None:
        self.layout, self.lead = layout, lead
        self.version = new_version()
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

    def arrange(self, lead: int, held: int) -> bool:
        assert self.rows == 1
        if self.lead == lead:
            return False
        self._move([0], held, self.capacity, 1, lead=lead)
        return True

    def along(self, step: int, count: int) -> list[DeviceArray]:
        assert self.rows == 1
        steps = self.layout.steps
        first = places(steps, self.lead)[step]
        return [self._buffer(at * steps + first, count) for at in range(self._a_step)]

    def _move(
        self,
        kept: list[int],
        held: int,
        capacity: int,
        rows: int,
        other: "DeviceCaches | None" = None,
        length: int = 0,
        lead: int | None = None,
    ) -> None:
        """A new block with these rows' first `held` positions, and those of the other's row."""
        layout, lead = self.layout, lead or self.lead
        block = self._memory.cache_block(layout, rows, capacity) if rows else None
        parts = [self._kept(lead, kept, held)] if kept else []
        if other is not None:
            parts.append(other._kept(lead, [0], length))
        if block is not None and parts:
            self._memory.move(block, parts)
        self._block, self.rows, self.capacity = block, rows, capacity if rows else 0
        self.lead, self.arrays, self.nbytes = lead, [], 0
        if block is not None:
            self.nbytes = int(np.prod(block.shape)) * layout.kind.itemsize
            self.arrays = [
                self._buffer(at * layout.steps + place)
                for place in places(layout.steps, lead)
                for at in range(self._a_step)
            ]
        self.version = new_version()

    def _kept(self, lead: int, rows: Sequence[int], held: int) -> KeptRows:
        assert self._block is not None
        steps = self.layout.steps
        now, then = places(steps, self.lead), places(steps, lead)
        order = [now[then.index(place)] for place in range(steps)]
        each = [at * steps + place for at in range(self._a_step) for place in order]
        return KeptRows(self._block, np.array(each, dtype=np.int64), rows, held)

    def _buffer(self, index: int, count: int = 1) -> DeviceArray:
        """So many buffers of a row each, from this one on; of more rows, one."""
        assert self._block is not None and (count == 1 or self.rows == 1)
        rows, *rest = self._block.shape[1:]
        kind = self.layout.kind
        offset = index * rows * int(np.prod(rest)) * kind.itemsize
        return DeviceArray(self._block.value, (count * rows, *rest), kind, offset)

    @property
    def _a_step(self) -> int:
        return self.layout.buffers // self.layout.steps


Caches = RowCaches | DeviceCaches
Memory = HostMemory | ProviderMemory


def memory_for(device: Device, providers: Sequence[str]) -> Memory:
    """The memory of a session that runs on these providers."""
    if device.name == "cpu" or _CUDA not in providers:
        return HOST
    return ProviderMemory("cuda", device.number, cuda_provider(device))


def _pads(more: int) -> npt.NDArray[np.int64]:
    """So many positions more behind those that there are."""
    pads = np.zeros(10, dtype=np.int64)
    pads[5 + 3] = more
    return pads


# The graphs that move caches and states on the device. They are written here as the bytes of an
# ONNX file, since the server has no library that writes them: each field is its number, its length,
# its bytes.


_KINDS: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): 1,
    np.dtype(np.int8): 3,
    np.dtype(np.int32): 6,
    np.dtype(np.int64): 7,
    np.dtype(np.bool_): 9,
    np.dtype(np.float16): 10,
}
_OF_NUMBER = {number: kind for kind, number in _KINDS.items()}
_FLOAT, _INT64 = np.dtype(np.float32), np.dtype(np.int64)
_OPSET, _IR_VERSION = 21, 10
Port = tuple[str, "np.dtype[Any]", int]  # name, type, dimensions


def copy_graph(kind: "np.dtype[Any]", joins: bool) -> bytes:
    """kept (N, R, H, P, d), order (N,), rows (K,), held (1,), pads (10,) to made (N, K, H, P', d).

    With `joins`, the rows of `more` come behind them, put in order, cut and filled up the same way.
    """
    nodes = [
        _node("Gather", ["kept", "order"], "ordered", axis=0),
        _node("Gather", ["ordered", "rows"], "picked", axis=1),
        *_resized("picked", "held", "pads", "made/kept" if joins else "made"),
    ]
    ports: list[Port] = [("kept", kind, 5), ("order", _INT64, 1), ("rows", _INT64, 1)]
    ports += [("held", _INT64, 1), ("pads", _INT64, 1)]
    if joins:
        nodes.append(_node("Gather", ["more", "more_order"], "more/ordered", axis=0))
        nodes += _resized("more/ordered", "more_held", "more_pads", "made/more")
        nodes.append(_node("Concat", ["made/kept", "made/more"], "made", axis=1))
        ports += [("more", kind, 5), ("more_order", _INT64, 1)]
        ports += [("more_held", _INT64, 1), ("more_pads", _INT64, 1)]
    constants = [
        _tensor(name, _INT64, np.array([value])) for name, value in (("first", 0), ("axis", 3))
    ]
    return _model(nodes, ports, ("made", kind, 5), constants)


def pick_graph(kind: "np.dtype[Any]", dimensions: int) -> bytes:
    """all (B, ...), rows (K,) to made (K, ...)."""
    ports: list[Port] = [("all", kind, dimensions), ("rows", _INT64, 1)]
    nodes = [_node("Gather", ["all", "rows"], "made", axis=0)]
    return _model(nodes, ports, ("made", kind, dimensions))


def join_graph(kind: "np.dtype[Any]", dimensions: int) -> bytes:
    """first (A, ...), second (B, ...) to made (A + B, ...)."""
    ports: list[Port] = [("first", kind, dimensions), ("second", kind, dimensions)]
    nodes = [_node("Concat", ["first", "second"], "made", axis=0)]
    return _model(nodes, ports, ("made", kind, dimensions))


def jump_graph(dimensions: int) -> bytes:
    """x, y, left to made: x + left (y - x); where left is 1, y."""
    ports: list[Port] = [(name, _FLOAT, dimensions) for name in ("x", "y", "left")]
    nodes = [
        _node("Sub", ["y", "x"], "v"),
        _node("Mul", ["v", "left"], "way"),
        _node("Add", ["way", "x"], "end"),
        _node("Equal", ["left", "one"], "there"),
        _node("Where", ["there", "y", "end"], "made"),
    ]
    one = np.ones(1, dtype=np.float32)
    return _model(nodes, ports, ("made", _FLOAT, dimensions), [_tensor("one", _FLOAT, one)])


def _resized(value: str, held: str, pads: str, answer: str) -> list[bytes]:
    """The first positions of a value, and others that are 0."""
    return [
        _node("Slice", [value, "first", held, "axis"], f"{value}/held"),
        _node("Pad", [f"{value}/held", pads], answer),
    ]


def _model(
    nodes: Sequence[bytes], inputs: Sequence[Port], output: Port, constants: Sequence[bytes] = ()
) -> bytes:
    parts = chain(
        (_field(1, node) for node in nodes),
        [_field(2, b"moves")],
        (_field(5, constant) for constant in constants),
        (_field(11, _port(*port)) for port in inputs),
        [_field(12, _port(*output))],
    )
    opset = _field(8, _field(1, b"") + _number(2, _OPSET))
    return _number(1, _IR_VERSION) + opset + _field(7, b"".join(parts))


def _tensor(name: str, kind: "np.dtype[Any]", values: HostArray) -> bytes:
    """A constant of one dimension."""
    head = _number(1, len(values)) + _number(2, _KINDS[kind])
    return head + _field(8, name.encode()) + _field(9, values.tobytes())


def _node(op: str, inputs: Sequence[str], output: str, axis: int | None = None) -> bytes:
    parts = [_field(1, name.encode()) for name in inputs]
    parts += [_field(2, output.encode()), _field(3, output.encode()), _field(4, op.encode())]
    if axis is not None:
        parts.append(_field(5, _field(1, b"axis") + _number(3, axis) + _number(20, 2)))
    return b"".join(parts)


def _port(name: str, kind: "np.dtype[Any]", dimensions: int) -> bytes:
    sizes = [_field(1, _field(2, f"{name}_{axis}".encode())) for axis in range(dimensions)]
    tensor = _number(1, _KINDS[kind]) + _field(2, b"".join(sizes))
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
