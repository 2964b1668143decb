"""The client of the benchmarks: what it does not send, or loses, would be the server's fault."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.open_loop import Shot, fire
from benchmarks.server import Server

_IDLE_S = 0.2


class _Impatient(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S  # a connection on which nothing comes for so long is closed

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Server]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Impatient) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield Server(0, "127.0.0.1", server.server_address[1], tmp_path / "log")
        finally:
            server.shutdown()
            thread.join()


def test_what_comes_after_the_server_has_closed_idle_connections_is_sent_anew(
    impatient: Server,
) -> None:
    shots = [Shot(due_s, {}) for due_s in (0.0, 3 * _IDLE_S, 3.1 * _IDLE_S, 6 * _IDLE_S)]
    fire(impatient, "/", shots, patience_s=5.0, connections=4)
    assert [shot.status for shot in shots] == [200] * 4
