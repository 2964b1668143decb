"""Requests that fail, are cut off or answered wrongly while a model is swapped under load.

    python -m benchmarks.swaps

Clients stream; two versions of one model take turns. What each version answers was asked of it
alone before. No throughput is measured: loading takes what the answers leave.
"""

import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

import httpx
import numpy as np

from benchmarks.client import Client, Crowd, UnexpectedAnswer
from benchmarks.lab import (
    Cell,
    Options,
    Provenance,
    Result,
    Table,
    Target,
    options,
    parser,
    percentile,
    run,
)
from benchmarks.server import Server, running_server
from benchmarks.texts import PROMPT
from serve.bundle import LATENCY_FILE, Bundle, Manifest, open_staging, seal_bundle
from serve.keys import NewKey

# Another version of a model: of the same name and ladder, with other weights, so other answers.


_CHANGE = 0.05  # of a weight, as a share of it


def write_version(bundle: Bundle, folder: Path) -> Bundle:
    """A copy whose weights, all float32, are changed by chance."""
    names = [*bundle.manifest.files]
    if (bundle.folder / LATENCY_FILE).is_file():
        names.append(LATENCY_FILE)
    with open_staging(folder) as staging:
        for name in names:
            shutil.copyfile(bundle.folder / name, staging / name)
        path = staging / bundle.manifest.weights
        weights = np.fromfile(path, np.float32)
        noise = np.random.default_rng(1).uniform(-_CHANGE, _CHANGE, weights.size)
        (weights * (1 + noise).astype(np.float32)).tofile(path)
        return seal_bundle(staging, bundle.manifest, folder)


@dataclass(frozen=True, slots=True)
class Admin:
    """What a server needs so that models may be swapped, and the key to do it with."""

    flags: tuple[str, ...]
    secret: str

    @classmethod
    def of(cls, versions: Sequence[Bundle], folder: Path) -> Self:
        """For these bundles; the key is kept in the folder."""
        key = NewKey.draw("benchmark")
        (folder / "keys.toml").write_text(key.block, encoding="utf-8")
        allowed = ",".join(str(one.folder.resolve()) for one in versions)
        keys = str(folder / "keys.toml")
        return cls(("--admin-keys-file", keys, "--admin-folders", allowed), key.secret)

    def client(self, server: Server) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.secret}"}
        return httpx.Client(base_url=server.url, headers=headers, timeout=120)


def swap(admin: httpx.Client, bundle: Bundle) -> float:
    """The seconds until the bundle was served; an httpx.HTTPError if it is not."""
    begun_s = time.perf_counter()
    asked = {"bundle": str(bundle.folder.resolve())}
    admin.post("/admin/models", json=asked).raise_for_status()
    return time.perf_counter() - begun_s


NAME = "swaps"
SWAPS, CLIENTS, TOKENS, GAP_S = 100, 8, 64, 0.2
PROMPTS = (PROMPT, PROMPT * 2, PROMPT * 3)
WANTED_GROWTH_MB = 10
_SETTLED = 10  # swaps until what loading leaves behind has come to rest

Asked = tuple[str, int]  # prompt and steps


@dataclass(slots=True)
class Progress:
    """How many swaps were asked for and are done: an even number done means the first version."""

    begun: int = 0
    done: int = 0

    @property
    def resting(self) -> bool:
        return self.begun == self.done


@dataclass(slots=True)
class Seen:
    """What the clients saw."""

    answers: list[int] = field(default_factory=lambda: [0, 0])  # of each version
    wrong: int = 0  # the answer of neither version, or of one that was not served then
    gaps_ms: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})


class Reader:
    """Streams an answer, and holds it against those of the versions."""

    def __init__(
        self, model: str, answers: Sequence[dict[Asked, str]], progress: Progress, seed: int
    ) -> None:
        self.seen = Seen()
        self._model, self._answers, self._progress = model, answers, progress
        self._random = random.Random(seed)

    def ask(self, client: Client) -> str:
        asked = self._random.choice([*self._answers[0]])
        before = Progress(self._progress.begun, self._progress.done)
        text, last_ms, after, done = "", None, before, False
        for event in client.stream("/v1/generate", _body(self._model, asked)):
            if event.name:
                if event.name != "done" or done:
                    raise UnexpectedAnswer(f"the event {event.name}: {event.data}")
                done = True
                continue
            if last_ms is None:
                after = Progress(self._progress.begun, self._progress.done)
            else:
                self.seen.gaps_ms[self._progress.resting].append(event.at_ms - last_ms)
            text, last_ms = text + event.data["text"], event.at_ms
        if not done:
            raise UnexpectedAnswer("the stream ended without its last event")
        self._judge(asked, text, before, after)
        return "streamed"

    def _judge(self, asked: Asked, text: str, before: Progress, after: Progress) -> None:
        versions = [number for number, known in enumerate(self._answers) if known[asked] == text]
        if before.resting and after.begun == before.begun:
            versions = [number for number in versions if number == before.done % 2]
        if not versions:
            self.seen.wrong += 1
            return
        self.seen.answers[versions[0]] += 1


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    bundle = chosen.read("generate")[0]
    clients = 3 if chosen.quick else CLIENTS
    swaps = 6 if chosen.quick else SWAPS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        versions = (bundle, write_version(bundle, folder / "other"))
        access = Admin.of(versions, folder)
        with (
            running_server([bundle.folder], *access.flags) as server,
            access.client(server) as admin,
        ):
            return _measured(server, admin, versions, swaps, clients, provenance)


def _measured(
    server: Server,
    admin: httpx.Client,
    versions: Sequence[Bundle],
    swaps: int,
    clients: int,
    provenance: Provenance,
) -> Result:
    manifest = versions[0].manifest
    answers: list[dict[Asked, str]] = []
    for version in (1, 0):
        swap(admin, versions[version])
        answers.insert(0, _alone(server, manifest))
    progress = Progress()
    readers = [Reader(manifest.name, answers, progress, seed) for seed in range(clients)]
    failed, times_s, rss = 0, [], []
    with Crowd(server, [reader.ask for reader in readers]) as crowd:
        for number in range(swaps):
            time.sleep(GAP_S)
            progress.begun += 1
            try:
                times_s.append(swap(admin, versions[(number + 1) % 2]))
                progress.done += 1
            except httpx.HTTPError as error:  # what was served goes on
                failed += 1
                progress.begun -= 1
                print(f"swap {number} failed: {error}", file=sys.stderr)
            rss.append(server.memory().rss / 1e6)
        time.sleep(GAP_S)
        crowd.stop()
    left, complaints = _settled(admin), server.complaints()
    wrong = sum(reader.seen.wrong for reader in readers)
    seen = [reader.seen for reader in readers]
    for problem in crowd.errors[:5]:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
    settled = rss[min(_SETTLED, len(rss) // 2) :]
    half = len(settled) // 2
    growth_mb = statistics.median(settled[half:]) - statistics.median(settled[: half or 1])
    return provenance.result(
        NAME,
        "A model is swapped under streaming load",
        f"{clients} clients stream {TOKENS} tokens of {manifest.name}, greedily, at every rung, "
        f"one answer after the other; two versions of it are swapped {swaps} times, each read, "
        "hashed, opened, warmed up and measured anew. An answer is right if it is, letter for "
        "letter, what the version that was served then gives when it is alone.",
        [
            _table(swaps, times_s, seen, settled),
            _gap_table(seen),
        ],
        [
            Target("swaps that failed", failed, "==", 0),
            Target("requests that failed or were cut off", len(crowd.errors), "==", 0),
            Target("answers of a wrong version, or of none", wrong, "==", 0),
            Target("models left in the server", left, "==", 1),
            Target("RSS growth, second half over first", growth_mb, "<=", WANTED_GROWTH_MB, "MB"),
            Target("complaints in the server's log", len(complaints), "==", 0),
        ],
    )


def _table(
    swaps: int, times_s: Sequence[float], seen: Sequence[Seen], rss_mb: Sequence[float]
) -> Table:
    rows: list[list[Cell]] = [
        ["swaps", swaps],
        ["seconds of a swap, median", statistics.median(times_s)],
        ["seconds of a swap, longest", max(times_s)],
        ["answers of the first version", sum(one.answers[0] for one in seen)],
        ["answers of the second version", sum(one.answers[1] for one in seen)],
        ["RSS MB, least", min(rss_mb)],
        ["RSS MB, most", max(rss_mb)],
    ]
    return Table("What happened.", ("what", "measured"), rows)


def _gap_table(seen: Sequence[Seen]) -> Table:
    rows: list[list[Cell]] = []
    for resting, when in ((True, "while nothing is loaded"), (False, "while a model is loaded")):
        gaps = [gap for one in seen for gap in one.gaps_ms[resting]]
        shares = [percentile(gaps, share) if gaps else None for share in (0.5, 0.99, 1)]
        rows.append([when, len(gaps), *shares])
    columns = ("when", "tokens", "median ms", "p99 ms", "longest ms")
    return Table("From one token of an answer to the next, as clients see it.", columns, rows)


def _alone(server: Server, manifest: Manifest) -> dict[Asked, str]:
    """What the version that is served answers to everything that will be asked."""
    with Client.of(server) as client:
        return {
            (prompt, steps): "".join(
                event.data["text"]
                for event in client.stream("/v1/generate", _body(manifest.name, (prompt, steps)))
                if not event.name
            )
            for prompt in PROMPTS
            for steps in manifest.steps
        }


def _body(model: str, asked: Asked) -> dict[str, str | int | bool]:
    prompt, steps = asked
    body: dict[str, str | int | bool] = {"model": model, "prompt": prompt, "steps": steps}
    return body | {"max_tokens": TOKENS, "temperature": 0, "stream": True}


def _settled(admin: httpx.Client) -> int:
    """How many models are in the server once those that leave have had time to."""
    end_s = time.perf_counter() + 10
    while True:
        found = len(admin.get("/admin/models").raise_for_status().json()["models"])
        if found == 1 or time.perf_counter() > end_s:
            return found
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
