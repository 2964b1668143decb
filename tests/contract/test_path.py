"""A newcomer finds the path of a request: the files whose code runs in it are few, and all drawn in
docs/architecture.md.
"""

import http.client
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import serve
from serve.app import create_app
from serve.catalog import Catalog, open_served
from serve.engine.engine import Engine
from serve.metrics import Metrics
from serve.runtime import Device
from serve.server import Server, bind, listen
from serve.settings import Settings
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle

CLASSIFY, STREAM = 20, 22
THREADS = ("server", "engine")
_SERVE = Path(serve.__file__).parent
_DRAWN = Path(serve.__file__).parent.parent / "docs" / "architecture.md"
_SETTLE_S = 0.2


class Asking:
    """A server of two small models in this process, and the files that its threads run."""

    def __init__(self, port: int, seen: set[str]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._seen = seen

    def files(self, path: str, body: dict[str, Any]) -> set[str]:
        """The files that a request runs, once everything is warm."""
        for _ in range(3):
            time.sleep(_SETTLE_S)  # what comes after an answer belongs to it
            self._seen.clear()
            self._connection.request("POST", path, json.dumps(body))
            response = self._connection.getresponse()
            answered = response.read()
            assert response.status == 200, answered
        time.sleep(_SETTLE_S)
        return {*self._seen}

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="module")
def asking() -> Iterator[Asking]:
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            if _SERVE in path.parents and threading.current_thread().name in THREADS:
                seen.add(path.relative_to(_SERVE).as_posix())

    settings = Settings(port=0)
    bundles = (classify_bundle(), generate_bundle())
    catalog = Catalog([open_served(bundle, 1, Device()) for bundle in bundles])
    engine = Engine(catalog, settings.limits, Metrics())
    listening = threading.Event()
    listener = bind(settings.host, settings.port)
    listen(listener)
    server = Server(settings, create_app(settings, engine), engine, lambda url: listening.set())
    thread = threading.Thread(target=server.run, args=([listener],), name="server", daemon=True)
    before = sys.getprofile()
    threading.setprofile(note)
    try:
        thread.start()
        assert listening.wait(60), "the server did not start"
    finally:
        threading.setprofile(before)
    client = Asking(listener.getsockname()[1], seen)
    try:
        yield client
    finally:
        client.close()
        server.should_exit = True
        thread.join(60)
        for served in catalog:
            served.model.close()
        assert not thread.is_alive(), "the server did not end"


def drawn(heading: str) -> set[str]:
    """The files that a section of the page names."""
    text = _DRAWN.read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"`([a-z_/]+\.py)`", section))


@pytest.mark.long
def test_the_path_of_a_classification_is_short_and_drawn(asking: Asking) -> None:
    some = asking.files("/v1/classify", {"input": "a film"})
    exact = asking.files("/v1/classify", {"input": ["a film", "a long film"], "steps": 2})
    timed = asking.files("/v1/classify", {"input": "a film", "deadline_ms": 60_000})
    files = some | exact | timed
    assert {"api/native.py", "engine/classify.py", "runtime/session.py"} <= files
    assert len(files) <= CLASSIFY, sorted(files)
    assert files == drawn("The path of a classification")


def test_the_path_of_a_stream_is_short_and_drawn(asking: Asking) -> None:
    asking.files("/v1/classify", {"input": "a film"})  # so that there are lanes of both kinds
    files = asking.files("/v1/generate", {"prompt": "the", "max_tokens": 8, "stream": True})
    assert {"api/native.py", "engine/generate.py", "runtime/decoder.py"} <= files
    assert len(files) <= STREAM, sorted(files)
    assert files == drawn("The path of a stream")
