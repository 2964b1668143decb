"""A real HTTP server in this process, on a fake model that tests can hold up or break.

Knows how to start and stop it; deliberately nothing of what it answers.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from serve.app import create_app
from serve.engine.engine import Engine
from serve.metrics import Metrics
from serve.server import Server, bind
from serve.settings import Settings
from tests.fake_model import Mood, fake_catalog
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
from tests.server_process import START_S


@dataclass
class FakeServer:
    """A server, its engine, and the mood of its model."""

    url: str
    port: int
    engine: Engine
    metrics: Metrics
    mood: Mood

    def wait_for(self, running: int = 0, queued: int = 0) -> None:
        """Until just so many requests run and wait."""
        end_s = time.monotonic() + START_S
        while (self.engine.running, self.engine.queued) != (running, queued):
            assert time.monotonic() < end_s, (self.engine.running, self.engine.queued)
            time.sleep(0.002)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@contextmanager
def fake_server(**changes: Any) -> Iterator[FakeServer]:
    """A server with these settings, listening."""
    # Tests hold calls up; only those that are about it say for how long that is all right.
    patient = {"stall_s": 60, "stall_unknown_s": 60}
    settings = Settings(port=0, **(patient | changes))
    mood, metrics = Mood(), Metrics()
    engine = Engine(
        fake_catalog(mood, classify_bundle(), generate_bundle()),
        settings.limits,
        metrics,
        patience=settings.patience,
    )
    listening = threading.Event()
    listener = bind(settings.host, settings.port)
    server = Server(settings, create_app(settings, engine), engine, lambda url: listening.set())
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    assert listening.wait(START_S), "the server did not start"
    port = listener.getsockname()[1]
    try:
        yield FakeServer(f"http://127.0.0.1:{port}", port, engine, metrics, mood)
    finally:
        mood.gate.set()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"
