"""Memory settings: taken by glibc, and left alone where somebody chose."""

import platform
import subprocess
import sys

import pytest

from serve.malloc import keep_memory_low


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_glibc_takes_the_settings() -> None:
    code = "from serve.malloc import keep_memory_low; print(keep_memory_low())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_a_choice_in_the_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert not keep_memory_low()
