"""Every server that is compared: what it needs, how it is started, asked and tuned.

Knows commands, routes and bodies; deliberately nothing of how any of them is measured.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab import ROOT
from benchmarks.peers.labeller import BUNDLE, CALLS, MAX_BATCH, PORT, STEPS

STEPDIAL = "stepdial"
MOSEC = "mosec"
_MODEL = ("onnxruntime==1.31.1", "tokenizers==0.23.3")
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
    wishes: Callable[[float], Mapping[str, Mapping[str, Any]]] = field(default=lambda ms: {})
    interpreter: Path = Path(sys.executable)
    python_front: bool = True

    def payload(self, text: str, steps: int) -> bytes:
        return json.dumps(self.body(text, steps)).encode()

    def environment(self, place: Place) -> dict[str, str]:
        """Ours, less every setting that a server could take for its own."""
        prefixes = ("STEPDIAL_", "BENTOML_", "MLSERVER_", "MOSEC_", "LIT_", "UVICORN_")
        own = {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
        told = {
            BUNDLE: str(place.bundle),
            STEPS: str(place.steps),
            CALLS: str(place.calls),
            PORT: str(place.port),
            "PYTHONPATH": str(ROOT),
        }
        return own | told | dict(self.variables(place))


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
        wishes=lambda ms: {
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
