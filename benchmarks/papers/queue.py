"""Trains and measures the runs of a plan, one after another or several at once, until all are kept.

    python -m benchmarks.papers.queue run --runs RUNS --data DATA [--workers 2] [--threads 1]
    python -m benchmarks.papers.queue status|pause|resume --runs RUNS

Everything it knows is in files, so it may be killed at any moment and started again: a run is done
when its figures are in `measured`, and a training goes on from its own checkpoint. Several queues
may share a folder of runs: each run is claimed by a lock. While trainings run, the machine is
marked as busy (benchmarks/lab.py), and no benchmark measures beside them unless it is told to;
`pause` stops them where they are, and the mark goes.

Every process it starts is a session of its own at the lowest priority. Where Linux groups
processes by session, niceness only counts within a group, so the group steps back as well.
Ctrl-C lets trainings leave a checkpoint; a second one ends them at once, as a kill of the queue
does: what they did since their last checkpoint is done again.
"""

import argparse
import ctypes
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from benchmarks.lab import ROOT, Busy
from benchmarks.papers.measured import FOLDER, Measured, counts_of
from train.interrupt import reader_gone
from train.metrics import METRICS, read_metrics
from train.recipe import Recipe, RecipeError, load_recipe, recipe_from

PLAN = Path(__file__).parent / "plan.toml"
ATTEMPTS = 3  # of a run that fails; then it is left out, and `status` says so
POLL_S = 0.5
_SHARED_KEYS = {"steps", "data", "bleu"}  # of an experiment, and of each of its runs
_RUN_KEYS = {"group", "recipe", "set"} | _SHARED_KEYS
_MEASURING = "a benchmark measures on this machine: trainings go on when it has ended"
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_GROUP = Path("/proc/self/autogroup")
_GROUP_TRIES = 50  # Linux takes one write in a tenth of a second from all who are not root


@dataclass(frozen=True, slots=True)
class Job:
    """One training with one seed, and how it is measured."""

    group: str
    recipe: str
    seed: int
    overrides: tuple[str, ...] = ()
    data: str = ""  # a folder or file below --data
    steps: str = "1,2,4,8"
    bleu: bool = False

    @property
    def name(self) -> str:
        return f"{self.group}-{self.seed}"

    @property
    def settings(self) -> list[str]:
        return [*self.overrides, f"run.seed={self.seed}"]

    def described(self) -> Recipe:
        return load_recipe(self.recipe, self.settings)


@dataclass(frozen=True, slots=True)
class Place:
    """Where runs, data and figures are."""

    runs: Path
    data: Path = Path()
    results: Path = FOLDER

    def run(self, job: Job) -> Path:
        return self.runs / job.name

    def log(self, job: Job) -> Path:
        return self.runs / f"{job.name}.log"

    def failed_at(self, job: Job) -> Path:
        return self.runs / f"{job.name}.failures"

    def failures(self, job: Job) -> int:
        path = self.failed_at(job)
        return len(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else 0

    def failed(self, job: Job, why: str) -> None:
        with self.failed_at(job).open("a", encoding="utf-8") as file:
            file.write(f"{why}\n")

    def kept(self, job: Job) -> bool:
        """Whether its figures are there; those of another recipe under its name are refused."""
        path = self.results / f"{job.name}.json"
        if not path.is_file():
            return False
        measured = Measured.read(path)
        found = recipe_from(dict(measured.recipe), str(path))
        if meaning_of(found) != meaning_of(job.described()):
            raise RecipeError(f"{path} is of another recipe than the plan's {job.name}: rename one")
        wanted = [] if found.model.depth == "discrete" else counts_of(job.steps, found)
        counts = {point.steps for point in measured.points}
        return counts.issuperset(wanted) and (bool(measured.bleu) or not job.bleu)

    def claim(self, job: Job) -> IO[str] | None:
        """A lock that goes with this process, or None if another queue has it."""
        file = (self.runs / f".{job.name}.claim").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        return file


def meaning_of(recipe: Recipe) -> dict[str, Any]:
    """What makes two runs the same: not the machine, where the data is, or the words about it."""
    plain = replace(recipe, data=replace(recipe.data, path=""), title="", card={}).to_json()
    plain["run"] = {"seed": recipe.run.seed, "keep": recipe.run.keep}
    return plain


def read_plan(path: Path) -> list[Job]:
    """The jobs in their order: of an experiment, one seed of every run, then the next seed."""
    jobs: list[Job] = []
    for experiment in tomllib.loads(path.read_text(encoding="utf-8"))["experiment"]:
        if unknown := set(experiment) - _SHARED_KEYS - {"seeds", "run"}:
            raise ValueError(f"{path}: unknown key {min(unknown)!r} of an experiment")
        shared = {key: experiment[key] for key in _SHARED_KEYS if key in experiment}
        for seed in experiment["seeds"]:
            for run in experiment["run"]:
                if unknown := set(run) - _RUN_KEYS:
                    raise ValueError(f"{path}: unknown key {min(unknown)!r} of {run['group']}")
                settings = {**shared, **run}
                overrides = tuple(settings.pop("set", ()))
                job = Job(seed=seed, overrides=overrides, **settings)
                job.described()  # a fault of the plan shows at once
                jobs.append(job)
    names = [job.name for job in jobs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{path}: {min(twice)} is there twice")
    return jobs


class Worker:
    """One job at work: its training, then its measurement, each a process that dies with us."""

    def __init__(
        self, job: Job, claim: IO[str], place: Place, threads: int, niceness: int, gpu: str
    ) -> None:
        self.job, self.claim, self.place = job, claim, place
        self.threads, self.niceness, self.gpu = threads, niceness, gpu
        self.left = [self._train(), self._measure()]
        self.stopped = False
        self._next()

    def _train(self) -> list[str]:
        job, place = self.job, self.place
        command = [sys.executable, "-m", "train", "train", job.recipe, "--out", str(place.run(job))]
        command += ["--device", "cuda" if self.gpu else "cpu"]
        if job.data:
            command += ["--data", str(place.data / job.data)]
        for one in (*job.settings, f"run.threads={self.threads}"):
            command += ["--set", one]
        return command

    def _measure(self) -> list[str]:
        job, place = self.job, self.place
        command = [sys.executable, "-m", "benchmarks.papers.measure", str(place.run(job))]
        command += ["--group", job.group, "--steps", job.steps, "--results", str(place.results)]
        if job.data:
            command += ["--data", str(place.data / job.data)]
        return command + (["--bleu"] if job.bleu else [])

    def _next(self) -> None:
        command = self.left.pop(0)
        threads = str(self.threads)
        env = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if self.gpu:
            env["CUDA_VISIBLE_DEVICES"] = self.gpu
        with self.place.log(self.job).open("ab") as log:
            log.write(f"\n$ {shlex.join(command)}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
                preexec_fn=partial(_settle, self.niceness, os.getpid()),
            )

    def ended(self) -> bool:
        """Go on with what is next; whether there is nothing more to do."""
        code = self.process.poll()
        if code is None:
            return False
        if code == 0 and self.left:
            self._next()
            return False
        if code:
            self.place.failed(self.job, f"{time.strftime('%F %T')} ended with {code}")
        self.claim.close()
        return True

    def stop(self, stopped: bool) -> None:
        """Halt it where it is, or let it go on."""
        if stopped != self.stopped:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.process.pid, signal.SIGSTOP if stopped else signal.SIGCONT)
            self.stopped = stopped

    def ask_to_end(self) -> None:
        """A training leaves a checkpoint then."""
        self.stop(False)
        self.process.terminate()

    def wait(self) -> None:
        self.process.wait()
        self.claim.close()


def _settle(niceness: int, queue: int) -> None:
    """In a new process before it becomes a training: step back, and die with the queue.

    A training that outlived its queue would be started a second time by the next one.
    """
    os.nice(niceness)
    with suppress(OSError):  # not every Linux groups by session
        _step_back(niceness)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != queue:  # it died before that was asked
            os._exit(1)


def _step_back(niceness: int) -> None:
    """The whole session; `nice` alone orders only the processes within it."""
    for left in reversed(range(_GROUP_TRIES)):
        try:
            _GROUP.write_text(f"{niceness}\n", encoding="ascii")
            return
        except BlockingIOError:
            if not left:
                raise
            time.sleep(0.1)


class Queue:
    def __init__(
        self, jobs: Sequence[Job], place: Place, start: Callable[[Job, IO[str], str], Worker]
    ) -> None:
        self.jobs, self.place, self.start = jobs, place, start
        self.workers: dict[str, Worker] = {}  # by slot
        self.done: set[str] = set()  # what was seen to be kept is not read again

    def run(self, slots: Sequence[str], asked: Callable[[], bool]) -> None:
        """Until all is done or failed, or until it is asked to end; a slot is the GPU it has."""
        busy, told = Busy(), False
        try:
            while not asked():
                halted = busy.paused or not busy.mark()
                if halted and not told:
                    why = "paused: `resume` lets trainings go on" if busy.paused else _MEASURING
                    print(f"{time.strftime('%F %T')} {why}", flush=True)
                told = halted
                for worker in self.workers.values():
                    worker.stop(halted)
                if halted:
                    busy.unmark()
                else:
                    self._advance(slots)
                    if not self.workers:
                        return
                time.sleep(POLL_S)
        finally:
            for worker in self.workers.values():
                worker.ask_to_end()
            for worker in self.workers.values():
                worker.wait()
            busy.unmark()

    def _advance(self, slots: Sequence[str]) -> None:
        for slot, worker in list(self.workers.items()):
            if worker.ended():
                del self.workers[slot]
        for slot in slots:
            if slot not in self.workers:
                for job in self.waiting():
                    claim = self.place.claim(job)
                    if claim is not None and self._is_done(job):  # another queue has just done it
                        claim.close()
                    elif claim is not None:
                        print(f"{time.strftime('%F %T')} {job.name}", flush=True)
                        self.workers[slot] = self.start(job, claim, slot.partition(":")[2])
                        break

    def waiting(self) -> Iterator[Job]:
        at_work = {worker.job.name for worker in self.workers.values()}
        for job in self.jobs:
            if job.name in at_work or self.place.failures(job) >= ATTEMPTS:
                continue
            if job.name not in self.done and not self._is_done(job):
                yield job

    def _is_done(self, job: Job) -> bool:
        if self.place.kept(job):
            self.done.add(job.name)
        return job.name in self.done


def state(job: Job, place: Place) -> str:
    """In words: what there is of a job."""
    if place.kept(job):
        return "done"
    records = read_metrics(place.run(job) / METRICS)
    total = job.described().optim.iterations
    reached = f"{records[-1]['iteration']:,} of {total:,} iterations" if records else "not begun"
    failures = place.failures(job)
    if failures >= ATTEMPTS:
        left = f"left out after {failures} failures, {reached}: see {place.log(job).name}"
        return f"{left}; delete {place.failed_at(job).name} to try it again"
    claim = place.claim(job) if place.runs.is_dir() else None
    if claim is None and place.runs.is_dir():
        return f"{'paused' if Busy().paused else 'running'}, {reached}"
    if claim is not None:
        claim.close()
    return f"waiting, {reached}" + (f", failed {failures} times" if failures else "")


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    busy = Busy()
    if parsed.do in ("pause", "resume"):
        busy.pause(parsed.do == "pause")
        print("paused: trainings halt within a second" if busy.paused else "trainings go on")
        return 0
    jobs = read_plan(parsed.plan)
    groups = {job.group for job in jobs}
    if unknown := set(parsed.only or groups) - groups:
        raise SystemExit(f"--only {min(unknown)}: {parsed.plan} has no such run")
    jobs = [job for job in jobs if job.group in (parsed.only or groups)]
    place = Place(parsed.runs.resolve(), parsed.data.resolve(), parsed.results.resolve())
    if parsed.do == "status":
        width = max(len(job.name) for job in jobs)
        for job in jobs:
            print(f"{job.name:<{width}}  {state(job, place)}")
        print(f"{sum(place.kept(job) for job in jobs):,} of {len(jobs):,} are measured")
        return 0
    place.runs.mkdir(parents=True, exist_ok=True)
    ending: list[int] = []

    def asked(number: int, _: object) -> None:
        if ending:  # again: trainings go with this process, without a checkpoint
            raise KeyboardInterrupt
        ending.append(number)

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) != signal.SIG_IGN:  # as SIGHUP by `nohup`
            signal.signal(each, asked)
    gpus = parsed.gpus.split(",") if parsed.gpus else []
    slots = [f"{i}:{gpu}" for i, gpu in enumerate(gpus)] or [f"{i}:" for i in range(parsed.workers)]

    def start(job: Job, claim: IO[str], gpu: str) -> Worker:
        return Worker(job, claim, place, parsed.threads, parsed.nice, gpu)

    queue = Queue(jobs, place, start)
    try:
        queue.run(slots, lambda: bool(ending))
    except KeyboardInterrupt:
        return 130
    left = [job.name for job in jobs if not place.kept(job)]
    if ending:
        print(f"{len(left):,} of {len(jobs):,} are left: the same command goes on with them")
        return 0
    print(f"left: {', '.join(left)}" if left else "everything is measured")
    return 1 if left else 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("do", choices=("run", "status", "pause", "resume"))
    made.add_argument("--plan", type=Path, default=PLAN, help="what to run (default: plan.toml)")
    made.add_argument("--only", nargs="+", metavar="RUN", help="these of the plan, all their seeds")
    made.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    made.add_argument("--data", type=Path, default=Path(), help="folder of the data sets")
    made.add_argument("--results", type=Path, default=FOLDER, help="where figures are kept")
    made.add_argument("--workers", type=int, default=1, help="trainings at once (default 1)")
    made.add_argument("--threads", type=int, default=1, help="of each training (default 1)")
    made.add_argument("--nice", type=int, default=19, help="how far to step back (default 19)")
    made.add_argument("--gpus", default="", metavar="0,1", help="one training on each of these")
    return made


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:
        sys.exit(reader_gone())
    except (ValueError, OSError) as error:
        sys.exit(f"benchmarks.papers.queue: {error}")
