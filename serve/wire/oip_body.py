"""The body of a request of the Open Inference Protocol: JSON, and tensors as bytes behind it.

Knows where the JSON ends and which bytes belong to which tensor; deliberately not what is in them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from serve.errors import BadRequest, InvalidField, ServeError
from serve.wire.body import checked_json, close_names, read_body, shown
from serve.wire.oip_schemas import InferRequest, InputTensor, RequestedOutput
from serve.wire.reader import WEIGHT_KEY, Reader
from serve.wire.wording import problem_in_words

HEADER_LENGTH = "inference-header-content-length"
BINARY_SIZE = "binary_data_size"

_PARTS: tuple[type[BaseModel], ...] = (InferRequest, InputTensor, RequestedOutput)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request, with the bytes of each input that came as bytes."""

    asked: InferRequest
    raw: Sequence[memoryview | None]


async def read_inference(request: Request, reader: Reader) -> Sent:
    """The request in a body; BadRequest or InvalidField saying what is wrong with it."""
    body = await read_body(request, reader.settings.max_body_bytes, reader.settings.body_timeout_s)
    length = _header_length(request, len(body))
    text = body if length is None else body[:length]
    asked = await checked_json(request, text, InferRequest, reader, explain)
    request.scope[WEIGHT_KEY] += len(body) - len(text)
    binary = memoryview(body)[len(body) if length is None else length :]
    return Sent(asked, _split(asked, binary, length is not None))


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
            f"{where}.parameters.{shown(others[0])} is not known here: an input takes "
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


def explain(error: ValidationError, schema: type[BaseModel]) -> ServeError:
    """What is wrong with the first field that is, in words."""
    first = error.errors(include_url=False, include_input=False)[0]
    return InvalidField(_sentence(first, _path(first["loc"]), schema))


def _sentence(problem: ErrorDetails, path: str, schema: type[BaseModel]) -> str:
    if problem["type"] == "missing":
        return f"{path} is missing: send it"
    if problem["type"] != "extra_forbidden":
        return f"{path} {problem_in_words(problem)}"
    parts = _PARTS if schema in _PARTS else (schema,)
    known = sorted({name for part in parts for name in part.model_fields})
    close = close_names(str(problem["loc"][-1]), known)
    return f"unknown field {path}: " + (f"did you mean {close[0]}?" if close else "leave it out")


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{shown(part)}"
    return path.removeprefix(".")
