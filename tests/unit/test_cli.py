"""The dispatcher: what it forwards, to whom, and what it says when it cannot."""

import gzip
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import stepdial

ROOT = Path(__file__).parents[2]


class Entry(ModuleType):
    """A package's `__main__` that notes what it was called with."""

    def __init__(self, outcome: Callable[[], int]) -> None:
        super().__init__("entry")
        self.seen: list[list[str]] = []
        self._outcome = outcome

    def main(self, argv: list[str]) -> int:
        self.seen.append(argv)
        return self._outcome()


def plant(monkeypatch: pytest.MonkeyPatch, package: str, outcome: Callable[[], int]) -> Entry:
    entry = Entry(outcome)
    monkeypatch.setitem(sys.modules, f"{package}.__main__", entry)
    return entry


def raising(error: BaseException) -> Callable[[], int]:
    def outcome() -> int:
        raise error

    return outcome


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert stepdial.main(argv) == 0
    printed = capsys.readouterr().out
    for name in [*stepdial.COMMANDS, "demo"]:
        assert f"\n  {name} " in printed


def test_without_a_command_it_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert stepdial.main([]) == 2
    assert "usage: stepdial COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("line", [["recipes"], ["inspect", str(ROOT / "zoo/digits")]])
def test_a_closed_output_is_no_failure(line: list[str]) -> None:
    command = shlex.join([sys.executable, "-m", "stepdial", *line])
    ended = subprocess.run(f"{command} >&-", shell=True, cwd=ROOT, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert stepdial.main(["--version"]) == 0
    assert capsys.readouterr().out == f"stepdial {stepdial.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "meant"), [("serv", "serve"), ("evalute", "evaluate"), ("dmeo", "demo")]
)
def test_a_misspelt_command_is_suggested(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stepdial.main([typed]) == 2
    assert f"Did you mean `stepdial {meant}`?" in capsys.readouterr().err


def test_an_unlike_command_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert stepdial.main(["xyzzy"]) == 2
    printed = capsys.readouterr().err
    assert "no command 'xyzzy'" in printed
    assert "Did you mean" not in printed


@pytest.mark.parametrize("name", stepdial.COMMANDS)
def test_every_command_has_a_package_that_owns_it(name: str) -> None:
    package = stepdial.COMMANDS[name].package
    assert importlib.util.find_spec(f"{package}.__main__") is not None


def test_a_package_with_several_commands_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = plant(monkeypatch, "train", lambda: 3)
    assert stepdial.main(["evaluate", "runs/x", "--steps", "1,2"]) == 3
    assert entry.seen == [["evaluate", "runs/x", "--steps", "1,2"]]


def test_a_reader_who_has_gone_ends_a_command_without_a_word(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = ["export", "inspect", str(ROOT / "zoo" / "topics"), "--plot", str(tmp_path / "x.svg")]
    ended = subprocess.run(
        [sys.executable, "-m", *command], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_evaluating_a_bundle_is_for_export_and_a_run_for_train(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train, export = (plant(monkeypatch, package, lambda: 0) for package in ("train", "export"))
    stepdial.main(["evaluate", str(tmp_path), "--steps", "1"])
    (tmp_path / "manifest.json").touch()
    stepdial.main(["evaluate", str(tmp_path), "--steps", "2"])
    assert train.seen == [["evaluate", str(tmp_path), "--steps", "1"]]
    assert export.seen == [["evaluate", str(tmp_path), "--steps", "2"]]


def test_a_package_with_one_command_gets_only_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = plant(monkeypatch, "serve", lambda: 0)
    assert stepdial.main(["serve", "--port", "1"]) == 0
    assert entry.seen == [["--port", "1"]]


def test_demo_serves_the_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = plant(monkeypatch, "serve", lambda: 0)
    assert stepdial.main(["demo", "--port", "8123"]) == 0
    assert entry.seen == [["--host", "127.0.0.1", "--port", "8123"]]


def test_demo_stops_at_the_first_stage_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = plant(monkeypatch, "serve", lambda: 0)
    ran: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        ran.append(command[3:])
        return subprocess.CompletedProcess(command, returncode=len(ran) - 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert stepdial.main(["demo", "--train", "--recipe", "parity"]) == 1
    assert [stage[0] for stage in ran] == ["train", "evaluate"]
    assert entry.seen == []
    assert "`stepdial evaluate` failed" in capsys.readouterr().err


def test_a_missing_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = ModuleNotFoundError("No module named 'onnx.helper'", name="onnx.helper")
    plant(monkeypatch, "export", raising(missing))
    # In the source, beside it, and where an installed package has no source.
    for folder, source, command in (
        (ROOT, ROOT, "pip install -e '.[train,export,serve]'"),
        (tmp_path, ROOT, f"pip install -e '{ROOT}[train,export,serve]'"),
        (tmp_path, tmp_path, "pip install 'stepdial[train,export,serve]'"),
    ):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(stepdial.OwnPackages, "folder", str(source))
        assert stepdial.main(["export", "runs/x"]) == 1
        printed = capsys.readouterr().err
        assert "(first: onnx)" in printed
        assert command in printed
        assert printed.count("\n") == 1


def test_our_own_missing_module_is_a_bug_and_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, "train", raising(ModuleNotFoundError("gone", name="train.gone")))
    with pytest.raises(ModuleNotFoundError, match="gone"):
        stepdial.main(["train"])


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "train", raising(KeyboardInterrupt()))
    assert stepdial.main(["train"]) == 130


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("train", ["parity"]),
        ("evaluate", ["runs/x"]),
        ("export", ["runs/x"]),
        ("calibrate", ["zoo/x"]),
        ("serve", []),
        ("loadtest", []),
    ],
)
def test_on_a_bare_python_every_command_names_its_extra(command: str, arguments: list[str]) -> None:
    # -S leaves out site-packages: the interpreter of somebody who has installed nothing yet.
    done = subprocess.run(
        [sys.executable, "-S", "-m", "stepdial", command, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert f"pip install -e '.[{stepdial.COMMANDS[command].extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_imports_none_of_the_packages() -> None:
    code = (
        "import sys, stepdial; stepdial.main(['--help']);"
        "loaded = {'train', 'export', 'serve', 'loadtest', 'torch'} & set(sys.modules);"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


COMMANDS = [[name] for name in (*stepdial.COMMANDS, "demo")] + [["loadtest", "compare"]]


def run_python(code: str, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        **{"cwd": ROOT, **how},
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    heavy = ["torch", "onnx", "onnxruntime", "fastapi", "numpy", "tokenizers", "locust", "gevent"]
    code = (
        "import sys, stepdial\n"
        "try: stepdial.main([*sys.argv[1:], '--help'])\n"
        f"finally: print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = run_python(code, *command)
    assert done.returncode == 0 and done.stdout.startswith("usage: stepdial")
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("name", ["train", "serve", "export", "loadtest"])
def test_a_file_of_the_name_of_a_package_is_not_taken_for_it(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("raise SystemExit('this is the wrong file')\n")
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong folder')\n")
    # As a user has it: the working folder comes first, the installed code behind it.
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    for command in ("train", "inspect", "serve", "predict", "loadtest"):
        done = subprocess.run(
            [sys.executable, "-m", "stepdial", command, "--help"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert f"usage: stepdial {command}" in done.stdout


def test_demo_says_where_the_zoo_is_when_there_is_none(tmp_path: Path) -> None:
    copied = tmp_path / "site"
    copied.mkdir()
    shutil.copy(ROOT / "stepdial.py", copied)
    done = subprocess.run(
        [sys.executable, "-m", "stepdial", "demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(copied)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "Run it in a copy of the source" in done.stderr
    assert "STEPDIAL_ZOO=FOLDER" in done.stderr


def test_demo_finds_the_zoo_of_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = plant(monkeypatch, "serve", lambda: 0)
    monkeypatch.setattr(stepdial.OwnPackages, "folder", str(tmp_path / "site-packages"))
    (tmp_path / "zoo" / "tiny").mkdir(parents=True)
    (tmp_path / "zoo" / "tiny" / "manifest.json").touch()
    monkeypatch.chdir(tmp_path)
    assert stepdial.main(["demo"]) == 0
    assert entry.seen == [["--zoo", "zoo", "--host", "127.0.0.1", "--port", "8000"]]


# Where only the server is installed: what training, export and drawing need cannot be imported.
SERVER_ONLY = """
import importlib.metadata, importlib.util, sys
ABSENT = {'torch', 'onnx', 'onnxscript', 'lightning_fabric', 'matplotlib', 'safetensors',
          'tensorboard', 'torchdiffeq', 'tqdm', 'sacrebleu', 'rouge_score', 'transformers',
          'datasets', 'sklearn', 'locust'}
find_spec = importlib.util.find_spec
class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition('.')[0] in ABSENT:
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Absent)
importlib.util.find_spec = lambda name, package=None: (
    None if name in ABSENT else find_spec(name, package)
)
import stepdial
sys.exit(stepdial.main(sys.argv[1:]))
"""


def test_a_bundle_is_loaded_beside_a_file_called_serve(tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text("raise SystemExit('this is not the server')\n")
    topics = ROOT / "zoo" / "topics"
    code = (
        "import stepdial\n"
        f"with stepdial.load({str(topics)!r}, threads=1) as model:\n"
        "    print(model.classify(['Stocks fell'])[0].label)\n"
    )
    (tmp_path / "use.py").write_text(code)
    command = [sys.executable, "use.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, "Business"), done.stderr


def test_bundles_are_inspected_where_only_the_server_is_installed(tmp_path: Path) -> None:
    topics = str(ROOT / "zoo" / "topics")
    shown = run_python(SERVER_ONLY, "inspect", topics)
    assert shown.returncode == 0, shown.stderr
    assert "frontier" in shown.stdout and "matplotlib" not in shown.stdout
    drawn = run_python(SERVER_ONLY, "inspect", topics, "--plot", str(tmp_path / "x.png"))
    assert drawn.returncode == 2 and "needs matplotlib" in drawn.stderr
    compared = run_python(SERVER_ONLY, "inspect", topics, str(ROOT / "zoo" / "sentiment"))
    assert compared.returncode == 0, compared.stderr


def test_bundles_are_calibrated_where_only_the_server_is_installed(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    shutil.copytree(ROOT / "zoo" / "digits", folder)
    before = (folder / "latency.json").read_text()
    done = run_python(SERVER_ONLY, "calibrate", str(folder), "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert "1 of " in done.stdout and (folder / "latency.json").read_text() != before


def test_nothing_is_measured_for_a_bundle_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "digits"
    shutil.copytree(ROOT / "zoo" / "digits", folder)
    monkeypatch.setattr("export.latency.open_model", None)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root writes anywhere
    assert stepdial.main(["calibrate", str(folder)]) == 2
    assert f"{folder}: cannot be written" in capsys.readouterr().err


@pytest.mark.long
def test_bundles_are_evaluated_where_only_the_server_is_installed(tmp_path: Path) -> None:
    rows = [f'{1 + i % 4},"Title {i}","Oil and football and phones, story {i}"' for i in range(80)]
    for name in ("train_subset.csv.gz", "test.csv.gz"):
        with gzip.open(tmp_path / name, "wt") as file:
            file.write("\n".join(rows) + "\n")
    (tmp_path / "input.txt").write_text("To be, or not to be: that is the question.\n" * 200)
    for model, data in (("topics", tmp_path), ("shakespeare", tmp_path / "input.txt")):
        command = ["evaluate", str(ROOT / "zoo" / model), "--data", str(data), "--steps", "1,2"]
        done = run_python(SERVER_ONLY, *command)
        assert done.returncode == 0, done.stderr
        assert "in the serving runtime" in done.stdout
        assert ("\nmacro F1: 0." in done.stdout) == (model == "topics")
        # The same figures as where torch is installed.
        assert (
            done.stdout
            == run_python(
                "import stepdial, sys; sys.exit(stepdial.main(sys.argv[1:]))", *command
            ).stdout
        )


def test_what_trains_says_what_it_needs_where_only_the_server_is_installed() -> None:
    for command in (["train", "parity"], ["export", "runs/x"], ["evaluate", "runs/x"]):
        done = run_python(SERVER_ONLY, *command)
        assert done.returncode == 1
        assert "pip install -e '.[train,export,serve]'" in done.stderr
