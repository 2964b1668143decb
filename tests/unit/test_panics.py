"""A library in Rust that panics raises what is no `Exception`: it is an error like any other."""

import asyncio
from typing import Any

import pytest

from serve.keys import Keys
from serve.metrics import Metrics
from serve.middleware import RequestMiddleware


class PanicException(BaseException):
    """Has the name of what PyO3 raises, which cannot be imported."""


def asked(error: BaseException) -> list[dict[str, Any]]:
    """What a client gets where the application raises this."""

    async def app(*_: object) -> None:
        raise error

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/classify"}
    scope |= {"headers": [], "query_string": b"", "http_version": "1.1", "client": None}
    asyncio.run(RequestMiddleware(app, Metrics(), Keys())(scope, receive, send))
    return sent


def test_a_panic_is_an_internal_error_with_all_headers() -> None:
    start, content = asked(PanicException("assertion failed"))
    names = {name for name, _ in start["headers"]}
    assert start["status"] == 500 and b"internal_error" in content["body"]
    assert {b"x-request-id", b"x-content-type-options"} <= names
    with pytest.raises(KeyboardInterrupt):
        asked(KeyboardInterrupt())
