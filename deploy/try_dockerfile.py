"""Follow the Dockerfile by hand, where there is no Docker: in a bare Debian, to a served answer.

    sudo python3 deploy/try_dockerfile.py

Reads the instructions from the Dockerfile itself, makes the base of each stage with debootstrap,
runs every step in a chroot, then starts what the image would start, as its user, on a read-only
root, waits for its health check and asks it a question. The base stands in for the official
Python image: the same Debian, with Debian's own Python. Knows Linux and the few instructions that
the Dockerfile has; any other ends it.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
QUESTION = {"model": "sentiment", "input": "What a wonderful film.", "steps": 2}
_STEP_S = 600.0
_START_S = 60.0
_STOP_S = 40.0
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
# How this machine reaches package hosts, which the bare root does not know.
_REACHING = ("etc/resolv.conf", "etc/hosts", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt")
_REACHING_VARIABLES = ("PIP_CERT", "PIP_INDEX_URL", "SSL_CERT_FILE", "HTTP_PROXY", "HTTPS_PROXY")


class TrialError(Exception):
    """What went wrong, and at which line."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, its continued lines joined."""

    line: int
    word: str
    rest: str


@dataclass
class Stage:
    """A root folder, and what the instructions so far have said of it."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0"
    health: Sequence[str] = ()
    entry: Sequence[str] = ()

    def expand(self, text: str) -> str:
        """The text with its variables."""
        known = self.arguments | self.environment
        return _VARIABLE.sub(lambda found: known.get(found[1] or found[2], ""), text)

    def inside(self, path: str) -> Path:
        """Where a path of the image is here."""
        return self.root / str(PurePosixPath(self.folder) / path).lstrip("/")

    def owner(self) -> str:
        """The user with the group that /etc/passwd gives it, as numbers."""
        for entry in (self.root / "etc/passwd").read_text(encoding="utf-8").splitlines():
            name, _, user, group, *_ = entry.split(":")
            if self.user in (name, user):
                return f"{user}:{group}"
        raise TrialError(f"USER {self.user} is not in /etc/passwd of the image")

    def command(self, words: Sequence[str], extra: Mapping[str, str]) -> list[str]:
        """A command inside, with nothing of this machine's environment."""
        variables = self.arguments | self.environment | dict(extra)
        environment = [f"{name}={text}" for name, text in variables.items()]
        chroot = ["chroot", f"--userspec={self.owner()}", str(self.root)]
        return [*chroot, "/usr/bin/env", "-i", f"--chdir={self.folder}", *environment, *words]


def read_dockerfile(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile, in order."""
    found, begun, first = [], "", 0
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        first = first if begun else number
        begun += line.removesuffix("\\")
        if not line.endswith("\\"):
            word, _, rest = begun.partition(" ")
            found.append(Instruction(first, word.upper(), rest.strip()))
            begun = ""
    return found


def in_context(path: PurePosixPath, patterns: Sequence[str]) -> bool:
    """Whether .dockerignore leaves a path in: the last pattern that matches it or a parent says."""
    kept = True
    for pattern in patterns:
        regex = re.escape(pattern.removeprefix("!").strip("/"))
        for glob, meaning in ((r"\*\*/", "(?:.*/)?"), (r"\*", "[^/]*"), (r"\?", "[^/]")):
            regex = regex.replace(glob, meaning)
        if any(re.fullmatch(regex, str(part)) for part in (path, *path.parents)):
            kept = pattern.startswith("!")
    return kept


def read_ignored(context: Path) -> list[str]:
    """The patterns of .dockerignore."""
    lines = (context / ".dockerignore").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


class Trial:
    """One run through a Dockerfile."""

    def __init__(self, context: Path, work: Path, base: Path | None) -> None:
        self._context = context
        self._work = work
        self._base = base
        self._ignored = read_ignored(context)
        self._stages: dict[str, Stage] = {}
        self._arguments: dict[str, str] = {}  # before the first FROM
        self._stage: Stage | None = None

    @property
    def stage(self) -> Stage:
        if self._stage is None:
            raise TrialError("the first instruction must be FROM")
        return self._stage

    def follow(self, instruction: Instruction) -> None:
        """Do what an instruction says."""
        word, rest = instruction.word, instruction.rest
        match word:
            case "ARG":
                name, _, text = rest.partition("=")
                known = self._arguments if self._stage is None else self.stage.arguments
                known[name] = text
            case "FROM":
                self._begin(rest)
            case "RUN":
                _run(self.stage.command(["/bin/sh", "-c", rest], _reaching()), _STEP_S)
            case "COPY":
                self._copy(shlex.split(rest))
            case "ENV":
                for pair in shlex.split(rest):
                    name, _, text = pair.partition("=")
                    self.stage.environment[name] = self.stage.expand(text)
            case "WORKDIR":
                self.stage.folder = self.stage.expand(rest)
                self.stage.inside(".").mkdir(parents=True, exist_ok=True)
            case "USER":
                self.stage.user = rest
            case "HEALTHCHECK":
                self.stage.health = json.loads(rest.partition("CMD")[2])
            case "ENTRYPOINT":
                self.stage.entry = json.loads(rest)
            case "EXPOSE":
                pass  # only says it
            case _:
                raise TrialError(f"{word} is not known to this script: add it to follow()")

    def _begin(self, rest: str) -> None:
        image, _, name = rest.partition(" AS ")
        image = _VARIABLE.sub(lambda found: self._arguments[found[1] or found[2]], image)
        suite = re.fullmatch(r"python:[\d.]+-slim-(\w+)", image)
        if suite is None:
            raise TrialError(f"only python:VERSION-slim-SUITE can be stood in for, not {image}")
        if self._base is None:
            self._base = self._work / "base"
            debootstrap(suite[1], self._base)
        root = self._work / f"stage-{len(self._stages)}"
        _run(["cp", "--archive", "--reflink=auto", str(self._base), str(root)], _STEP_S)
        make_reaching(root)
        self._stage = Stage(root)
        self._stages[name or str(len(self._stages))] = self._stage

    def _copy(self, words: list[str]) -> None:
        origin = self._context
        if words[0].startswith("--from="):
            origin = self._stages[words.pop(0).removeprefix("--from=")].root
        *sources, given = words
        target = self.stage.inside(given)
        for source in sources:
            path = origin / source.lstrip("/")
            if path.is_dir():
                ignore = self._left_out if origin == self._context else None
                shutil.copytree(path, target, symlinks=True, ignore=ignore, dirs_exist_ok=True)
            elif origin == self._context and not in_context(PurePosixPath(source), self._ignored):
                raise TrialError(f".dockerignore leaves {source} out")
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)

    def _left_out(self, folder: str, names: list[str]) -> list[str]:
        at = PurePosixPath(Path(folder).relative_to(self._context))
        return [name for name in names if not in_context(at / name, self._ignored)]


def debootstrap(suite: str, root: Path) -> None:
    """A bare Debian with its Python, from where this machine gets its own packages."""
    listed = _run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)"], 60)
    mirrors = [line.split()[0] for line in listed.splitlines() if line.endswith(f" {suite}")]
    if not mirrors:
        raise TrialError(f"this machine's apt knows no {suite}: run it on a Debian {suite}")
    include = "--include=python3,python3-venv,ca-certificates"
    _run(["debootstrap", "--variant=minbase", include, suite, str(root), mirrors[0]], _STEP_S)


def make_reaching(root: Path) -> None:
    """Let a root reach package hosts as this machine does, and call Python as the image does."""
    for name in _REACHING:
        if Path("/", name).is_file():
            shutil.copyfile(Path("/", name), root / name)
    python = root / "usr/local/bin/python"
    if not python.exists():
        python.symlink_to("/usr/bin/python3")


def serve(stage: Stage) -> str:
    """Start the image's command as Docker would with --read-only, and ask it a question."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    extra = {"STEPDIAL_PORT": port}
    root = shlex.quote(str(stage.root))
    mounts = (
        f"mount --bind {root} {root} && mount -o remount,bind,ro {root} && "
        f"mount -t tmpfs tmpfs {root}/tmp && mount -t proc proc {root}/proc && "
        f"mount --bind /dev {root}/dev && exec {shlex.join(stage.command(stage.entry, extra))}"
    )
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", mounts]) as process:
        try:
            end_s = time.monotonic() + _START_S
            while subprocess.run(
                stage.command(stage.health, extra), stderr=subprocess.DEVNULL, timeout=30
            ).returncode:
                if process.poll() is not None or time.monotonic() > end_s:
                    raise TrialError("the health check never succeeded")
                time.sleep(0.5)
            url, body = f"http://127.0.0.1:{port}/v1/classify", json.dumps(QUESTION).encode()
            with urllib.request.urlopen(url, body, timeout=30) as response:
                answer: str = response.read().decode()
            process.send_signal(signal.SIGTERM)
            status = process.wait(_STOP_S)
        finally:
            process.kill()
    if status:
        raise TrialError(f"after SIGTERM the server ended with status {status}")
    return answer


def _reaching() -> dict[str, str]:
    return {name: os.environ[name] for name in _REACHING_VARIABLES if name in os.environ}


def _run(command: Sequence[str], limit_s: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise TrialError(f"status {done.returncode}:\n{tail}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Follow the Dockerfile without Docker.")
    parser.add_argument("--base", type=Path, help="a bare root that debootstrap made before")
    line = parser.parse_args()
    if os.geteuid():
        print("This needs root, for chroot and mounts: run it with sudo.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="dockerfile-") as work:
        trial = Trial(ROOT, Path(work), line.base)
        try:
            for step in read_dockerfile((ROOT / "Dockerfile").read_text(encoding="utf-8")):
                begun_s = time.monotonic()
                print(f"line {step.line:2}  {step.word} {step.rest}"[:88].ljust(90), end="")
                trial.follow(step)
                print(f" ok {time.monotonic() - begun_s:6.1f} s", flush=True)
            print(f"answered {serve(trial.stage)}")
        except (TrialError, OSError, subprocess.SubprocessError) as error:
            print(f"\nfailed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
