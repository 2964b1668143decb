"""Tensors of the Open Inference Protocol, in JSON and as bytes, in both directions.

Knows elements and their encodings; deliberately neither models nor requests. Bytes are
little-endian; an element of BYTES is its length in 4 bytes, then UTF-8.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from serve.errors import InvalidField
from serve.inputs.values import check_finite, number_rows

Numbers = npt.NDArray[np.float64]
WIDTHS: dict[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"),
    "INT32": np.dtype("<i4"),
    "UINT8": np.dtype("u1"),
}

_LENGTH = struct.Struct("<I")


def texts_of_json(data: list[Any], shape: Sequence[int], where: str) -> list[str]:
    """The elements of a BYTES tensor that came in JSON."""
    flat = _flat(data, shape, where)
    for index, element in enumerate(flat):
        if not isinstance(element, str):
            raise InvalidField(f"{where}.data[{index}] is no string: BYTES takes strings")
    return flat


def texts_of_bytes(raw: memoryview, shape: Sequence[int], where: str) -> list[str]:
    """The elements of a BYTES tensor that came as bytes, exactly as many as the shape has."""
    count, at, texts = math.prod(shape), 0, []
    for index in range(count):
        if at + _LENGTH.size > len(raw):
            raise InvalidField(
                f"{where} has {index} whole elements in its {len(raw)} bytes, but its shape has "
                f"{count}: send the length of each in 4 bytes, then the element"
            )
        (length,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        if length > len(raw) - at:
            raise InvalidField(
                f"{where}, element {index}, is said to have {length} bytes, but {len(raw) - at} "
                "are left: send its length as 4 little-endian bytes"
            )
        texts.append(_text(raw[at : at + length], f"{where}, element {index},"))
        at += length
    if at != len(raw):
        raise InvalidField(
            f"{where} has {len(raw) - at} bytes behind its {count} elements: leave them out, or "
            "send the shape that they have"
        )
    return texts


def numbers_of_json(data: list[Any], datatype: str, shape: Sequence[int], where: str) -> Numbers:
    """The elements of a tensor of numbers that came in JSON, in its shape."""
    array, _ = number_rows([_flat(data, shape, where)], f"{where}.data")
    if datatype == "UINT8" and ((array % 1).any() or array.min() < 0 or array.max() > 255):
        raise InvalidField(f"{where}.data is UINT8: send integers from 0 to 255")
    return array.reshape(shape)


def numbers_of_bytes(raw: memoryview, datatype: str, shape: Sequence[int], where: str) -> Numbers:
    """The elements of a tensor of numbers that came as bytes, in its shape."""
    width = WIDTHS[datatype]
    wanted = math.prod(shape) * width.itemsize
    if len(raw) != wanted:
        raise InvalidField(
            f"{where} has {len(raw)} bytes, but {datatype} of shape {list(shape)} has {wanted}: "
            "send exactly these"
        )
    array = np.frombuffer(raw, dtype=width).astype(np.float64)
    check_finite(array, where)
    return array.reshape(shape)


def bytes_of(values: Sequence[str] | Sequence[float] | Sequence[int], datatype: str) -> bytes:
    """The elements of an output as bytes."""
    if datatype == "BYTES":
        return b"".join(_element(str(value)) for value in values)
    return np.asarray(values, dtype=WIDTHS[datatype]).tobytes()


def _element(text: str) -> bytes:
    encoded = text.encode()
    return _LENGTH.pack(len(encoded)) + encoded


def _text(raw: memoryview, where: str) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidField(
            f"{where} is no UTF-8 at byte {error.start} ({error.reason}): encode texts as UTF-8"
        ) from None


def _flat(data: list[Any], shape: Sequence[int], where: str) -> list[Any]:
    """The elements in row-major order, whether they came flat or nested like the shape."""
    count = math.prod(shape)
    if len(data) == count and not isinstance(data[0], list):
        return data
    level = [data]
    for size in shape:
        if any(not isinstance(row, list) or len(row) != size for row in level):
            raise InvalidField(
                f"{where}.data does not have the shape {list(shape)}: send {count} elements, flat "
                "or nested like the shape"
            )
        level = [element for row in level for element in row]
    return level
