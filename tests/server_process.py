"""The real server, `python -m serve`, as a process of its own on a free port.

Knows how to start, reach and stop it; deliberately nothing of what it answers.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

START_S = 30.0
_URL = re.compile(r"on (http://\S+) ")


@dataclass
class ServerProcess:
    """A server that runs."""

    process: subprocess.Popen[str]
    url: str
    banner: str
    lines: "Queue[str]"
    readers: Sequence[Thread]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 15.0) -> int:
        return self.process.wait(timeout_s)

    def rest_of_output(self) -> str:
        """What it wrote since it started; for a process that has ended."""
        for reader in self.readers:
            reader.join()
        text = ""
        while not self.lines.empty():
            text += self.lines.get()
        return text


def run_to_end(
    arguments: Sequence[str | Path], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command, when it is expected to end by itself."""
    return subprocess.run(
        _command(arguments),
        env=_environment(environment),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


@contextmanager
def server_process(
    bundles: Sequence[Path], *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server of these bundles; it must end well when it is told to."""
    process = subprocess.Popen(
        _command([*bundles, "--port", "0", *flags]),
        env=_environment(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: Queue[str] = Queue()
    readers = [
        Thread(target=_read, args=(stream, lines), daemon=True)
        for stream in (process.stdout, process.stderr)
    ]
    for reader in readers:
        reader.start()
    try:
        banner, url = _await_banner(process, lines)
        yield ServerProcess(process, url, banner, lines, readers)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reader in readers:
            reader.join()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def _await_banner(process: subprocess.Popen[str], lines: "Queue[str]") -> tuple[str, str]:
    banner, end_s = "", time.monotonic() + START_S
    while time.monotonic() < end_s:
        try:
            banner += lines.get(timeout=0.1)
        except Empty:
            if process.poll() is not None:
                raise AssertionError(
                    f"the server ended with {process.returncode}: {banner}"
                ) from None
        found = _URL.search(banner)
        if found and "Ctrl-C" in banner:
            return banner, found.group(1)
    raise AssertionError(f"the server did not start within {START_S} s: {banner}")


def _read(stream: Iterable[str] | None, lines: "Queue[str]") -> None:
    assert stream is not None
    for line in stream:
        lines.put(line)


def _command(arguments: Sequence[str | Path]) -> list[str]:
    return [sys.executable, "-m", "serve", *map(str, arguments)]


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    own = {name: text for name, text in os.environ.items() if not name.startswith("STEPDIAL_")}
    root = Path(__file__).resolve().parent.parent
    return own | {"PYTHONPATH": str(root), "PYTHONWARNINGS": "error"} | dict(extra or {})
