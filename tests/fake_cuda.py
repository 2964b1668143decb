"""A stand-in for cuda.bindings.runtime, for machines without a GPU.

Its memory is the host's. A stream does what it is given as late as CUDA may: when somebody waits
for it, or when memory is allocated or freed. Nothing may be copied that was not allocated, and a
captured graph does what it was captured with.
"""

import ctypes
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from types import ModuleType
from typing import Any

Work = Callable[[], object]


class FakeCuda(ModuleType):
    """cuda.bindings.runtime of one GPU: every call returns its status first."""

    cudaStreamNonBlocking = 1

    class cudaStreamCaptureMode(IntEnum):
        cudaStreamCaptureModeThreadLocal = 1

    class cudaMemcpyKind(IntEnum):
        cudaMemcpyHostToDevice = 1
        cudaMemcpyDeviceToHost = 2
        cudaMemcpyDeviceToDevice = 3

    def __init__(self, gpus: int = 1, status: int = 0) -> None:
        super().__init__("cuda.bindings.runtime")
        self.gpus, self.status = gpus, status
        self.device = 0  # that calls go to
        self.memory: dict[int, Any] = {}
        self.streams: dict[int, list[Work]] = {}  # what they have not done yet
        self.blocking: set[int] = set()  # those that the legacy stream waits for
        self.captured: dict[int, list[Work]] = {}  # by stream
        self.graphs: list[Any] = []  # that can be launched
        self.launches = self.captures = 0
        self.most_pitch = (1 << 31) - 1
        self.crossed = {True: 0, False: 0}  # bytes to the device, and to the host

    def cudaGetDeviceCount(self) -> tuple[int, int | None]:
        return self.status, None if self.status else self.gpus

    def cudaSetDevice(self, device: int) -> tuple[int]:
        self.device = device
        return (0 if device < self.gpus else 101,)

    def cudaGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, f"error {status}".encode()

    def cudaGetDeviceProperties(self, device: int) -> tuple[int, Any]:
        properties = ModuleType("properties")
        properties.name, properties.major, properties.minor = b"Fake GPU\0", 9, 0  # type: ignore[attr-defined]  # a namespace
        return 0, properties

    def cudaRuntimeGetVersion(self) -> tuple[int, int]:
        return 0, 13040

    def cudaDriverGetVersion(self) -> tuple[int, int]:
        return 0, 13050

    def cudaStreamCreate(self) -> tuple[int, int]:
        return self.cudaStreamCreateWithFlags(0)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        stream = max(self.streams, default=6) + 1
        self.streams[stream] = []
        if flags != self.cudaStreamNonBlocking:
            self.blocking.add(stream)
        return 0, stream

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        self.finish(stream)
        del self.streams[stream]
        return (0,)

    def put(self, stream: int, work: Work) -> None:
        """Put work on a stream, or into the graph that is captured there."""
        self.captured.get(stream, self.streams[stream]).append(work)

    def finish(self, *streams: int) -> None:
        """Do what lies on these streams."""
        for stream in streams:
            waiting, self.streams[stream] = self.streams[stream], []
            for work in waiting:
                work()

    def legacy(self) -> int:
        """The status of a call that uses the legacy stream, as cudaMemcpy does."""
        return 906 if self.blocking & self.captured.keys() else 0

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        self.finish(*self.streams)
        block = ctypes.create_string_buffer(size + 256)
        before = -ctypes.addressof(block) % 256  # as CUDA aligns it
        self.memory[ctypes.addressof(block) + before] = (ctypes.c_char * size).from_buffer(
            block, before
        )
        return 0, ctypes.addressof(block) + before

    def cudaFree(self, address: int) -> tuple[int]:
        self.finish(*self.streams)
        del self.memory[address]
        return (0,)

    def cudaMemcpyAsync(
        self, target: int, source: int, size: int, kind: int, stream: int
    ) -> tuple[int]:
        to_device = kind != self.cudaMemcpyKind.cudaMemcpyDeviceToHost
        from_device = kind != self.cudaMemcpyKind.cudaMemcpyHostToDevice
        if to_device:
            self.check(target, size)
        if from_device:
            self.check(source, size)
        if not (to_device and from_device):
            self.crossed[to_device] += size
        self.put(stream, lambda: ctypes.memmove(target, source, size))
        return (0,)

    def cudaMemcpy2DAsync(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        kind: int,
        stream: int,
    ) -> tuple[int]:
        assert kind == self.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        if max(target_pitch, source_pitch) > self.most_pitch or width > min(
            target_pitch, source_pitch
        ):
            return (12,)
        for row in range(height):
            places = target + row * target_pitch, source + row * source_pitch
            for place in places:
                self.check(place, width)
            self.put(stream, partial(ctypes.memmove, *places, width))
        return (0,)

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[int]:
        self.check(address, size)
        self.put(stream, lambda: ctypes.memset(address, value, size))
        return (0,)

    def check(self, address: int, size: int) -> None:
        """That these bytes lie in one allocation."""
        assert any(
            first <= address and address + size <= first + len(block)
            for first, block in self.memory.items()
        ), "memory of the GPU that was not allocated"

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        assert stream not in self.captured, "nothing may wait while a graph is captured"
        self.finish(stream)
        return (0,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        self.captured[stream] = []
        self.captures += 1
        return (0,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, Any]:
        return 0, self.captured.pop(stream)

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, Any]:
        self.graphs.append(graph)
        return 0, graph

    def cudaGraphDestroy(self, graph: Any) -> tuple[int]:
        return (0,)

    def cudaGraphExecDestroy(self, executable: Any) -> tuple[int]:
        self.graphs.remove(executable)
        return (0,)

    def cudaGraphLaunch(self, executable: list[Work], stream: int) -> tuple[int]:
        self.launches += 1
        for work in executable:
            self.put(stream, work)
        return (0,)
