"""The thread that answers goes before those that compute, whatever was loaded when, if asked."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.fixtures.tiny_bundles import build_classify, build_generate
from tests.server_process import ServerProcess, server_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it by thread")
BEFORE = 10


def niceness(server: ServerProcess) -> dict[int, int]:
    """Of each thread; the one with the number of the process answers."""
    threads = Path(f"/proc/{server.process.pid}/task").iterdir()
    return {int(one.name): os.getpriority(os.PRIO_PROCESS, int(one.name)) for one in threads}


def answers_first(server: ServerProcess) -> bool:
    found = niceness(server)
    own, usual = found.pop(server.process.pid), os.getpriority(os.PRIO_PROCESS, 0)
    lower = min(19, usual + BEFORE)
    return own == usual and bool(found) and all(nice == lower for nice in found.values())


def test_unless_asked_no_thread_gives_way_to_other_programs(tmp_path: Path) -> None:
    build_generate(tmp_path / "zoo" / "one")
    environment = {"STEPDIAL_ZOO": str(tmp_path / "zoo")}
    with server_process([], "--threads", "2", environment=environment) as server:
        assert set(niceness(server).values()) == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_the_thread_that_answers_goes_first(tmp_path: Path) -> None:
    zoo = tmp_path / "zoo"
    build_generate(zoo / "one")
    environment = {"STEPDIAL_ZOO": str(zoo), "STEPDIAL_ENGINE_NICE": str(BEFORE)}
    with server_process([], "--threads", "2", environment=environment) as server:
        assert answers_first(server), niceness(server)
        before = len(niceness(server))
        build_classify(zoo / "two")
        server.process.send_signal(signal.SIGHUP)
        said = ""
        while "tiny-classify" not in said:  # the end of the first banner may be here as well
            said += server.lines.get(timeout=20)
        assert len(niceness(server)) > before, "what loaded it has a thread"
        assert answers_first(server), niceness(server)
