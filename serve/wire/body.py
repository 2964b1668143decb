"""Reading a request body: its size, its time, its JSON, its schema.

Turns whatever is wrong into an error that names the field and says what to send instead. It
deliberately knows no route.
"""

import asyncio
import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from serve.errors import (
    BadRequest,
    InvalidField,
    PayloadTooLarge,
    RequestTimeout,
    ServeError,
)
from serve.wire.mailbox import ClientGone
from serve.wire.wording import json_problem_in_words, problem_in_words

BodyT = TypeVar("BodyT", bound=BaseModel)

# Takes a body that has come already; None if the client has left. There is nothing to wait for.
WHOLE_BODY_KEY = "stepdial.whole_body"
_MAX_SHOWN = 80


async def read_json(
    request: Request, schema: type[BodyT], max_bytes: int, timeout_s: float
) -> BodyT:
    """The body as the schema has it, whatever content type the client claims."""
    body = await read_body(request, max_bytes, timeout_s)
    if not body.strip():
        raise BadRequest("the body is empty: send a JSON object")
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise explain(error, schema) from None


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body; PayloadTooLarge or RequestTimeout beyond these limits."""
    headers = dict(request.scope["headers"])
    if headers.get(b"content-encoding", b"").strip().lower() not in (b"", b"identity"):
        raise BadRequest("the body is compressed: send it without content-encoding")
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    take: Callable[[], bytes | None] | None = request.scope.get(WHOLE_BODY_KEY)
    if take is not None:
        return _fitting(take(), max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _chunks(request, max_bytes)
    except TimeoutError:
        raise RequestTimeout(
            f"the body did not arrive within {timeout_s:g} s: send it at once"
        ) from None


def _fitting(body: bytes | None, max_bytes: int) -> bytes:
    if body is None:
        raise ClientGone
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    return body


async def _chunks(request: Request, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the body is larger than {max_bytes} bytes: send less at once", max_bytes=max_bytes
    )


def explain(error: ValidationError, schema: type[BaseModel]) -> ServeError:
    """What is wrong with the first field that is, in words."""
    problems = error.errors(include_url=False)
    first = _worst(problems)
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is not JSON that can be read: {json_problem_in_words(first)}")
    if not first["loc"]:
        return InvalidField("the body must be a JSON object")
    members = _members(schema, first["loc"])
    if members is not None:
        param = ".".join(_shown(str(part)) for part in first["loc"])
        return InvalidField(_sentence(param, [first], members), param=param)
    to_blame = _to_blame(problems, first["loc"][0])
    param = _param(to_blame[0]["loc"])
    return InvalidField(_sentence(param, to_blame, schema.model_fields), param=param)


def _worst(problems: Sequence[ErrorDetails]) -> ErrorDetails:
    """The first problem; but a field that is missing may have come under another name."""
    if problems[0]["type"] != "missing":
        return problems[0]
    return next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])


def _members(schema: type[BaseModel], loc: tuple[int | str, ...]) -> Iterable[str] | None:
    """If what is wrong lies within a field that is an object: the names that it may have there."""
    field = schema.model_fields.get(str(loc[0])) if len(loc) > 1 else None
    for kind in () if field is None else (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind.model_fields
        if get_origin(kind) is dict:
            return ()
    return None


def _to_blame(problems: Sequence[ErrorDetails], field: int | str) -> list[ErrorDetails]:
    """Of what is wrong with this field, the reasons that say most.

    A field that takes several types has a reason for each: that it is not a string says little
    of a list whose third item is wrong.
    """
    reasons = [problem for problem in problems if problem["loc"][0] == field]
    inner = [one for one in reasons if any(isinstance(part, int) for part in one["loc"][1:])]
    fitting = [one for one in reasons if not one["type"].endswith("_type")]
    return inner[:1] or fitting or reasons


def _param(loc: tuple[int | str, ...]) -> str:
    """The path to the field; what lies between field and index only names a type."""
    indices = "".join(f"[{part}]" for part in loc[1:] if isinstance(part, int))
    return f"{_shown(str(loc[0]))}{indices}"


def _sentence(param: str, reasons: Sequence[ErrorDetails], known: Iterable[str]) -> str:
    first = reasons[0]
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        return f"unknown field {param!r}: {hint}"
    if first["type"] == "missing":
        return f"{param} is missing: send it"
    return f"{param} {', or '.join(dict.fromkeys(map(problem_in_words, reasons)))}"


def _shown(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
