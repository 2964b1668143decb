"""Errors own their status, code and shape."""

import pytest

from serve import errors
from serve.errors import ModelFailure, QueueFull, ServeError


def classes(root: type[ServeError]) -> list[type[ServeError]]:
    """Those of the server; other parts have errors of their own."""
    children = [one for one in root.__subclasses__() if one.__module__ == errors.__name__]
    return [root, *(one for child in children for one in classes(child))]


def test_each_error_has_a_code_of_its_own() -> None:
    codes = [one.code for one in classes(ServeError)[1:]]
    assert len(codes) > 30 and len(codes) == len(set(codes))


def test_the_shape() -> None:
    error = ModelFailure("it broke", param="steps", extra=1)
    assert error.body() == {
        "error": {"code": "model_failure", "message": "it broke", "param": "steps", "extra": 1}
    }
    assert str(error) == "it broke"


@pytest.mark.parametrize(
    ("seconds", "whole", "milliseconds"),
    [(0.0, "1", "1"), (0.2504, "1", "251"), (1.0, "1", "1000"), (12.3, "13", "12300")],
)
def test_when_to_come_back(seconds: float, whole: str, milliseconds: str) -> None:
    error = QueueFull("full", retry_after_s=seconds)
    assert error.headers() == {"retry-after": whole, "retry-after-ms": milliseconds}
    assert error.body()["error"]["retry_after_ms"] == int(milliseconds)
