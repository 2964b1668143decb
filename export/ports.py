"""Named inputs and outputs of graphs, with their types and sizes.

Knows the names that docs/bundle.md fixes; not what is computed between them.
"""

from dataclasses import dataclass

import torch
from onnx import TensorProto
from torch import Tensor

INT64, INT32, FLOAT = TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT
KINDS = {torch.float32: FLOAT, torch.bool: TensorProto.BOOL, torch.int64: INT64, torch.int32: INT32}


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a graph; a word stands for any size."""

    name: str
    kind: int
    shape: tuple[int | str, ...]


TOKENS = Port("tokens", INT64, ("batch", "length"))
PAST = Port("past", INT32, ("batch",))
KEEP = Port("keep", INT64, ("kept",))
SEQLENS = Port("seqlens", INT32, ("batch",))  # index of the last position of each row
TOTAL = Port("total", INT32, ())
SOURCE = Port("source", INT64, ("batch", "source_length"))
CLASSES = Port("logits", FLOAT, ("batch", "classes"))
LABELS = Port("logits", FLOAT, ("batch", "length", "classes"))
VOCABULARY = Port("logits", FLOAT, ("batch", "kept", "vocabulary"))


def port_of(name: str, one: Tensor, two: Tensor) -> Port:
    """The port of a value of which two examples are given: the sizes in which they differ vary."""
    words = ("batch", "length" if name == "x" else f"{name}_1")
    shape = tuple(
        size if size == other else words[i] if i < 2 else f"{name}_{i}"
        for i, (size, other) in enumerate(zip(one.shape, two.shape, strict=True))
    )
    return Port(name, KINDS[one.dtype], shape)
