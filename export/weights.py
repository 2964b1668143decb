"""One weights file for all graphs of a bundle: equal initializers stand in it once.

Knows tensors and offsets; not what they mean.
"""

import hashlib
from pathlib import Path

import onnx
from onnx import TensorProto, numpy_helper

SMALL_BYTES = 1024  # smaller tensors stay inside their graph
ALIGNMENT = 4096  # so that a runtime can map a tensor without copying it


class WeightsFile:
    """Collects initializers by content, whatever the graphs call them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._placed: dict[bytes, tuple[int, bytes]] = {}  # (offset, data) by digest
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
            for offset, data in sorted(self._placed.values()):
                file.seek(offset)
                file.write(data)

    def _place(self, data: bytes) -> int:
        digest = hashlib.sha256(data).digest()
        if digest in self._placed:
            return self._placed[digest][0]
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._placed[digest] = (offset, data)
        self._end = offset + len(data)
        return offset
