"""One weights file for all graphs of a bundle: equal initializers stand in it once.

Knows tensors and offsets; not what they mean.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

SMALL_BYTES = 1024  # smaller tensors stay inside their graph
ALIGNMENT = 4096  # so that a runtime can map a tensor without copying it


Content = tuple[object, ...]


class Contents(NamedTuple):
    """What a large tensor holds, as it stands and transposed: equal ones have equal contents."""

    upright: Content
    turned: Content | None  # of a matrix


def contents_of(tensor: TensorProto) -> Contents | None:
    """Those of a tensor that goes into the file; None of a smaller one."""
    array = numpy_helper.to_array(tensor)
    if array.nbytes < SMALL_BYTES:
        return None
    return Contents(_content(array), _content(array.T) if array.ndim == 2 else None)


def _content(array: np.ndarray[Any, Any]) -> Content:
    data = np.ascontiguousarray(array)
    return data.dtype.str, data.shape, hashlib.sha256(data.data).digest()


class WeightsFile:
    """Collects initializers by content, whatever the graphs call them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._offsets: dict[bytes, int] = {}
        self._end = 0

    def externalise(self, model: onnx.ModelProto) -> None:
        """Move the large initializers of a graph into the file."""
        for tensor in model.graph.initializer:
            data = numpy_helper.to_array(tensor).tobytes()
            if len(data) < SMALL_BYTES:
                continue
            offset = self._place(data)
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
            tensor.ClearField("int64_data")
            tensor.ClearField("external_data")
            tensor.data_location = TensorProto.EXTERNAL
            facts = {"location": self.name, "offset": str(offset), "length": str(len(data))}
            for key, value in facts.items():
                tensor.external_data.add(key=key, value=value)

    def write(self, folder: Path) -> None:
        with (folder / self.name).open("wb") as file:
            for data, offset in self._offsets.items():
                file.seek(offset)
                file.write(data)

    def _place(self, data: bytes) -> int:
        if data not in self._offsets:
            offset = -(-self._end // ALIGNMENT) * ALIGNMENT
            self._offsets[data] = offset
            self._end = offset + len(data)
        return self._offsets[data]
