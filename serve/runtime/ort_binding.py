"""Binds numpy arrays to a session by address, without a copy.

The caller keeps each array alive, contiguous and in place for as long as it is bound.
"""

import numpy as np
import numpy.typing as npt
import onnxruntime as ort


def bind_input(binding: ort.IOBinding, name: str, array: npt.NDArray[np.generic]) -> None:
    """Let the graph read this array."""
    binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, _address(array))


def bind_output(binding: ort.IOBinding, name: str, array: npt.NDArray[np.generic]) -> None:
    """Let the graph write this array."""
    binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, _address(array))


def _address(array: npt.NDArray[np.generic]) -> int:
    assert array.flags.c_contiguous
    address: int = array.__array_interface__["data"][0]
    return address
