"""Reading a request body: its size, its time, its JSON, its schema.

Turns whatever is wrong into an error that names the field and says what to send instead. Whatever a
body holds, that takes little time and memory: what it consists of is bounded before Python objects
are made of it, the members of its objects before the schema looks at them.
"""

import asyncio
import difflib
import gc
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from serve.errors import (
    BadRequest,
    InvalidField,
    PayloadTooLarge,
    RequestTimeout,
    ServeError,
)
from serve.wire.mailbox import ClientGone
from serve.wire.reader import LARGE_BODY_BYTES, WEIGHT_KEY, Reader
from serve.wire.wording import json_problem_in_words, problem_in_words

BodyT = TypeVar("BodyT", bound=BaseModel)

# Takes a body that has come already; None if the client has left. There is nothing to wait for.
WHOLE_BODY_KEY = "stepdial.whole_body"
MAX_SHOWN = 80
# Of a body. A chat of the most messages with some parts each has fewer; the rest is hostile.
MAX_OBJECTS = 8192
# Of one object: more than any has that is documented.
MAX_MEMBERS = 64
# Lists that are pixels of one number each are one in 4 bytes; the rest is hostile.
_BYTES_A_LIST = 4
_FEW_LISTS = 1024
# Strings are looked at one by one only where braces may stand in them.
_MAX_STRINGS = 32_768
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
# What the parts of a body take as Python objects, at most.
_LIST_BYTES, _ELEMENT_BYTES = 64, 32


async def read_json(request: Request, schema: type[BodyT], reader: Reader) -> BodyT:
    """The body as the schema has it, whatever content type the client claims."""
    body = await read_body(request, reader.settings.max_body_bytes, reader.settings.body_timeout_s)
    return await checked_json(request, body, schema, reader, explain)


async def checked_json(
    request: Request,
    body: bytes,
    schema: type[BodyT],
    reader: Reader,
    explain: Callable[[ValidationError, type[BaseModel]], ServeError],
) -> BodyT:
    """JSON as the schema has it; `explain` says what is wrong with it."""
    # Numbers in lists take more than their text; texts do not, commas in them notwithstanding.
    request.scope[WEIGHT_KEY] = (
        len(body) + _LIST_BYTES * body.count(b"[") + _ELEMENT_BYTES * body.count(b",")
    )
    return await reader.checked(request, body, partial(parse, body, schema, explain))


def parse(
    body: bytes,
    schema: type[BodyT],
    explain: Callable[[ValidationError, type[BaseModel]], ServeError],
) -> BodyT:
    """JSON as the schema has it; `explain` says what is wrong with it."""
    if not body.strip():
        raise BadRequest("the body is empty: send a JSON object")
    _check_parts(body)
    with _no_collection(len(body) > LARGE_BODY_BYTES):
        try:
            value = from_json(body, cache_strings="keys")
        except ValueError as error:
            raise BadRequest(
                f"the body is not JSON that can be read: {json_problem_in_words(str(error))}"
            ) from None
        if not isinstance(value, dict):
            del value  # an error keeps what is named where it was raised
            raise InvalidField("the body must be a JSON object")
        _check_members(value, schema)
        try:
            return schema.model_validate(value)
        except ValidationError as error:
            raise explain(error, schema) from None
        finally:
            value.clear()  # for the same reason


def _check_parts(body: bytes) -> None:
    """BadRequest if there are more objects or lists in it than any request needs."""
    most_lists = max(_FEW_LISTS, len(body) // _BYTES_A_LIST)
    if body.count(b"{") <= MAX_OBJECTS and body.count(b"[") <= most_lists:
        return
    objects = lists = at = 0
    for number, string in enumerate(_STRING.finditer(body)):
        objects += body.count(b"{", at, string.start())
        lists += body.count(b"[", at, string.start())
        at = string.end()
        if objects > MAX_OBJECTS or lists > most_lists or number >= _MAX_STRINGS:
            break
    else:
        objects += body.count(b"{", at)
        lists += body.count(b"[", at)
        if objects <= MAX_OBJECTS and lists <= most_lists:
            return
    raise BadRequest(
        f"the body is not JSON that can be read: it has more than {MAX_OBJECTS} objects, "
        f"{most_lists} lists or {_MAX_STRINGS} texts, which no request needs; send what the route "
        "documents"
    )


def _check_members(value: dict[str, Any], schema: type[BaseModel]) -> None:
    """InvalidField if an object has more members than any that is documented."""
    if len(value) > MAX_MEMBERS:
        unknown = next(name for name in value if name not in schema.model_fields)
        raise InvalidField(
            f"the body has {len(value)} fields, such as {shown(unknown)!r}, but at most "
            f"{len(schema.model_fields)} are known: send those only",
            param=shown(unknown),
        )
    for name, member in value.items():
        if isinstance(member, dict) and len(member) > MAX_MEMBERS:
            raise InvalidField(
                f"{shown(name)} has {len(member)} members: send at most {MAX_MEMBERS}",
                param=shown(name),
            )


@contextmanager
def _no_collection(large: bool) -> Iterator[None]:
    """No search for cycles: there are none in JSON, and it takes longer than all the rest."""
    if not (large and gc.isenabled()):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
    problems = error.errors(include_url=False, include_input=False)
    first = _worst(problems)
    members = _members(schema, first["loc"])
    if members is not None:
        param = ".".join(shown(str(part)) for part in first["loc"])
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
    return f"{shown(str(loc[0]))}{indices}"


def _sentence(param: str, reasons: Sequence[ErrorDetails], known: Iterable[str]) -> str:
    first = reasons[0]
    if first["type"] == "extra_forbidden":
        close = close_names(str(first["loc"][-1]), known)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        return f"unknown field {param!r}: {hint}"
    if first["type"] == "missing":
        return f"{param} is missing: send it"
    return f"{param} {', or '.join(dict.fromkeys(map(problem_in_words, reasons)))}"


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """The known name that this one is like, if there is one. Long ones are like none."""
    return difflib.get_close_matches(name, known, n=1) if len(name) <= MAX_SHOWN else []


def shown(text: str) -> str:
    """Of what a client sent, so much as a message repeats."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"
