"""Servers that are killed under load, some of them while a model is swapped, and started again.

What each model answers is asked of it first; every whole answer afterwards must be one of those.
Knows requests and what is right; deliberately nothing of how the kills are reported.
"""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import httpx

from benchmarks.client import Client, UnexpectedAnswer
from benchmarks.killing import Found
from benchmarks.server import READY_LINE, Server, running_server
from benchmarks.texts import PARAGRAPHS, PROMPT
from benchmarks.versions import write_version
from serve.bundle import Bundle
from serve.keys import NewKey

_CLIENTS, _TOKENS = 6, 32
_LONGEST_S = 0.6
_SWAPPED_SHARE = 1 / 3
# What a client may see of a connection that nobody answers any more.
_CUT = (OSError, HTTPException, UnexpectedAnswer)


@dataclass(slots=True)
class Known:
    """What is asked, and all that may be answered to it."""

    labels: dict[int, str] = field(default_factory=dict)  # by paragraph
    texts: dict[int, set[str]] = field(default_factory=dict)  # by steps: one of each version


@dataclass(frozen=True, slots=True)
class Models:
    """A classifier, and two versions of a generator that take turns."""

    classifier: Bundle
    generator: Bundle
    other: Bundle


class Caller(threading.Thread):
    """Asks until the server is gone."""

    def __init__(self, server: Server, models: Models, known: Known, seed: int) -> None:
        super().__init__(daemon=True)
        self.whole = self.cut = 0
        self.wrong: list[str] = []
        self._client, self._models, self._known = Client.of(server), models, known
        self._random = random.Random(seed)

    def run(self) -> None:
        while not self.cut:
            try:
                right = self._classified() if self._random.random() < 0.5 else self._written()
            except _CUT as error:
                self.cut += 1
                if isinstance(error, UnexpectedAnswer) and "broke off" not in str(error):
                    self.wrong.append(str(error)[:200])
            except Exception as error:
                self.cut += 1
                self.wrong.append(f"half an answer is taken for one: {error}")
            else:
                self.whole += 1
                if not right:
                    self.wrong.append("a whole answer is wrong")
        self._client.close()

    def _classified(self) -> bool:
        number = self._random.randrange(len(PARAGRAPHS))
        return _label(self._client, self._models, number) == self._known.labels[number]

    def _written(self) -> bool:
        steps = self._random.choice(self._models.generator.manifest.steps)
        stream = self._random.random() < 0.7
        text = _text(self._client, self._models, steps, stream)
        return text in self._known.texts[steps]


def kill_servers(models: Sequence[Bundle], folder: Path, kills: int, seed: int) -> Found:
    """As many kills as are asked for; who was told wrong things, and what did not start again."""
    found, draw, begun_s = Found("server"), random.Random(seed), time.perf_counter()
    classifier, generator = models
    own = Models(classifier, generator, write_version(generator, folder / "other", seed=1))
    key = NewKey.draw("benchmark")
    (folder / "keys.toml").write_text(key.block, encoding="utf-8")
    known = Known()
    for version in (own.generator, own.other):
        with running_server([own.classifier.folder, version.folder]) as server:
            _learn(server, own, known)
    temporary = folder / "tmp"
    temporary.mkdir()
    port = _free_port()
    while found.kills < kills:
        with _server(own, folder, port) as server:
            found.expect(_ready(server), "it does not start again")
            _kill(server, own, known, key.secret, draw, found)
    with _server(own, folder, port) as server:
        found.expect(_ready(server), "it does not start again")
    left = [*temporary.iterdir(), *folder.glob(".*"), *own.other.folder.glob(".*")]
    found.expect(not left, f"files were left behind: {left}")
    found.seconds = time.perf_counter() - begun_s
    return found


@contextmanager
def _server(own: Models, folder: Path, port: int) -> Iterator[Server]:
    allowed = ",".join(str(one.folder.resolve()) for one in (own.generator, own.other))
    flags = ("--admin-keys-file", str(folder / "keys.toml"), "--admin-folders", allowed)
    bundles = [own.classifier.folder, own.generator.folder]
    options = ("--threads", "1", "--port", str(port))
    with running_server(bundles, *flags, *options, TMPDIR=str(folder / "tmp")) as server:
        yield server


def _kill(
    server: Server, own: Models, known: Known, secret: str, draw: random.Random, found: Found
) -> None:
    callers = [Caller(server, own, known, draw.getrandbits(32)) for _ in range(_CLIENTS)]
    swapping = draw.random() < _SWAPPED_SHARE
    swapper = threading.Thread(target=_swap_on, args=(server, own, secret), daemon=True)
    for thread in (*callers, *([swapper] if swapping else [])):
        thread.start()
    time.sleep(draw.uniform(0, _LONGEST_S))
    log = server.logged().partition(READY_LINE)[2]
    os.kill(server.pid, signal.SIGKILL)
    found.kills += 1
    for caller in callers:
        caller.join(30)
        found.expect(not caller.is_alive(), "a client was told nothing")
        found.seen["whole answers, all of them right"] += caller.whole
        found.seen["answers cut off, each an error to its client"] += caller.cut
        for wrong in caller.wrong:
            found.expect(False, wrong)
    found.seen["during swaps"] += swapping
    found.expect("ERROR" not in log, f"it had complained before: {log[-300:]}")


def _swap_on(server: Server, own: Models, secret: str) -> None:
    """Swap the versions until the server is gone."""
    headers = {"authorization": f"Bearer {secret}"}
    url = f"http://{server.host}:{server.port}"
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        while True:
            for version in (own.other, own.generator):
                try:
                    client.post("/admin/models", json={"bundle": str(version.folder.resolve())})
                except httpx.HTTPError:
                    return


def _learn(server: Server, own: Models, known: Known) -> None:
    with Client.of(server) as client:
        for number in range(len(PARAGRAPHS)):
            known.labels[number] = _label(client, own, number)
        for steps in own.generator.manifest.steps:
            known.texts.setdefault(steps, set()).add(_text(client, own, steps, stream=False))


def _label(client: Client, own: Models, number: int) -> str:
    body = {"model": own.classifier.manifest.name, "input": PARAGRAPHS[number]}
    (result,) = client.post("/v1/classify", body).body["results"]
    return str(result["label"])


def _text(client: Client, own: Models, steps: int, stream: bool) -> str:
    body: dict[str, Any] = {"model": own.generator.manifest.name, "prompt": PROMPT, "steps": steps}
    body |= {"max_tokens": _TOKENS, "temperature": 0, "stream": stream}
    if not stream:
        return str(client.post("/v1/generate", body).body["text"])
    text = ""
    for event in client.stream("/v1/generate", body):
        if event.name == "error":
            raise UnexpectedAnswer(f"the event {event.name}: {event.data}")
        text += "" if event.name else str(event.data["text"])
    return text


def _ready(server: Server) -> bool:
    with Client.of(server) as client:
        return client.status("/health/ready") == 200


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
