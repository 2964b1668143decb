"""The body of a request of the Open Inference Protocol: JSON, and tensors as bytes behind it.

Knows where the JSON ends and which bytes belong to which tensor; deliberately not what is in them.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from serve.errors import BadRequest, InvalidField, ServeError
from serve.wire.body import read_body
from serve.wire.oip_schemas import InferRequest, InputTensor, RequestedOutput
from serve.wire.wording import json_problem_in_words, problem_in_words

HEADER_LENGTH = "inference-header-content-length"
BINARY_SIZE = "binary_data_size"

BodyT = TypeVar("BodyT", bound=BaseModel)

_MAX_SHOWN = 80
_PARTS: tuple[type[BaseModel], ...] = (InferRequest, InputTensor, RequestedOutput)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request, with the bytes of each input that came as bytes."""

    asked: InferRequest
    raw: Sequence[memoryview | None]


async def read_inference(request: Request, max_bytes: int, timeout_s: float) -> Sent:
    """The request in a body; BadRequest or InvalidField saying what is wrong with it."""
    body = await read_body(request, max_bytes, timeout_s)
    length = _header_length(request, len(body))
    asked = parse(body if length is None else body[:length], InferRequest)
    binary = memoryview(body)[len(body) if length is None else length :]
    return Sent(asked, _split(asked, binary, length is not None))


def parse(text: bytes, schema: type[BodyT]) -> BodyT:
    """The JSON of a body as the schema has it."""
    if not text.strip():
        raise BadRequest("the body is empty: send a JSON object")
    try:
        return schema.model_validate_json(text)
    except ValidationError as error:
        raise _explain(error) from None


def _header_length(request: Request, size: int) -> int | None:
    """How many bytes of the body are JSON, where the client says so."""
    sent = request.headers.getlist(HEADER_LENGTH)
    if not sent:
        return None
    text = sent[0].strip()
    # The number of digits is limited before they are read: more of them are no length.
    if len(sent) > 1 or not (text.isascii() and text.isdigit()) or len(text) > 20:
        raise BadRequest("Inference-Header-Content-Length must be one number of bytes")
    length = int(text)
    if length > size:
        raise BadRequest(
            f"Inference-Header-Content-Length is {length}, but the body has {size} bytes: send "
            "the size of its JSON"
        )
    return length


def _split(asked: InferRequest, binary: memoryview, announced: bool) -> list[memoryview | None]:
    """The bytes of each input, in their order; together they are all that there are."""
    found: list[memoryview | None] = []
    at = 0
    for index, tensor in enumerate(asked.inputs):
        where = f"inputs[{index}]"
        size = _binary_size(tensor, where)
        if size is None:
            found.append(None)
            continue
        if not announced:
            raise InvalidField(
                f"{where} has {BINARY_SIZE}, but the header Inference-Header-Content-Length is "
                "missing: send in it how many bytes the JSON has"
            )
        if size > len(binary) - at:
            raise InvalidField(
                f"{where}.parameters.{BINARY_SIZE} is {size}, but {len(binary) - at} bytes are "
                "left behind the JSON: send as many as it says"
            )
        found.append(binary[at : at + size])
        at += size
    if at != len(binary):
        raise InvalidField(
            f"{len(binary) - at} bytes behind the JSON belong to no input: name them in "
            f"{BINARY_SIZE}, or leave them out"
        )
    return found


def _binary_size(tensor: InputTensor, where: str) -> int | None:
    """How many bytes an input has behind the JSON; None if it is in the JSON."""
    others = sorted(set(tensor.parameters) - {BINARY_SIZE})
    if others:
        raise InvalidField(
            f"{where}.parameters.{_shown(others[0])} is not known here: an input takes "
            f"{BINARY_SIZE} only"
        )
    in_json = "data" in tensor.model_fields_set
    if BINARY_SIZE not in tensor.parameters:
        if not in_json:
            raise InvalidField(f"{where}.data is missing: send it, or {BINARY_SIZE} and bytes")
        return None
    if in_json:
        raise InvalidField(f"{where} has both data and {BINARY_SIZE}: send one of them")
    size = tensor.parameters[BINARY_SIZE]
    if type(size) is not int or size < 0:
        raise InvalidField(f"{where}.parameters.{BINARY_SIZE} must be a number of bytes")
    return size


def _explain(error: ValidationError) -> ServeError:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is not JSON that can be read: {json_problem_in_words(first)}")
    if not first["loc"]:
        return InvalidField("the body must be a JSON object")
    return InvalidField(_sentence(first, _path(first["loc"])))


def _sentence(problem: ErrorDetails, path: str) -> str:
    if problem["type"] == "missing":
        return f"{path} is missing: send it"
    if problem["type"] != "extra_forbidden":
        return f"{path} {problem_in_words(problem)}"
    known = sorted({name for part in _PARTS for name in part.model_fields})
    close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
    return f"unknown field {path}: " + (f"did you mean {close[0]}?" if close else "leave it out")


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{_shown(part)}"
    return path.removeprefix(".")


def _shown(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
