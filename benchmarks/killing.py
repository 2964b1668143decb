"""Kills: a random moment, what was seen afterwards, and processes that are forked to be killed.

A fork saves the seconds that loading torch takes; what it then runs is what the command runs.
Knows processes; deliberately nothing of what they do.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.machine import ROOT

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
