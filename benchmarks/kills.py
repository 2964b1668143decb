"""What kill -9 at random moments leaves of servers under load, exports and trainings.

    python -m benchmarks.kills [--only server] [--kills 100]

Each kind is killed as often as is asked for, and goes on by itself afterwards. What is lost, wrong,
incomplete or left behind is counted.
"""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import torch

from benchmarks.client import Client, Crowd, UnexpectedAnswer
from benchmarks.corruption import BundleOpener
from benchmarks.lab import (
    ROOT,
    Cell,
    Options,
    Provenance,
    Result,
    Table,
    Target,
    options,
    parser,
    run,
)
from benchmarks.server import READY_LINE, Server, free_ports, running_server
from benchmarks.swaps import Admin, swap, write_version
from benchmarks.texts import PARAGRAPHS, PROMPT
from export.run import ExportRequest, export_run
from export.trace import trace
from export.verify import samples_of
from serve.bundle import MANIFEST_FILE, Bundle
from train.checkpoint import MODEL, STATE, RunError, load_run
from train.data import open_dataset
from train.loop import train
from train.metrics import METRICS, read_metrics
from train.recipe import Recipe, load_recipe

# Kills: a random moment, what was seen afterwards, and processes that are forked to be killed. A
# fork saves the seconds that loading torch takes; what it then runs is what the command runs.


# One in so many is the whole command, from the start of its process.
COMMAND_EVERY = 10
# A little longer than it takes: some end by themselves, just before they would be killed.
_STRETCH = 1.05


@dataclass(slots=True)
class Found:
    """What came of the kills of one kind."""

    name: str
    kills: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def expect(self, right: bool, otherwise: str) -> None:
        """Note a problem unless it is right."""
        if not right:
            self.problems.append(f"{self.name}, kill {self.kills}: {otherwise}")


@dataclass(frozen=True, slots=True)
class Job:
    """What is killed: a call for forks, and the command that does the same; how long they take."""

    call: Callable[[], object]
    command: Sequence[str]
    call_s: float
    command_s: float

    def kill(self, draw: random.Random, number: int) -> bool:
        """Run it and kill it at a random moment; False if it had ended by then."""
        if number % COMMAND_EVERY == COMMAND_EVERY - 1:
            with _started(self.command) as process:
                time.sleep(draw.uniform(0, self.command_s * _STRETCH))
                process.kill()
                return process.wait() == -signal.SIGKILL
        child = forked(self.call)
        time.sleep(draw.uniform(0, self.call_s * _STRETCH))
        os.kill(child, signal.SIGKILL)
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def job(call: Callable[[], object], command: Sequence[str], before: Callable[[], None]) -> Job:
    """Time both once, each after `before`; SystemExit if one fails when nobody kills it."""
    seconds = []
    for forks in (True, False):
        before()
        begun_s = time.perf_counter()
        if (whole(call) if forks else _started(command).wait()) != 0:
            raise SystemExit(f"{' '.join(command)} fails even when it is not killed")
        seconds.append(time.perf_counter() - begun_s)
    return Job(call, command, *seconds)


def made(call: Callable[[], object]) -> None:
    """Make the call in a fork, since forks of a process that has used autograd could not."""
    if whole(call) != 0:
        raise SystemExit("what is to be killed cannot be prepared")


def whole(call: Callable[[], object]) -> int:
    """The status of a fork that runs the call to its end."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(call), 0)[1])


def forked(call: Callable[[], object]) -> int:
    """A process that makes the call, silently; its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        call()
        status = 0
    finally:
        os._exit(status)


def _started(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    silent = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=silent, stderr=silent)


# Servers that are killed under load, some of them while a model is swapped, and started again.
# What each model answers is asked of it first; every whole answer afterwards must be one of
# those.


_CLIENTS, _TOKENS = 6, 32
_LONGEST_S = 0.6
_SWAPPED_SHARE = 1 / 3
_RIGHT = "a whole answer is right"
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


class Caller:
    """What one client asks, until the server is gone."""

    def __init__(self, models: Models, known: Known, seed: int) -> None:
        self._models, self._known = models, known
        self._random = random.Random(seed)

    def ask(self, client: Client) -> str:
        """One answer, whole: whether it is right."""
        right = self._classified(client) if self._random.random() < 0.5 else self._written(client)
        return _RIGHT if right else "a whole answer is wrong"

    def _classified(self, client: Client) -> bool:
        number = self._random.randrange(len(PARAGRAPHS))
        return _label(client, self._models, number) == self._known.labels[number]

    def _written(self, client: Client) -> bool:
        steps = self._random.choice(self._models.generator.manifest.steps)
        stream = self._random.random() < 0.7
        text = _text(client, self._models, steps, stream)
        return text in self._known.texts[steps]


def _wrong(error: Exception) -> str | None:
    """What is wrong with how an answer was cut off; None where a client can tell that it was."""
    if not isinstance(error, _CUT):
        return f"half an answer is taken for one: {error}"
    if isinstance(error, UnexpectedAnswer) and "broke off" not in str(error):
        return str(error)[:200]
    return None


def kill_servers(models: Sequence[Bundle], folder: Path, kills: int) -> Found:
    """As many kills as are asked for; who was told wrong things, and what did not start again."""
    found, draw, begun_s = Found("server"), random.Random(0), time.perf_counter()
    classifier, generator = models
    own = Models(classifier, generator, write_version(generator, folder / "other"))
    admin = Admin.of([own.generator, own.other], folder)
    known = Known()
    for version in (own.generator, own.other):
        with running_server([own.classifier.folder, version.folder]) as server:
            _learn(server, own, known)
    temporary = folder / "tmp"
    temporary.mkdir()
    (port,) = free_ports(1)
    while found.kills < kills:
        with _server(own, admin, folder, port) as server:
            found.expect(_ready(server), "it does not start again")
            _kill(server, own, known, admin, draw, found)
    with _server(own, admin, folder, port) as server:
        found.expect(_ready(server), "it does not start again")
    left = [*temporary.iterdir(), *folder.glob(".*"), *own.other.folder.glob(".*")]
    found.expect(not left, f"files were left behind: {left}")
    found.seconds = time.perf_counter() - begun_s
    return found


@contextmanager
def _server(own: Models, admin: Admin, folder: Path, port: int) -> Iterator[Server]:
    bundles = [own.classifier.folder, own.generator.folder]
    flags = (*admin.flags, "--threads", "1", "--port", str(port))
    with running_server(bundles, *flags, TMPDIR=str(folder / "tmp")) as server:
        yield server


def _kill(
    server: Server, own: Models, known: Known, admin: Admin, draw: random.Random, found: Found
) -> None:
    callers = [Caller(own, known, draw.getrandbits(32)) for _ in range(_CLIENTS)]
    swapping = draw.random() < _SWAPPED_SHARE
    swapper = threading.Thread(target=_swap_on, args=(server, own, admin), daemon=True)
    with Crowd(server, [one.ask for one in callers], until_error=True) as crowd:
        if swapping:
            swapper.start()
        time.sleep(draw.uniform(0, _LONGEST_S))
        log = server.logged().partition(READY_LINE)[2]
        os.kill(server.pid, signal.SIGKILL)
    found.kills += 1
    found.expect(not crowd.asking, "a client was told nothing")
    found.seen["whole answers, all of them right"] += crowd.kinds.total()
    found.seen["answers cut off, each an error to its client"] += len(crowd.errors)
    for wrong in (*crowd.kinds, *map(_wrong, crowd.errors)):
        found.expect(wrong in (_RIGHT, None), str(wrong))
    found.seen["during swaps"] += swapping
    found.expect("ERROR" not in log, f"it had complained before: {log[-300:]}")


def _swap_on(server: Server, own: Models, admin: Admin) -> None:
    """Swap the versions until the server is gone."""
    with admin.client(server) as client, suppress(httpx.HTTPError):
        for version in itertools.cycle((own.other, own.generator)):
            swap(client, version)


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


# Trainings that are killed and resumed, again and again, until each is done. A checkpoint is
# written after every iteration, so that many kills meet one that is being written.


_CORPUS = "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 30
_SETTINGS = (
    *("model.width=16", "model.hidden=32", "model.heads=2", "model.layers=2", "model.window=24"),
    *("model.dropout=0.1", "optim.batch=8", "optim.warmup=2", "optim.precision=fp32"),
    *("steps.full=4", "steps.short=[1, 2]", "run.threads=1", "run.evaluate_batches=1"),
    *("optim.iterations=40", "run.checkpoint_every=1", "run.evaluate_every=10"),
)
_TIMED = ("tokens_per_s", "rows_per_s", "cpu_s")  # all else is the same in every run


def recipe_in(folder: Path) -> Recipe:
    """A decoder of characters that trains in a second."""
    corpus = folder / "corpus.txt"
    corpus.write_text(_CORPUS, encoding="utf-8")
    return load_recipe("shakespeare", list(_SETTINGS), str(corpus))


def kill_trainings(folder: Path, kills: int) -> Found:
    """As many kills as are asked for; what was lost or wrong."""
    found, draw, begun_s = Found("training"), random.Random(0), time.perf_counter()
    recipe = recipe_in(folder)
    reference, run = folder / "reference", folder / "run"
    made(partial(train, recipe, reference, quiet=True))
    clear = partial(shutil.rmtree, run, ignore_errors=True)
    killed = job(partial(train, recipe, run, quiet=True), _training_command(folder, run), clear)
    clear()
    before = 0
    while found.kills < kills:
        if killed.kill(draw, found.kills):
            found.kills += 1
        before = _check_training(run, reference, before, found)
        if before == recipe.optim.iterations and draw.random() < 0.5:
            # Killed as late as that, it has something to do still, or nothing: both must be right.
            found.expect(whole(killed.call) == 0, "it does not go on")
            _check_done(run, reference, found)
            clear()
            before = 0
    found.expect(whole(killed.call) == 0, "it does not go on")
    _check_done(run, reference, found)
    found.seconds = time.perf_counter() - begun_s
    return found


def _training_command(folder: Path, run: Path) -> list[str]:
    settings = [word for setting in _SETTINGS for word in ("--set", setting)]
    corpus = str(folder / "corpus.txt")
    return ["-m", "train", "train", "shakespeare", "--data", corpus, "--out", str(run), *settings]


def _check_training(run: Path, reference: Path, before: int, found: Found) -> int:
    """The iteration that the run has reached; no less than it had."""
    if not (run / STATE).is_file():
        found.expect(before == 0, f"the checkpoint of iteration {before} is gone")
        found.seen["before the first checkpoint"] += 1
        return before
    now = _iteration(run / STATE)
    found.expect(now >= before, f"iteration {now} where {before} was reached before")
    found.seen["with a checkpoint"] += 1
    if (run / MODEL).is_file():
        try:
            newest = load_run(run).facts["iteration"]
            found.expect(newest in (now, now - 1), f"weights of iteration {newest}, not {now}")
            found.seen["between its two files"] += newest != now
        except RunError as error:
            found.expect(False, str(error))
    logged = [record for record in _log(run) if record["iteration"] <= now]
    wanted = [record for record in _log(reference) if record["iteration"] <= now]
    found.expect(logged == wanted, f"{len(logged)} of {len(wanted)} records up to {now}")
    left = {path.name for path in run.glob(".*")} - {".lock"}
    found.seen["half a file left, for the next to replace"] += bool(left)
    return now


def _check_done(run: Path, reference: Path, found: Found) -> None:
    """It is what nobody has killed, byte for byte."""
    for name in (MODEL, STATE):
        same = (run / name).read_bytes() == (reference / name).read_bytes()
        found.expect(same, f"{name} is not that of a run that nobody killed")
    found.expect(_log(run) == _log(reference), "the log is not that of a run nobody killed")
    left = {path.name for path in run.iterdir()} - {path.name for path in reference.iterdir()}
    found.expect(not left, f"{', '.join(sorted(left))} was left behind")
    found.seen["runs that ended as if nobody had killed them"] += 1


def _log(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in record.items() if key not in _TIMED}
        for record in read_metrics(run / METRICS)
    ]


def _iteration(path: Path) -> int:
    """Of a checkpoint, from its header alone."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return int(header["__metadata__"]["iteration"])


# Exports that are killed: each leaves no bundle, or a whole one, and the next one succeeds. Most
# forks begin behind the tracing of the model, which writes nothing and takes longest. A process
# of its own opens what is there as a server does.


_STEPS, _SAMPLES = (1, 2), 16
_WHOLE_EVERY = 5


def kill_exports(folder: Path, kills: int) -> Found:
    """As many kills as are asked for; what was half made, lost, or in the way of the next."""
    found, draw, begun_s = Found("export"), random.Random(0), time.perf_counter()
    recipe = recipe_in(folder)
    run = folder / "run"
    made(partial(train, recipe, run, quiet=True))
    _trace_once(run)
    out = folder / "bundles"
    target = out / "model"
    request = ExportRequest(target, _STEPS, samples=_SAMPLES)
    clear = partial(shutil.rmtree, out, ignore_errors=True)
    killed = job(partial(export_run, run, request), _export_command(run, target), clear)
    with BundleOpener() as opener:
        answer = str(opener.open(target)["answer"])
        while found.kills < kills:
            there = draw.random() < 0.5
            if not there:
                shutil.rmtree(target, ignore_errors=True)
            there = target.exists()
            if killed.kill(draw, found.kills):
                found.kills += 1
            _check_export(out, target, there, answer, opener, found)
            if found.kills % _WHOLE_EVERY == 0:
                found.expect(whole(killed.call) == 0, "the next export fails")
                left = {path.name for path in out.iterdir()} - {target.name}
                found.expect(not left, f"{', '.join(sorted(left))} was left behind")
                found.expect(_opened(opener, target) == answer, "the next export is no good")
                found.seen["exports afterwards that left only a bundle"] += 1
    found.seconds = time.perf_counter() - begun_s
    return found


def _trace_once(run: Path) -> None:
    """Let the forks of this process find the model traced."""
    model, recipe, tokenizer, _ = load_run(run)
    samples = samples_of(
        open_dataset(recipe, tokenizer), recipe.model.window, recipe.model.target_window
    )
    traced = trace(model, samples.draw(2, 3), samples.draw(3, 5))
    mock.patch("export.run.trace", lambda *_: traced).start()


def _export_command(run: Path, target: Path) -> list[str]:
    steps = ",".join(map(str, _STEPS))
    options = ["--out", str(target), "--steps", steps, "--samples", str(_SAMPLES)]
    return ["-m", "export", "export", str(run), *options]


def _check_export(
    out: Path, target: Path, there: bool, answer: str, opener: BundleOpener, found: Found
) -> None:
    if target.exists():
        found.expect(_opened(opener, target) == answer, "the bundle is no good")
        found.seen["with a whole bundle"] += 1
    else:
        found.expect(not there, "the bundle that was there before is gone")
        found.seen["without a bundle"] += 1
    for left in (path for path in out.iterdir() if path != target):
        found.expect(left.name.startswith("."), f"{left.name} can be seen")
        # A trial is sealed with figures that are not measured yet, and is never given out.
        if (left / MANIFEST_FILE).exists() and ".trial." not in left.name:
            taken = _opened(opener, left)
            found.expect(taken in (answer, None), "half a bundle is taken for one")
        found.seen["hidden folders, which the next one removes"] += 1


def _opened(opener: BundleOpener, folder: Path) -> str | None:
    """What a server would answer with; None if it refuses the folder."""
    came = opener.open(folder)
    if came["outcome"] == "refused":
        return None
    return str(came.get("answer", came["outcome"]))


NAME = "kills"
KILLS, QUICK_KILLS = 100, 3
KINDS = ("server", "export", "training")


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--kills", type=int, default=None, help=f"of each kind (default: {KILLS})")
    made.add_argument("--only", choices=KINDS, help="kill this kind alone")
    parsed = made.parse_args(arguments)
    kills = parsed.kills or (QUICK_KILLS if parsed.quick else KILLS)
    kinds = (parsed.only,) if parsed.only else KINDS
    name = f"{NAME}_{parsed.only}" if parsed.only else NAME
    made_of = partial(measure, options(parsed), kinds, kills, name)
    return run(NAME, arguments, parsed, made_of)


def measure(
    chosen: Options,
    kinds: Sequence[str],
    kills: int,
    name: str,
    provenance: Provenance,
) -> Result:
    torch.set_num_threads(1)  # threads would not be there in the forks
    found = []
    with tempfile.TemporaryDirectory() as kept:
        for kind in kinds:
            folder = Path(kept) / kind
            folder.mkdir()
            found.append(_killed(kind, chosen, folder, kills))
            for problem in found[-1].problems[:5]:
                print(problem, file=sys.stderr, flush=True)
    rows: list[Sequence[Cell]] = []
    for one in found:
        rows.append([one.name, "kills", one.kills])
        rows += [["", what, count] for what, count in one.seen.items()]
        rows.append(["", "seconds", one.seconds])
    return provenance.result(
        name,
        f"Killed at random moments: {', '.join(kinds)}",
        "`kill -9`, at a moment drawn evenly over all that each does. Servers are asked by six "
        "clients, a third of them swap a model meanwhile, and start again on the same port. A "
        f"training writes a checkpoint after each iteration. One export or training in "
        f"{COMMAND_EVERY} is the whole command; the others are forks that begin when the modules "
        "are loaded and, of exports, the model is traced.",
        [Table("", ("killed", "what came of it", "times"), rows)],
        [
            target
            for one in found
            for target in (
                Target(f"{one.name}: kills", one.kills, ">=", kills),
                Target(
                    f"{one.name}: lost, wrong, incomplete or left behind",
                    len(one.problems),
                    "==",
                    0,
                ),
            )
        ],
    )


def _killed(kind: str, chosen: Options, folder: Path, kills: int) -> Found:
    if kind == "export":
        return kill_exports(folder, kills)
    if kind == "training":
        return kill_trainings(folder, kills)
    models = [chosen.read("classify")[0], chosen.read("generate")[0]]
    return kill_servers(models, folder, kills)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
