"""The command that starts Locust."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from loadtest.__main__ import build_parser
from loadtest.launch import Ending, locust_command, run

URL = "http://127.0.0.1:8000"


def flags(*options: str) -> dict[str, str]:
    command = locust_command(build_parser().parse_args(["--url", URL, *options]), URL)
    pairs = (word.split("=", 1) for word in command if "=" in word)
    return dict(pairs)


def test_tests_beside_each_other_have_ports_of_their_own() -> None:
    first, second = (flags("--rate", "50", "--workers", "2") for _ in range(2))
    assert first["--master-port"] == first["--master-bind-port"]
    assert first["--master-port"] != second["--master-port"]


def test_processes_are_joined_where_no_other_machine_can_reach_them() -> None:
    assert flags("--rate", "50", "--workers", "2")["--master-bind-host"] == "127.0.0.1"


def test_one_process_has_nobody_to_listen_to() -> None:
    assert not [flag for flag in flags("--rate", "50") if flag.startswith("--master")]


@pytest.mark.parametrize(
    ("options", "waits_s"),
    [
        ((), 61),
        (("--timeout", "5"), 6),
        (("--timeout", "5", "--drain", "1.5"), 2),
        (("--timeout", "5", "--drain", "20"), 20),
        (("--rate", "50", "--timeout", "5", "--drain", "20"), 21),
    ],
)
def test_locust_waits_for_the_last_answers_as_long_as_was_asked(
    options: tuple[str, ...], waits_s: int
) -> None:
    """In an open loop no less: there the sender itself ends the wait."""
    assert flags(*options)["--stop-timeout"] == str(waits_s)


@pytest.fixture
def nohup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("nohup")
def test_under_nohup_a_test_goes_on_when_its_terminal_is_gone() -> None:
    code = f"import os, time; os.kill({os.getpid()}, 1); time.sleep(0.5)"
    assert run([sys.executable, "-c", code]) == Ending(0, False)
