"""The queue of trainings: its plan, what it resumes, and that benchmarks do not run beside it."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks import run as runner
from benchmarks.lab import FOLDER, ROOT, Busy, quiet_machine
from benchmarks.papers import queue as papers_queue
from benchmarks.papers.measured import Measured
from benchmarks.papers.queue import PLAN, Job, Place, main, read_plan, state
from tests.waiting import wait_until
from train.checkpoint import load_run
from train.metrics import read_metrics
from train.recipe import RecipeError, load_recipe

pytestmark = pytest.mark.long
SMALL = [
    *("data.rows=400", "model.width=16", "model.hidden=32", "model.heads=2", "optim.batch=8"),
    *("steps.full=2", "steps.short=[1]", "run.checkpoint_every=5", "run.evaluate_every=20"),
]


def plan(folder: Path, iterations: int, seeds: str = "[0, 1]") -> Path:
    path = folder / "plan.toml"
    settings = json.dumps([*SMALL, f"optim.iterations={iterations}"])
    path.write_text(
        f"""
[[experiment]]
seeds = {seeds}
steps = "1,2"
[[experiment.run]]
group = "tiny"
recipe = "parity"
set = {settings}
[[experiment.run]]
group = "tiny-lambda0"
recipe = "parity"
set = {settings[:-1]}, "optim.transport=0"]
""",
        encoding="utf-8",
    )
    return path


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A command line, with files and marks of its own."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "kept")]

    def made(do: str, path: Path, *more: str) -> list[str]:
        return [do, "--plan", str(path), *folders, *more]

    return made


until = partial(wait_until, most_s=180)  # a training has to begin, at the lowest priority


def started(arguments: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.papers.queue", *arguments]
    return subprocess.Popen(command, cwd=ROOT)


def test_one_seed_of_every_run_comes_before_the_next_seed(tmp_path: Path) -> None:
    jobs = read_plan(plan(tmp_path, 20))
    assert [job.name for job in jobs] == ["tiny-0", "tiny-lambda0-0", "tiny-1", "tiny-lambda0-1"]
    assert jobs[1].overrides[-1] == "optim.transport=0" and jobs[1].steps == "1,2"
    assert jobs[2].described().run.seed == 1


def test_the_shipped_plan_is_of_recipes_that_load() -> None:
    jobs = read_plan(PLAN)
    assert len(jobs) > 50
    place = Place(Path("nowhere"))
    for job in jobs:
        place.kept(job)  # what is kept under its name is of its recipe


def test_faults_of_a_plan_are_named(tmp_path: Path) -> None:
    path = plan(tmp_path, 20)
    text = path.read_text()
    path.write_text(text.replace("parity", "pariti", 1))
    with pytest.raises(RecipeError, match="pariti"):
        read_plan(path)
    path.write_text(text.replace('group = "tiny-lambda0"', 'group = "tiny"'))
    with pytest.raises(ValueError, match="tiny-0 is there twice"):
        read_plan(path)
    path.write_text(text + 'colour = "red"\n')
    with pytest.raises(ValueError, match="unknown key 'colour' of tiny-lambda0"):
        read_plan(path)
    path.write_text(text.replace("seeds =", 'method = "all"\nseeds =', 1))
    with pytest.raises(ValueError, match="unknown key 'method' of an experiment"):
        read_plan(path)


def test_some_runs_of_a_plan_may_be_named(
    tmp_path: Path, arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan(tmp_path, 20)
    assert main(arguments("status", path, "--only", "tiny-lambda0")) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[:-1]] == ["tiny-lambda0-0", "tiny-lambda0-1"]
    assert said[-1] == "0 of 2 are measured"
    with pytest.raises(SystemExit, match=r"--only huge: .* has no such run"):
        main(arguments("status", path, "--only", "tiny", "huge"))


def test_a_killed_queue_takes_its_trainings_along_and_goes_on(
    tmp_path: Path, arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan(tmp_path, 200, "[0]")
    first = started(arguments("run", path, "--nice", "0"))
    metrics = tmp_path / "runs" / "tiny-0" / "metrics.jsonl"
    until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 1)
    assert main(arguments("status", path)) == 0
    assert "tiny-0          running, " in capsys.readouterr().out
    first.send_signal(signal.SIGKILL)
    first.wait()
    lock = tmp_path / "runs" / "tiny-0" / ".lock"
    take = ["flock", "-n", str(lock), "true"]
    until(lambda: subprocess.run(take, check=False).returncode == 0)
    main(arguments("status", path))
    assert "tiny-0          waiting, " in capsys.readouterr().out

    second = started(arguments("run", path, "--workers", "2", "--nice", "0"))
    assert second.wait(timeout=300) == 0
    kept = {one.name: one for one in map(Measured.read, (tmp_path / "kept").glob("*.json"))}
    assert set(kept) == {"tiny-0", "tiny-lambda0-0"}
    assert kept["tiny-0"].iterations == 200
    assert kept["tiny-lambda0-0"].recipe["optim"]["transport"] == 0
    log = (tmp_path / "runs" / "tiny-0.log").read_text()
    assert log.count("train train parity") == 2 and log.count("papers.measure") == 1
    main(arguments("status", path))
    assert capsys.readouterr().out.count("  done\n") == 2


@pytest.fixture
def training(tmp_path: Path, arguments: Callable[..., list[str]]) -> Iterator[tuple[int, int]]:
    """The process of a queue, and that of its training after a few checkpoints."""
    queue = started(arguments("run", plan(tmp_path, 100_000, "[0]"), "--nice", "0"))
    try:
        metrics = tmp_path / "runs" / "tiny-0" / "metrics.jsonl"
        until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 1)
        yield queue.pid, int(children(queue.pid))
    finally:
        queue.kill()
        queue.wait()


def children(process: int) -> str:
    return Path(f"/proc/{process}/task/{process}/children").read_text()


def is_over(process: int) -> bool:
    """It has ended, whether or not somebody asked how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_training_steps_back_with_its_whole_session(
    tmp_path: Path, arguments: Callable[..., list[str]]
) -> None:
    queue = started(arguments("run", plan(tmp_path, 100_000, "[0]")))
    try:
        until(lambda: bool(children(queue.pid)))
        process = int(children(queue.pid))
        until(lambda: os.getpriority(os.PRIO_PROCESS, process) == 19)
        assert os.getsid(process) == process != os.getsid(queue.pid)
        group = Path(f"/proc/{process}/autogroup")
        if group.is_file():
            until(lambda: group.read_text().endswith(" nice 19\n"))
            assert group.read_text() != Path(f"/proc/{queue.pid}/autogroup").read_text()
    finally:
        queue.kill()
        queue.wait()


def test_ctrl_c_lets_the_training_leave_a_checkpoint(
    tmp_path: Path, training: tuple[int, int]
) -> None:
    queue, process = training
    os.kill(queue, signal.SIGINT)
    until(lambda: is_over(process) and is_over(queue))
    facts = load_run(tmp_path / "runs" / "tiny-0").facts
    records = read_metrics(tmp_path / "runs" / "tiny-0" / "metrics.jsonl")
    assert facts["iteration"] >= records[-1]["iteration"]
    assert not list((tmp_path / "runs").glob("*.failures"))


def test_no_training_outlives_a_killed_queue(training: tuple[int, int]) -> None:
    queue, process = training
    os.kill(process, signal.SIGSTOP)  # not even one that cannot answer
    os.kill(queue, signal.SIGKILL)
    until(lambda: is_over(process), most_s=5)


def test_a_second_ctrl_c_does_not_wait(training: tuple[int, int]) -> None:
    queue, process = training
    os.kill(process, signal.SIGSTOP)  # one that never leaves a checkpoint
    for _ in range(2):
        os.kill(queue, signal.SIGINT)
        time.sleep(1)
    until(lambda: is_over(process) and is_over(queue), most_s=5)


def test_a_new_process_whose_queue_died_meanwhile_ends(tmp_path: Path) -> None:
    code = "from benchmarks.papers.queue import _settle; _settle(0, 1 << 30); print('still here')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_a_group_is_written_again_when_linux_is_asked_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals = [BlockingIOError(), BlockingIOError()]
    written = []

    class Group:
        def write_text(self, text: str, encoding: str) -> None:
            if refusals:
                raise refusals.pop()
            written.append(text)

    monkeypatch.setattr(papers_queue, "_GROUP", Group())
    monkeypatch.setattr(time, "sleep", lambda _: None)
    papers_queue._step_back(19)
    assert written == ["19\n"]


def test_a_pause_halts_the_training_and_lets_benchmarks_run(
    tmp_path: Path, arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan(tmp_path, 100_000, "[0]")
    queue = started(arguments("run", path, "--nice", "0"))
    metrics = tmp_path / "runs" / "tiny-0" / "metrics.jsonl"

    def lines() -> int:
        return metrics.read_text().count("\n") if metrics.is_file() else 0

    try:
        until(lambda: lines() > 1)
        with pytest.raises(SystemExit, match="trainings run on this machine"):
            runner.main(["queueing"])
        with quiet_machine(beside=True):
            assert "WARNING: trainings run" in capsys.readouterr().err
        main(arguments("pause", path))
        until(free)
        with quiet_machine(beside=False):  # what a benchmark holds while it measures
            at = lines()
            main(arguments("resume", path))
            time.sleep(1.5)
            assert lines() <= at + 1  # one more may have been on its way
        until(lambda: lines() > at + 1)
        queue.send_signal(signal.SIGTERM)
        assert queue.wait(60) == 0
        assert main(arguments("status", path)) == 0
        said = capsys.readouterr().out
        assert "tiny-0          waiting, " in said and said.endswith("\n0 of 2 are measured\n")
        assert free()
    finally:
        queue.kill()
        queue.wait()


def free() -> bool:
    try:
        with quiet_machine(beside=False):
            return True
    except SystemExit:
        return False


def test_what_fails_three_times_is_left_out_and_said(
    tmp_path: Path, arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan(tmp_path, 20, "[0]")
    path.write_text(
        path.read_text().replace("[[experiment.run]]", "data = 'x'\n[[experiment.run]]", 1)
    )
    assert main(arguments("run", path, "--nice", "0")) == 1
    assert "left: tiny-0, tiny-lambda0-0" in capsys.readouterr().out
    job = read_plan(path)[0]
    assert state(job, Place(tmp_path / "runs", results=tmp_path / "kept")).startswith(
        "left out after 3 failures, not begun: see tiny-0.log; delete tiny-0.failures to try it"
    )
    assert "makes its own data" in (tmp_path / "runs" / "tiny-0.log").read_text()


def test_under_nohup_a_queue_goes_on_when_its_terminal_is_gone(
    tmp_path: Path, arguments: Callable[..., list[str]]
) -> None:
    code = (
        "import signal, sys; from benchmarks.papers import queue\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "def run(self, slots, asked): signal.raise_signal(signal.SIGHUP); print(asked())\n"
        "queue.Queue.run = run; queue.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, *arguments("run", plan(tmp_path, 5))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False\nleft: ")


def test_two_queues_do_not_train_the_same_run(tmp_path: Path) -> None:
    place, job = Place(tmp_path), Job("tiny", "parity", 0)
    claim = place.claim(job)
    assert claim is not None and place.claim(job) is None
    claim.close()
    again = place.claim(job)
    assert again is not None
    again.close()


def test_figures_of_another_recipe_under_the_same_name_are_refused(tmp_path: Path) -> None:
    kept = ROOT / "benchmarks" / "papers" / "measured" / "mnist-any-0.json"
    record = json.loads(kept.read_text(encoding="utf-8"))
    record["recipe"] = load_recipe("mnist-any", ["run.seed=0", "run.threads=2"]).to_json()
    (tmp_path / "mnist-any-0.json").write_text(json.dumps(record))
    place = Place(tmp_path, results=tmp_path)
    assert place.kept(Job("mnist-any", "mnist-any", 0))
    assert not place.kept(Job("mnist-any", "mnist-any", 0, steps="1,3"))  # not measured at 3
    record["points"] = [point for point in record["points"] if point["steps"] != 8]
    (tmp_path / "mnist-any-0.json").write_text(json.dumps(record))
    assert not place.kept(Job("mnist-any", "mnist-any", 0, steps="1,4"))  # trained at 8
    for other in ("optim.lr=0.1", "run.keep=best"):
        with pytest.raises(RecipeError, match="another recipe than the plan's mnist-any-0"):
            place.kept(Job("mnist-any", "mnist-any", 0, (other,)))


def test_what_another_queue_has_just_done_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, started = iter([False, True]), []
    monkeypatch.setattr(Place, "kept", lambda self, job: next(done, True))

    def start(job: Job, claim: object, gpu: str) -> papers_queue.Worker:
        started.append(job)
        raise AssertionError

    queue = papers_queue.Queue([Job("tiny", "parity", 0)], Place(tmp_path), start)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    queue.run(["0:"], lambda: False)
    assert not started


def test_the_mark_may_be_a_file_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert free()
    opened = os.open

    def only_read(path: Path, flags: int, *others: int) -> int:
        if flags & (os.O_RDWR | os.O_CREAT):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, flags, *others)

    monkeypatch.setattr(os, "open", only_read)
    one = Busy()
    assert one.mark() and not free()
    one.unmark()
    assert free()


def test_the_mark_is_the_machines_and_goes_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    one, other = Busy(), Busy()
    assert one.mark() and other.mark() and not free()
    one.unmark()
    assert not free()
    other.unmark()
    assert free()
    code = "from benchmarks.lab import Busy; import os; b = Busy(); assert b.mark(); os._exit(9)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, env=dict(os.environ))
    assert free()
