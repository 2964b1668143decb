"""The servers that are compared: what each needs, its environment, its start, its processes.

Each has an environment of its own, and all that it started is counted and ended with it.
"""

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks.client import Client
from benchmarks.lab import ROOT
from benchmarks.peers.labeller import BUNDLE, CALLS, MAX_BATCH, PORT, STEPS
from benchmarks.server import Server, Tree, environment_without, free_ports, start

STEPDIAL = "stepdial"
MOSEC = "mosec"
_MODEL = (f"onnxruntime=={version('onnxruntime')}", f"tokenizers=={version('tokenizers')}")
_NUMPY = ("numpy==2.4.6",)


@dataclass(frozen=True, slots=True)
class Place:
    """What a server is started with."""

    python: Path  # of its environment
    bundle: Path
    steps: int
    port: int
    spare_ports: tuple[int, int]
    folder: Path  # an empty one
    calls: Path  # the file that its calls of the model are noted in


@dataclass(frozen=True, slots=True)
class Peer:
    """A server, ready to be started and asked."""

    name: str
    packages: tuple[str, ...]  # none: it runs in the environment of the benchmarks
    tuned: str
    path: str
    body: Callable[[str, int], Mapping[str, Any]]  # of a text and the steps
    label: Callable[[Any], str]  # of an answer
    command: Callable[[Place], Sequence[str]]
    variables: Callable[[Place], Mapping[str, str]] = field(default=lambda place: {})
    # What else a request can say under overload, by name; a field that is None is left out.
    budgets: Callable[[float], Mapping[str, Mapping[str, Any]]] = field(default=lambda ms: {})
    interpreter: Path = Path(sys.executable)
    python_front: bool = True

    def payload(self, text: str, steps: int) -> bytes:
        return json.dumps(self.body(text, steps)).encode()

    def environment(self, place: Place) -> dict[str, str]:
        """Ours, less every setting that a server could take for its own."""
        prefixes = ("STEPDIAL_", "BENTOML_", "MLSERVER_", "MOSEC_", "LIT_", "UVICORN_")
        told = {
            BUNDLE: str(place.bundle),
            STEPS: str(place.steps),
            CALLS: str(place.calls),
            PORT: str(place.port),
            "PYTHONPATH": str(ROOT),
        }
        return environment_without(*prefixes) | told | dict(self.variables(place))


def _app(name: str, *flags: str) -> Callable[[Place], Sequence[str]]:
    return lambda place: [
        *(str(place.python), "-m", f"benchmarks.peers.{name}"),
        *(flag.format(port=place.port) for flag in flags),
    ]


def _script(place: Place, name: str) -> str:
    return str(place.python.with_name(name))


def _text(text: str, steps: int) -> Mapping[str, Any]:
    return {"text": text}


def _tensor(text: str, steps: int) -> Mapping[str, Any]:
    tensor = {"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
    return {"inputs": [tensor]}


def _first_output(answer: Any) -> str:
    (labels,) = (one["data"] for one in answer["outputs"] if one["name"] == "label")
    return str(labels[0])


def _mlserver_variables(place: Place) -> Mapping[str, str]:
    http, (grpc, metrics) = place.port, place.spare_ports
    return {
        "MLSERVER_HOST": "127.0.0.1",
        "MLSERVER_HTTP_PORT": str(http),
        "MLSERVER_GRPC_PORT": str(grpc),
        "MLSERVER_METRICS_PORT": str(metrics),
        "MLSERVER_DEBUG": "false",
        "MLSERVER_MODEL_NAME": "topics",
        "MLSERVER_MODEL_IMPLEMENTATION": "benchmarks.peers.mlserver_app.Topics",
        "MLSERVER_MODEL_MAX_BATCH_SIZE": str(MAX_BATCH),
        "MLSERVER_MODEL_MAX_BATCH_TIME": "0.01",
    }


PEERS = (
    Peer(
        name=STEPDIAL,
        packages=(),
        tuned="defaults: batches of up to 16 of what waits, no waiting for more",
        path="/v1/classify",
        body=lambda text, steps: {"input": text, "steps": steps},
        label=lambda answer: str(answer["results"][0]["label"]),
        command=lambda place: [
            *(str(place.python), "-m", "serve", str(place.bundle), "--port", str(place.port)),
        ],
        budgets=lambda ms: {
            "these steps within the objective": {"deadline_ms": ms},
            "any steps within the objective": {"deadline_ms": ms, "steps": None},
        },
    ),
    Peer(
        name="FastAPI",
        packages=("fastapi==0.165.0", "uvicorn[standard]==0.54.0", *_NUMPY, *_MODEL),
        tuned="no batches; a plain function in its pool of 40 threads",
        path="/classify",
        body=_text,
        label=lambda answer: str(answer["label"]),
        command=_app("fastapi_app"),
    ),
    Peer(
        name=MOSEC,
        packages=("mosec==0.9.8", *_NUMPY, *_MODEL),
        tuned="one worker, batches of up to 16, waits 10 ms for more",
        path="/inference",
        body=_text,
        label=lambda answer: str(answer["label"]),
        command=_app("mosec_app", "--port", "{port}", "--address", "127.0.0.1"),
        python_front=False,
    ),
    Peer(
        name="LitServe",
        packages=("litserve==0.2.19", *_NUMPY, *_MODEL),
        tuned="one worker, batches of up to 16, waits 10 ms for more, fast_queue",
        path="/predict",
        body=_text,
        label=lambda answer: str(answer["label"]),
        command=_app("litserve_app"),
    ),
    Peer(
        name="BentoML",
        packages=("bentoml==1.4.39", *_NUMPY, *_MODEL),
        tuned="one worker, adaptive batches of up to 16",
        path="/classify",
        body=lambda text, steps: {"texts": [text]},
        label=lambda answer: str(answer[0]["label"]),
        command=lambda place: [
            *(_script(place, "bentoml"), "serve", "benchmarks.peers.bentoml_app:Topics"),
            *("--host", "127.0.0.1", "--port", str(place.port), "--working-dir", str(ROOT)),
        ],
        variables=lambda place: {
            "BENTOML_HOME": str(place.folder),
            "BENTOML_DO_NOT_TRACK": "True",
        },
    ),
    Peer(
        name="MLServer",
        # Its worker processes ask for an event loop in a way that newer uvloops refuse.
        packages=("mlserver==1.7.1", "uvloop==0.21.0", *_NUMPY, *_MODEL),
        tuned="one worker process (default), batches of up to 16, waits 10 ms for more",
        path="/v2/models/topics/infer",
        body=_tensor,
        label=_first_output,
        command=lambda place: [_script(place, "mlserver"), "start", str(place.folder)],
        variables=_mlserver_variables,
    ),
    Peer(
        name="Triton",
        packages=("nvidia-pytriton==0.7.0", *_MODEL),
        tuned="one instance, dynamic batches of up to 16 without delay (default)",
        path="/v2/models/topics/infer",
        body=_tensor,
        label=_first_output,
        command=_app("triton_app"),
        # The Python that it brings a backend for; others lack what its stub looks for.
        interpreter=Path("/usr/bin/python3.11"),
        python_front=False,
    ),
)


# Cores, so that a server and its clients do not take each other's time.


@dataclass(frozen=True, slots=True)
class Cores:
    """Those of the server, and those of the clients."""

    server: frozenset[int]
    clients: frozenset[int]

    @classmethod
    def of_machine(cls) -> Self:
        """The first usable core for the server, the others for the clients, if there are any."""
        first, *others = sorted(os.sched_getaffinity(0))
        return cls(frozenset({first}), frozenset(others or {first}))

    @property
    def apart(self) -> bool:
        return not self.server & self.clients

    @contextmanager
    def of_clients(self) -> Iterator[None]:
        """This thread, and what it starts, stays on those of the clients meanwhile."""
        with _only(self.clients):
            yield

    @contextmanager
    def of_server(self) -> Iterator[None]:
        """This thread, and what it starts, stays on that of the server meanwhile."""
        with _only(self.server):
            yield


@contextmanager
def _only(cores: frozenset[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# A server that runs on its core and answers, and the work that it has done.


_START_S, _READY_POLL_S, _STILL_S, _SETTLE_S = 90.0, 0.01, 0.5, 30.0
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
        time.sleep(_READY_POLL_S)
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


# An environment of each server's own, with pinned packages, in a folder that is kept.


_STAMP = "installed.txt"
_INSTALL_S = 900


class NotInstalled(Exception):
    """An environment could not be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Environments:
    """All of them, each a folder of this one."""

    folder: Path

    def __post_init__(self) -> None:
        if self.folder.resolve().is_relative_to(ROOT):
            raise NotInstalled(
                f"--environments {self.folder} is inside the repository: name a folder elsewhere"
            )

    def python(self, name: str, packages: tuple[str, ...], interpreter: Path) -> Path:
        """The interpreter of one that has these packages; it is made if it is not there."""
        folder = self.folder / name.lower()
        python, stamp = folder / "bin" / "python", folder / _STAMP
        wanted = "\n".join((str(interpreter), *packages))
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
            return python
        if not interpreter.exists():
            raise NotInstalled(f"it needs {interpreter}, which is not on this machine")
        print(f"installing {name}: {' '.join(packages)}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        # Ours installs for it, so that the interpreter need not bring a pip.
        _run(str(interpreter), "-m", "venv", "--without-pip", str(folder))
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python))
        _run(*pip, "install", "--quiet", *packages)
        stamp.write_text(wanted, encoding="utf-8")
        return python


def default_folder() -> Path:
    """Where programs of this user keep what they can make again."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "stepdial" / "peers"


def _run(*command: str) -> None:
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_INSTALL_S
        )
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"installing took more than {_INSTALL_S} s") from None
    if ended.returncode:
        told = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        lines = told or ended.stderr.strip().splitlines() or ["no message"]
        raise NotInstalled(f"it could not be installed: {lines[-1]}")
