"""What tests of the Open Inference Protocol share: tensors of Triton's client, and its refusals.

Knows the client; deliberately neither servers nor what they answer.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tritonclient.http import InferInput
from tritonclient.utils import InferenceServerException


def texts_in(texts: list[str], binary: bool = True, make: Any = InferInput) -> Any:
    array = np.array(texts, dtype=object)
    return make("text", [len(texts)], "BYTES").set_data_from_numpy(array, binary_data=binary)


def array_in(name: str, array: npt.NDArray[Any], binary: bool = True) -> Any:
    datatype = {"float32": "FP32", "uint8": "UINT8"}[str(array.dtype)]
    tensor = InferInput(name, list(array.shape), datatype)
    return tensor.set_data_from_numpy(array, binary_data=binary)


def strings(answer: Any, name: str) -> list[str]:
    return [one.decode() if isinstance(one, bytes) else str(one) for one in answer.as_numpy(name)]


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as refused:
        call()
    return refused.value.status(), refused.value.message()
