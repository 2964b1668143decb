"""A server that runs on its core and answers, and the work that it has done.

Knows how a peer is started and recognised as ready; deliberately nothing of loads and faults.
"""

import http.client
import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.client import Client
from benchmarks.peers.peer import STEPDIAL, Peer, Place
from benchmarks.peers.tree import Cores, Tree, free_ports, start
from benchmarks.server import Server

_START_S, _POLL_S, _STILL_S, _SETTLE_S = 90.0, 0.01, 0.5, 30.0
_SUM = re.compile(r"^stepdial_batch_rows_sum\{[^}]*\} (\S+)$", re.MULTILINE)
_COUNT = re.compile(r"^stepdial_batch_rows_count\{[^}]*\} (\S+)$", re.MULTILINE)


class NotRunning(Exception):
    """A server did not come up, or answered wrongly; the message says how."""


class Work(NamedTuple):
    """Calls of the model that have ended, and the rows in them."""

    calls: int
    rows: int

    def since(self, before: "Work") -> "Work":
        return Work(self.calls - before.calls, self.rows - before.rows)


@dataclass(frozen=True, slots=True)
class Question:
    """A text, and the label that the model gives it."""

    text: str
    label: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Model:
    """What all of them serve."""

    bundle: Path
    steps: int
    questions: Sequence[Question]


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers."""

    peer: Peer
    tree: Tree
    server: Server
    model: Model
    start_s: float  # to the first right answer
    calls: Path

    @property
    def bodies(self) -> list[Mapping[str, Any]]:
        return [self.peer.body(one.text, self.model.steps) for one in self.model.questions]

    @property
    def payloads(self) -> list[bytes]:
        return [self.peer.payload(one.text, self.model.steps) for one in self.model.questions]

    def work(self) -> Work:
        """What the model has done since the start."""
        if self.peer.name == STEPDIAL:
            with Client.of(self.server) as client:
                page = client.get("/metrics")
            calls = sum(map(float, _COUNT.findall(page)))
            return Work(int(calls), int(sum(map(float, _SUM.findall(page)))))
        if not self.calls.exists():
            return Work(0, 0)
        lines = self.calls.read_text(encoding="ascii").splitlines()
        return Work(len(lines), sum(int(line.split()[0]) for line in lines))

    def settled_work(self) -> Work:
        """The same, once nothing more is done."""
        found, end_s = self.work(), time.perf_counter() + _SETTLE_S
        while time.perf_counter() < end_s:
            time.sleep(_STILL_S)
            before, found = found, self.work()
            if found == before:
                break
        return found

    def check(self) -> None:
        """Every question gets its right answer; NotRunning otherwise."""
        for question in self.model.questions:
            status, answer = self.ask(self.peer.payload(question.text, self.model.steps))
            if status != 200 or self.peer.label(json.loads(answer)) != question.label:
                told = f"{status} {answer[:200]!r}"
                raise NotRunning(f"it answered {told} where {question.label} is right")

    def ask(self, payload: bytes) -> tuple[int, bytes]:
        """One request on a connection of its own."""
        return _ask(self.server, self.peer.path, payload)


@contextmanager
def running(peer: Peer, python: Path, model: Model, cores: Cores) -> Iterator[Running]:
    """One that answers; ended afterwards, if it still runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "own").mkdir()
        port, *spare = free_ports(3)
        calls, log = folder / "calls.txt", folder / "server.log"
        place = Place(
            *(python, model.bundle.resolve(), model.steps, port),
            *((spare[0], spare[1]), folder / "own", calls),
        )
        begun_s = time.perf_counter()
        with cores.of_server():
            process = start(peer.command(place), peer.environment(place), log)
        tree = Tree(process)
        server = Server(process.pid, "127.0.0.1", port, log)
        try:
            _wait(peer, tree, server, model)
            start_s = time.perf_counter() - begun_s
            found = Running(peer, tree, server, model, start_s, calls)
            found.check()
            yield found
        finally:
            tree.end()


def _wait(peer: Peer, tree: Tree, server: Server, model: Model) -> None:
    payload = peer.payload(model.questions[0].text, model.steps)
    end_s = time.perf_counter() + _START_S
    while time.perf_counter() < end_s:
        try:
            if _ask(server, peer.path, payload)[0] == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        if tree.process.poll() is not None:
            raise NotRunning(f"it ended with status {tree.process.returncode}: {_last(server)}")
        time.sleep(_POLL_S)
    raise NotRunning(f"it did not answer within {_START_S:g} s: {_last(server)}")


def _last(server: Server) -> str:
    lines = server.logged().strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"


def _ask(server: Server, path: str, payload: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=10)
    try:
        connection.request("POST", path, payload, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
