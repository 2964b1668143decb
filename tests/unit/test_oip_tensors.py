"""Tensors of the Open Inference Protocol: what is written is read again, and nothing else is."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from serve.api.oip import bytes_of, numbers_of_bytes, numbers_of_json, texts_of_bytes, texts_of_json
from serve.errors import InvalidField

TEXTS = st.lists(st.text(max_size=20), min_size=1, max_size=6)


def read(raw: bytes, count: int) -> list[str]:
    return texts_of_bytes(memoryview(raw), [count], "x")


@given(TEXTS)
def test_texts_come_back_and_are_those_of_tritonclient(texts: list[str]) -> None:
    raw = bytes_of(texts, "BYTES")
    assert read(raw, len(texts)) == texts
    assert [one.decode() for one in deserialize_bytes_tensor(raw)] == texts
    theirs = serialize_byte_tensor(np.array([text.encode() for text in texts], dtype=object))
    assert theirs.item() == raw


@given(TEXTS, st.data())
def test_bytes_cut_or_added_anywhere_are_refused(texts: list[str], data: st.DataObject) -> None:
    raw = bytes_of(texts, "BYTES")
    cut = data.draw(st.integers(0, len(raw) - 1))
    for broken in (raw[:cut], raw + b"x", raw + bytes(4)):
        with pytest.raises(InvalidField):
            read(broken, len(texts))


@given(st.binary(max_size=40), st.integers(1, 5))
def test_any_bytes_are_read_or_refused(raw: bytes, count: int) -> None:
    try:
        texts = read(raw, count)
    except InvalidField:
        return
    assert len(texts) == count and bytes_of(texts, "BYTES") == raw


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "0 whole elements in its 0 bytes, but its shape has 1"),
        (b"\x01\x00\x00", "0 whole elements in its 3 bytes"),
        (struct.pack("<I", 2**32 - 1) + b"x", "is said to have 4294967295 bytes, but 1 are left"),
        (struct.pack(">I", 1) + b"x", "is said to have 16777216 bytes"),
        (struct.pack("<I", 1) + b"xy", "has 1 bytes behind its 1 elements"),
        (struct.pack("<I", 2) + b"\xc3\x28", "x, element 0, is no UTF-8 at byte 0"),
        (struct.pack("<I", 3) + b"\xed\xa0\x80", "is no UTF-8"),
    ],
)
def test_what_is_wrong_with_bytes_is_said(raw: bytes, says: str) -> None:
    with pytest.raises(InvalidField) as refused:
        read(raw, 1)
    assert says in refused.value.message


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=6, max_size=6))
def test_numbers_come_back_from_bytes_and_from_json(numbers: list[float]) -> None:
    shape = (1, 2, 3)
    raw = memoryview(bytes_of(numbers, "FP32"))
    nested = [[numbers[:3], numbers[3:]]]
    for found in (
        numbers_of_bytes(raw, "FP32", shape, "x"),
        numbers_of_json(numbers, "FP32", shape, "x"),
        numbers_of_json(nested, "FP32", shape, "x"),
    ):
        assert found.shape == shape and found.ravel().tolist() == numbers


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_numbers_that_mean_nothing_are_refused(value: float) -> None:
    with pytest.raises(InvalidField, match="not finite, or beyond"):
        numbers_of_bytes(memoryview(np.float32(value).tobytes()), "FP32", (1,), "x")
    with pytest.raises(InvalidField, match="not finite, or beyond"):
        numbers_of_json([value], "FP32", (1,), "x")


@pytest.mark.parametrize("size", [0, 15, 17, 32])
def test_numbers_need_all_their_bytes_and_no_more(size: int) -> None:
    with pytest.raises(InvalidField, match=f"x has {size} bytes, but FP32 of shape .2, 2. has 16"):
        numbers_of_bytes(memoryview(bytes(size)), "FP32", (2, 2), "x")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "does not have the shape [2, 2]"),
        ([1, 2, 3], "send 4 elements, flat or nested like the shape"),
        ([1, 2, 3, 4, 5], "does not have the shape"),
        ([[1, 2], [3]], "does not have the shape"),
        ([[1, 2], 3], "does not have the shape"),
        ([[1, 2], [3, [4]]], "holds a list"),
        ([[[1], [2]], [[3], [4]]], "holds a list"),
        ([1, 2, 3, "4"], "holds text"),
        ([1, 2, 3, True], "holds true or false"),
        ([1, 2, 3, None], "holds null"),
        ([1, 2, 3, {}], "holds an object"),
        ([1, 2, 3, 256], "send integers from 0 to 255"),
        ([1, 2, 3, -1], "send integers from 0 to 255"),
        ([1, 2, 3, 4.5], "send integers from 0 to 255"),
        ([1, 2, 3, 10**400], "not finite, or beyond"),
    ],
)
def test_what_is_wrong_with_numbers_in_json_is_said(data: list[Any], says: str) -> None:
    with pytest.raises(InvalidField) as refused:
        numbers_of_json(data, "UINT8", (2, 2), "x")
    assert says in refused.value.message


@pytest.mark.parametrize("data", [["a"], ["a", 1], ["a", None], [["a", "b"]], [["a"], "b"]])
def test_texts_in_json_are_strings_and_all_there(data: list[Any]) -> None:
    with pytest.raises(InvalidField):
        texts_of_json(data, [2], "x")
