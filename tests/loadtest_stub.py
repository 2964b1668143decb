"""A server in miniature that answers as the contract says, or wrongly in one chosen way.

It deliberately knows nothing of models: its texts are made up.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LADDER = (1, 4)
MODELS = (
    {"id": "talker", "task": "generate", "max_tokens": 64},
    {"id": "judge", "task": "classify", "card": {"examples": ["ham", "spam"]}},
    {"id": "eye", "task": "classify", "input": {"kind": "image"}},
    {"id": "interpreter", "task": "translate", "input": {"kind": "text"}},
)


class Stub(ThreadingHTTPServer):
    """`fault` is what goes wrong, and only for requests of `fault_steps` steps."""

    daemon_threads = True

    def __init__(self, fault: str | None = None, fault_steps: int = 4) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fault = fault
        self.fault_steps = fault_steps
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each answer waits 40 ms for an acknowledgement
    server: Stub

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, {"object": "list", "data": MODELS})
        elif self.path.endswith("/ladder"):
            self._answer(200, {"rungs": [{"steps": steps} for steps in LADDER]})
        else:
            self._answer(404, {"error": {"code": "not_found", "message": self.path}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        steps = body["steps"]
        fault = self.server.fault if steps == self.server.fault_steps else None
        if fault == "refuse":
            self._answer(429, {"error": {"code": "queue_full", "message": "try later"}})
        elif fault == "hang":
            time.sleep(30)
        elif self.path == "/v1/classify":
            said = 99 if fault == "other_steps" else steps
            self._answer(200, {"results": [{"label": "good", "budget": {"steps": said}}]})
        else:
            self._stream(steps, body["max_tokens"], fault)

    def _stream(self, steps: int, tokens: int, fault: str | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for index in range(tokens):
            self._chunk(f"data: {json.dumps({'index': index, 'text': 'a', 'steps': steps})}\n\n")
            time.sleep(0.001)
            if fault == "cut" and index == 2:
                self.close_connection = True
                return
        if fault == "error_event":
            self._chunk('event: error\ndata: {"error": {"code": "lapsed", "message": "late"}}\n\n')
        elif fault != "no_terminal":
            said = 99 if fault == "other_steps" else steps
            self._chunk(f'event: done\ndata: {{"budget": {{"steps": {said}}}}}\n\n')
        self._chunk("")

    def _chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        self.wfile.flush()

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: what matters is what the client reports."""


@contextmanager
def running_stub(fault: str | None = None, fault_steps: int = 4) -> Iterator[Stub]:
    """A stub that answers on a free port of 127.0.0.1."""
    with Stub(fault, fault_steps) as stub:
        thread = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield stub
        finally:
            stub.shutdown()
            thread.join()
