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

    def __init__(self, gpus: int = 1, status: int = 0) -> None:
        super().__init__("cuda.bindings.runtime")
        self.gpus, self.status = gpus, status
        self.device = 0  # that calls go to
        self.memory: dict[int, Any] = {}
        self.captured: list[Callable[[], None]] | None = None
        self.streams: set[int] = set()
        self.graphs: list[Any] = []  # that can be launched
        self.launches = self.captures = 0

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
        block = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(block)] = block
        return 0, ctypes.addressof(block)

    def cudaFree(self, address: int) -> tuple[int]:
        del self.memory[address]
        return (0,)

    def cudaMemcpyAsync(
        self, target: int, source: int, size: int, kind: int, stream: int
    ) -> tuple[int]:
        device = target if kind == self.cudaMemcpyKind.cudaMemcpyHostToDevice else source
        assert device in self.memory and size <= len(self.memory[device])
        ctypes.memmove(target, source, size)
        return (0,)

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
