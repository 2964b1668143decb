"""The `stepdial` command: finds the package of a subcommand and passes the arguments on.

A package is imported only when its command is used, so that `stepdial serve` never loads torch and
`stepdial --help` loads nothing.
"""

import argparse
import difflib
import importlib
import importlib.machinery
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve.local import LocalModel

__version__ = "0.1.0"

_LONGEST_NAME = 80  # that may be a misspelt one
_MISSPELT = 0.8  # share of letters in common that a slip of the finger leaves
_OPTION = re.compile(r"(?<=--)[a-z][a-z0-9-]*")

_PACKAGES = frozenset({"train", "export", "serve", "loadtest"})


class OwnPackages:
    """Finds the packages of Stepdial beside this file, whatever else on the path has their names.

    `python -m stepdial` looks into the working folder first, where a `train.py` is not unusual.
    """

    folder = str(Path(__file__).resolve().parent)

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _PACKAGES:
            return None
        return importlib.machinery.PathFinder.find_spec(name, [cls.folder])


def _find_own_packages() -> None:
    if OwnPackages not in sys.meta_path:
        sys.meta_path.insert(0, OwnPackages)


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that a wrong one probably means, if any: misspelt, with words before or
    behind it, cut short, or a little like it. Long names match nothing.
    """
    if len(name) > _LONGEST_NAME:
        return None
    alike = difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT)
    longer = [one for one in known if re.search(rf"(^|[_-]){re.escape(one)}([_-]|$)", name)]
    shorter = [one for one in known if len(name) > 2 and one.startswith(name)]
    like = difflib.get_close_matches(name, known, n=1)
    return next(iter([*alike, *longer, *shorter, *like]), None)


class Options(argparse.ArgumentParser):
    """A command line that names the options probably meant by those it does not know.

    The parser of a subcommand does so itself: its usage is shown, not the list of commands.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return options, unknown

    def _meant(self, unknown: Sequence[str]) -> str:
        # Compared without the dashes, which would make short names look alike.
        known = _OPTION.findall(self.format_usage())
        typed = [word[2:].partition("=")[0] for word in unknown if word.startswith("--")]
        meant = [f"--{close}" for close in (nearest(word, known) for word in typed) if close]
        return f"; did you mean {' and '.join(meant)}?" if meant else ""


@dataclass(frozen=True, slots=True)
class Command:
    """Where a subcommand lives: `package.module.main`, installed by an extra."""

    package: str
    extra: str  # one or more, separated by commas
    takes_name: bool  # the package has several commands, so it gets the name too
    summary: str
    module: str = "__main__"


_TRAINING = "train,export,serve"  # a trained model is exported and served next
COMMANDS = {
    "train": Command("train", _TRAINING, True, "train a model from a recipe, or resume a run"),
    "recipes": Command("train", _TRAINING, True, "list the recipes that `train` knows"),
    "convert": Command(
        "train",
        _TRAINING,
        True,
        "convert a pretrained encoder or decoder into a model with a choice of step counts",
    ),
    "retrofit": Command(
        "train", _TRAINING, True, "fine-tune a fixed-step run so that any step count works"
    ),
    "evaluate": Command(
        "train", _TRAINING, True, "measure the quality of a run or a bundle at several step counts"
    ),
    "export": Command("export", _TRAINING, True, "export a run to a bundle for the server"),
    "inspect": Command(
        "export", "serve", True, "show a bundle: its facts, and quality against latency"
    ),
    "calibrate": Command(
        "export", "serve", True, "measure the latency of a bundle on this machine"
    ),
    "predict": Command(
        "serve",
        "serve",
        True,
        "label the rows of a CSV, TSV or JSONL file with a bundle",
        "predict",
    ),
    "sample": Command("serve", "serve", True, "continue a prompt with a bundle", "predict"),
    "serve": Command("serve", "serve", False, "serve bundles over HTTP; without a bundle, the zoo"),
    "loadtest": Command(
        "loadtest", "loadtest", False, "load-test a running server and write a report"
    ),
}
_NO_ZOO = (
    "stepdial demo serves the zoo, the folder `zoo` of Stepdial's source, which is not part of the "
    "installed package. Run it in a copy of the source, or name such a folder: "
    "STEPDIAL_ZOO=FOLDER stepdial demo. `stepdial demo --train` trains a model and needs no zoo."
)
_DEMO_SUMMARY = "serve the zoo; with --train: train, export and serve a small model"


def load(bundle: "Path | str", threads: int | None = None) -> "LocalModel":
    """An open bundle to use from Python: `serve.load`, whatever else is called `serve` there."""
    _find_own_packages()
    model: LocalModel = importlib.import_module("serve.local").LocalModel(bundle, threads)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(_help_text(), file=sys.stderr)
        return 2
    name, rest = arguments[0], arguments[1:]
    if name in ("-h", "--help", "help"):
        print(_help_text())
        return 0
    if name in ("-V", "--version"):
        print(f"stepdial {__version__}")
        return 0
    try:
        if name == "demo":
            return _demo(rest)
        if name in COMMANDS:
            return _forward(name, rest)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    print(_unknown_text(name), file=sys.stderr)
    return 2


def _forward(name: str, arguments: list[str]) -> int:
    command = COMMANDS[name]
    if name == "evaluate" and any(Path(word, "manifest.json").is_file() for word in arguments):
        command = replace(command, package="export", extra="serve")  # a bundle, not a run
    forwarded = [name, *arguments] if command.takes_name else arguments
    _find_own_packages()
    try:
        # Inside the `try` too: a package may import its heavy dependencies when it runs.
        entry = importlib.import_module(f"{command.package}.{command.module}")
        status = entry.main(forwarded)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing in _PACKAGES | {"stepdial"}:
            raise
        print(
            f"stepdial {name} needs packages that are not installed here (first: {missing}). "
            f"Install them: {install_command(command.extra)}",
            file=sys.stderr,
        )
        return 1
    return int(status or 0)


def install_command(extra: str) -> str:
    """The command that installs an extra: of the source that this file is part of, if it is."""
    source = Path(OwnPackages.folder)
    if not (source / "pyproject.toml").is_file():
        return f"pip install 'stepdial[{extra}]'"
    where = "." if source == Path.cwd() else str(source)
    return f"pip install -e {shlex.quote(f'{where}[{extra}]')}"


def _demo(arguments: list[str]) -> int:
    parser = Options(
        prog="stepdial demo",
        description="Serve the zoo. With --train: train a small model from a recipe that needs no "
        "download, measure it, export it and serve the result, showing each command.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (%(default)s)")
    parser.add_argument("--train", action="store_true", help="train and export a model first")
    parser.add_argument(
        "--recipe", default="listops", help="what --train trains: listops, parity or stdlib"
    )
    options = parser.parse_args(arguments)
    server = ["--host", options.host, "--port", str(options.port)]
    if not options.train:
        if "STEPDIAL_ZOO" in os.environ or _holds_bundles(Path(OwnPackages.folder, "zoo")):
            return _forward("serve", server)
        if _holds_bundles(Path("zoo")):
            return _forward("serve", ["--zoo", "zoo", *server])
        print(_NO_ZOO, file=sys.stderr)
        return 2

    run, bundle = f"runs/demo-{options.recipe}", f"bundles/demo-{options.recipe}"
    for stage in (
        ["train", options.recipe, "--out", run],
        ["evaluate", run, "--steps", "1,2,4"],
        ["export", run, "--out", bundle, "--steps", "1,2,4"],
    ):
        print(f"\n$ stepdial {' '.join(stage)}", flush=True)
        # Separate processes, so that the one that goes on to serve never loads torch.
        status = subprocess.run([sys.executable, "-m", "stepdial", *stage], check=False).returncode
        if status:
            print(f"stepdial demo stopped: `stepdial {stage[0]}` failed.", file=sys.stderr)
            return status
    print(f"\n$ stepdial serve {bundle} {' '.join(server)}", flush=True)
    return _forward("serve", [bundle, *server])


def _holds_bundles(zoo: Path) -> bool:
    return any(zoo.glob("*/manifest.json"))


def _help_text() -> str:
    summaries = {name: command.summary for name, command in COMMANDS.items()}
    summaries["demo"] = _DEMO_SUMMARY
    width = max(map(len, summaries))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, text in summaries.items())
    return (
        "usage: stepdial COMMAND [options]\n"
        "\n"
        "Train and serve small transformers that run in steps: each request says how many.\n"
        "\n"
        f"commands:\n{listed}\n"
        "\n"
        "`stepdial COMMAND --help` lists a command's options; `stepdial --version` the version."
    )


def _unknown_text(name: str) -> str:
    close = nearest(name, [*COMMANDS, "demo"])
    hint = f" Did you mean `stepdial {close}`?" if close else ""
    return f"stepdial has no command {name!r}.{hint} `stepdial --help` lists them."


if __name__ == "__main__":
    sys.exit(main())
