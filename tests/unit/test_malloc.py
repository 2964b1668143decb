"""Memory settings: taken by glibc, and left alone where somebody chose."""

import platform
import subprocess
import sys

import pytest

from serve.server import keep_memory_low


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_glibc_takes_the_settings() -> None:
    code = "from serve.server import keep_memory_low; print(keep_memory_low())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_a_choice_in_the_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert not keep_memory_low()


_HOLES = """
import time
from pathlib import Path
from serve import server

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

server.GIVE_BACK_S = 0.2
server.keep_memory_low()
blocks = [bytearray(100_000) for _ in range(2000)]
full_mb = resident_mb()
del blocks[:-1]  # what is left lies behind the holes
end_s = time.monotonic() + 20
while resident_mb() > full_mb - 150 and time.monotonic() < end_s:
    time.sleep(0.05)
print(round(full_mb - resident_mb()))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_holes_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", _HOLES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150
