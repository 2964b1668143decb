"""A stand-in for cuda.bindings.runtime, for machines without a GPU.

Its memory is the host's, and its streams do at once what they are given; but nothing may be copied
that was not allocated, and a captured graph does what it was captured with.
"""

import ctypes
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType
from typing import Any


class FakeCuda(ModuleType):
    """cuda.bindings.runtime of one GPU: every call returns its status first."""

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
        self.captured: list[Callable[[], None]] | None = None
        self.streams: set[int] = set()
        self.graphs: list[Any] = []  # that can be launched
        self.launches = self.captures = 0
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
        self.streams.add(7 + len(self.streams))
        return 0, max(self.streams)

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        self.streams.remove(stream)
        return (0,)

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        block = ctypes.create_string_buffer(size + 256)
        before = -ctypes.addressof(block) % 256  # as CUDA aligns it
        self.memory[ctypes.addressof(block) + before] = (ctypes.c_char * size).from_buffer(
            block, before
        )
        return 0, ctypes.addressof(block) + before

    def cudaFree(self, address: int) -> tuple[int]:
        del self.memory[address]
        return (0,)

    def cudaMemcpyAsync(
        self, target: int, source: int, size: int, kind: int, stream: int
    ) -> tuple[int]:
        to_device = kind == self.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.check(target if to_device else source, size)
        self.crossed[to_device] += size
        ctypes.memmove(target, source, size)
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
        assert width <= min(target_pitch, source_pitch) or height == 1
        for row in range(height):
            places = target + row * target_pitch, source + row * source_pitch
            for place in places:
                self.check(place, width)
            ctypes.memmove(*places, width)
        return (0,)

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[int]:
        self.check(address, size)
        ctypes.memset(address, value, size)
        return (0,)

    def check(self, address: int, size: int) -> None:
        """That these bytes lie in one allocation."""
        assert any(
            first <= address and address + size <= first + len(block)
            for first, block in self.memory.items()
        ), "memory of the GPU that was not allocated"

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        assert self.captured is None, "nothing may wait while a graph is captured"
        return (0,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        self.captured = []
        self.captures += 1
        return (0,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, Any]:
        work, self.captured = self.captured, None
        return 0, work

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, Any]:
        self.graphs.append(graph)
        return 0, graph

    def cudaGraphDestroy(self, graph: Any) -> tuple[int]:
        return (0,)

    def cudaGraphExecDestroy(self, executable: Any) -> tuple[int]:
        self.graphs.remove(executable)
        return (0,)

    def cudaGraphLaunch(self, executable: list[Callable[[], None]], stream: int) -> tuple[int]:
        self.launches += 1
        for work in executable:
            work()
        return (0,)
