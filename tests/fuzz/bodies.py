"""Bodies of requests, for every route that reads one: JSON, and tensors as bytes behind it.

The first byte is the route. Behind the JSON of a request to /v2 a `|` may stand, and bytes of
tensors. Whatever comes, the answer is one that is documented, in little time, and the same again.
"""

import asyncio
import json
import time
from typing import Any

from serve.app import create_app
from serve.engine.engine import Engine
from serve.metrics import Metrics
from serve.settings import Settings
from tests.fake_model import Mood, fake_catalog
from tests.fixtures.tiny_folders import (
    classify_bundle,
    generate_bundle,
    image_bundle,
    points_bundle,
    translate_bundle,
)

ROUTES = (
    "/v1/classify",
    "/v1/generate",
    "/v1/completions",
    "/v1/chat/completions",
    "/v2/models/tiny-classify/infer",
    "/v2/models/tiny-generate/infer",
    "/v2/models/tiny-translate/infer",
    "/v2/models/tiny-image/infer",
    "/v2/models/tiny-points/infer",
    "/v2/repository/index",
)
MOST_BYTES = 1 << 14
MOST_S = 0.5  # of the processor; bodies are small here
_REFUSED = {400, 404, 408, 413, 422}
_BUSY = {429, 503, 504}  # which depends on time
_SPLIT = b"}|"


class Server:
    """The application over models that are fakes, asked without a socket."""

    def __init__(self) -> None:
        bundles = (classify_bundle, generate_bundle, translate_bundle, image_bundle, points_bundle)
        catalog = fake_catalog(Mood(), *(bundle() for bundle in bundles))
        settings = Settings(max_tokens=8, max_inputs=8, max_body_bytes=MOST_BYTES)
        self.engine = Engine(catalog, settings.limits, Metrics())
        self.app = create_app(settings, self.engine)
        self.loop = asyncio.new_event_loop()
        self._lifespan = self.app.router.lifespan_context(self.app)
        self.loop.run_until_complete(self._lifespan.__aenter__())

    def ask(self, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> tuple[int, bytes]:
        """The status and body of the answer."""
        return self.loop.run_until_complete(self._ask(path, body, headers))

    async def _ask(
        self, path: str, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> tuple[int, bytes]:
        sent: list[dict[str, Any]] = []
        asked = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            for message in asked:
                return message
            await asyncio.Event().wait()  # the client stays
            raise AssertionError

        async def send(message: Any) -> None:
            sent.append(message)

        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"x"), *headers],
            "client": ("127.0.0.1", 4),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }
        await asyncio.wait_for(self.app(scope, receive, send), 30)
        (status,) = [one["status"] for one in sent if one["type"] == "http.response.start"]
        return status, b"".join(one.get("body", b"") for one in sent[1:])

    def close(self) -> None:
        """End the engine's thread."""
        self.loop.run_until_complete(self._lifespan.__aexit__(None, None, None))
        self.loop.close()


_server: list[Server] = []


def one(data: bytes) -> None:
    """Ask with these bytes; AssertionError, or whatever else is thrown, where a rule is broken."""
    if not data or len(data) > MOST_BYTES:
        return
    path = ROUTES[data[0] % len(ROUTES)]
    body, headers = _request(path, data[1:])
    if not _server:
        _server.append(Server())
        _server[0].ask(path, body, headers)  # what the first request of a process imports
    begun_s = time.thread_time()
    status, answer = _server[0].ask(path, body, headers)
    assert time.thread_time() - begun_s < MOST_S, "it took too long"
    assert status == 200 or status in _REFUSED or status in _BUSY, (status, answer)
    if status != 200:
        assert json.loads(answer)["error"], answer
        again, same = _server[0].ask(path, body, headers)
        timed = {status, again} & _BUSY or b"deadline_ms" in answer
        assert timed or (status, answer) == (again, same), (answer, same)
    assert not _server[0].engine.dead


def close() -> None:
    """End what was started."""
    while _server:
        _server.pop().close()


def _request(path: str, data: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    at = data.find(_SPLIT)
    if at < 0 or not path.startswith("/v2/models"):
        return data, []
    text = data[: at + 1]
    length = str(len(text)).encode()
    return text + data[at + len(_SPLIT) :], [(b"inference-header-content-length", length)]
