"""A server in miniature that answers as the contract says, or wrongly at chosen step counts.

It deliberately knows nothing of models: its texts are made up.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LADDER = (1, 4)
NO_FAULTS: Mapping[int, str] = {}
NO_HEADERS: Mapping[str, str] = {}
UNHURRIED_S = 0.005  # of service, so that callers who never rest do not keep two processors busy
CHOSEN_STEPS = 2  # where a request leaves the choice to the server
MODELS = (
    {"id": "talker", "task": "generate", "max_tokens": 64},
    {
        "id": "judge",
        "task": "classify",
        "card": {"examples": ["ham", "spam"]},
        "labels": ["good", "bad"],
        "efforts": {"low": 1},
    },
    {"id": "eye", "task": "classify", "input": {"kind": "image"}},
    {"id": "interpreter", "task": "translate", "input": {"kind": "text"}},
)


class Stub(ThreadingHTTPServer):
    """`faults` are what goes wrong, each at a step count of its own, which joins the ladder."""

    daemon_threads = True

    request_queue_size = 128

    def __init__(self, faults: Mapping[int, str], service_s: float, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.faults = faults
        self.ladder = sorted({*LADDER, *faults})
        self.service_s = service_s
        self.dead = False  # no connection that is open is answered any more
        self._turn = threading.Lock()
        self._free_s = 0.0  # when the one server in the queue will be
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Quiet: clients that leave are a part of the tests."""

    def serve_in_turn(self) -> None:
        """Wait as long as a queue before one server of fixed speed would make one wait."""
        with self._turn:
            self._free_s = max(self._free_s, time.monotonic()) + self.service_s
            done_s = self._free_s
        time.sleep(max(done_s - time.monotonic(), 0.0))


def _budget(steps: int, fault: str | None) -> dict[str, Any]:
    expected = {"metric": "accuracy", "value": 0.5 + steps / 10}
    said = 99 if fault == "other_steps" else steps
    return {"steps": said, "reason": "exact", "expected": expected}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each answer waits 40 ms for an acknowledgement
    server: Stub

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, {"object": "list", "data": MODELS})
        elif self.path.endswith("/ladder"):
            self._answer(200, {"rungs": [{"steps": steps} for steps in self.server.ladder]})
        else:
            self._answer(404, {"error": {"code": "not_found", "message": self.path}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.dead:
            self.close_connection = True
            return
        steps = body.get("steps", CHOSEN_STEPS)
        fault = self.server.faults.get(steps)
        if self.server.service_s:
            self.server.serve_in_turn()
        if fault == "refuse":
            self._answer(429, {"error": {"code": "queue_full", "message": "try later"}})
        elif fault == "refuse_for_a_second":
            self._answer(429, {"error": {"code": "queue_full"}}, {"retry-after-ms": "1000"})
        elif fault == "hang":
            time.sleep(30)
        elif self.path == "/v1/classify":
            result = {"label": "good", "budget": _budget(steps, fault)}
            self._answer(200, {"results": [result]})
        elif body.get("stream"):
            self._stream(steps, body["max_tokens"], fault)
        else:
            self._whole(steps, body, fault)

    def _whole(self, steps: int, body: dict[str, Any], fault: str | None) -> None:
        # A token is half of the characters that a prompt would be cut to.
        usage = {"prompt_tokens": len(body["prompt"]) // 2, "completion_tokens": body["max_tokens"]}
        told = {"budget": _budget(steps, fault)}
        text = "a" * body["max_tokens"]
        if self.path == "/v1/completions":
            choices = [{"text": text, "finish_reason": "length"}]
            self._answer(200, {"usage": usage, "choices": choices, "stepdial": told})
        else:
            self._answer(200, {"usage": usage, "text": text, **told})

    def _stream(self, steps: int, tokens: int, fault: str | None) -> None:
        openai = self.path == "/v1/completions"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for index in range(tokens):
            data: dict[str, Any] = {"index": index, "text": "a", "steps": steps}
            if openai:
                data = {"choices": [{"text": "a", "finish_reason": None}]}
            self._chunk(f"data: {json.dumps(data)}\n\n")
            time.sleep(0.001)
            if fault == "cut" and index == 2:
                self.close_connection = True
                return
        if fault == "error_event":
            self._chunk('event: error\ndata: {"error": {"code": "lapsed", "message": "late"}}\n\n')
        elif fault != "no_terminal":
            told = {"budget": _budget(steps, fault)}
            if openai:
                last = json.dumps({"choices": [], "stepdial": told})
                self._chunk(f"data: {last}\n\ndata: [DONE]\n\n")
            else:
                self._chunk(f"event: done\ndata: {json.dumps(told)}\n\n")
        self._chunk("")

    def _chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        self.wfile.flush()

    def _answer(
        self, status: int, answer: dict[str, Any], headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: what matters is what the client reports."""


@contextmanager
def running_stub(
    faults: Mapping[int, str] = NO_FAULTS, service_s: float = 0.0, port: int = 0
) -> Iterator[Stub]:
    """A stub that answers on a port of 127.0.0.1, 0 being a free one; with `service_s`, one
    request at a time."""
    with Stub(faults, service_s, port) as stub:
        thread = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield stub
        finally:
            stub.shutdown()
            thread.join()
