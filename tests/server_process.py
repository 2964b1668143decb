"""The real server, as `python -m serve` starts it, in a process of its own on a free port.

Knows how to start, reach and stop it; deliberately nothing of what it answers.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryFile
from threading import Thread

from tests.warm import ROOT, ForkServer

START_S = 60.0  # a busy machine may take so long
_URL = re.compile(r"on (http://\S+) ")


@dataclass
class ServerProcess:
    """A server that runs."""

    process: subprocess.Popen[str]
    url: str
    banner: str
    lines: "Queue[str]"
    readers: Sequence[Thread]
    said: str = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 15.0) -> int:
        return self.process.wait(timeout_s)

    def wait_until_it_has_read(self) -> None:
        """Until it has accepted every connection and read all that clients have sent."""
        end_s = time.monotonic() + START_S
        while self._unread():
            assert time.monotonic() < end_s, "it does not read"
            time.sleep(0.01)

    def _unread(self) -> int:
        shown = Path(f"/proc/{self.process.pid}/net/tcp").read_text().splitlines()[1:]
        port, waiting = f":{self.port:04X}", 0
        for _, local, remote, _, queues, *_ in map(str.split, shown):
            sending, unread = (int(one, 16) for one in queues.split(":"))
            waiting += sending * remote.endswith(port) + unread * local.endswith(port)
        return waiting

    def memory_kib(self, kind: str = "VmRSS") -> int:
        """What it has in memory, by Linux's names: `VmHWM` is the most that it had."""
        shown = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(rf"{kind}:\s+(\d+) kB", shown)[0])

    def wait_until_it_says(self, text: str) -> None:
        while text not in self.said:
            self.said += self.lines.get(timeout=20)

    def rest_of_output(self) -> str:
        """What it wrote since it started; for a process that has ended."""
        for reader in self.readers:
            reader.join()
        while not self.lines.empty():
            self.said += self.lines.get()
        return self.said


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_to_end(
    arguments: Sequence[str | Path], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command, when it is expected to end by itself."""
    words, own = [*map(str, arguments)], _environment(environment)
    with TemporaryFile("w+", encoding="utf-8") as out, TemporaryFile("w+", encoding="utf-8") as err:
        process = _fork_server().start(words, own, out.fileno(), err.fileno())
        try:
            status = process.wait(START_S)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, status, out.read(), err.read())


@contextmanager
def server_process(
    bundles: Sequence[Path],
    *flags: str,
    environment: Mapping[str, str] | None = None,
    cold: bool = False,
) -> Iterator[ServerProcess]:
    """A server of these bundles; it must end well when it is told to.

    A `cold` one is started as a user starts it; others have imported what they need.
    """
    arguments = [*map(str, bundles), "--port", "0", *flags]
    (out, written), (err, complained) = os.pipe(), os.pipe()
    if cold:
        process = subprocess.Popen(
            [sys.executable, "-m", "serve", *arguments],
            env=_environment(environment),
            stdout=written,
            stderr=complained,
            text=True,
        )
    else:
        process = _fork_server().start(arguments, _environment(environment), written, complained)
    os.close(written)
    os.close(complained)
    lines, readers = listen_to(out, err)
    try:
        banner, url = await_banner(process, lines)
        yield ServerProcess(process, url, banner, lines, readers)
    finally:
        try:
            if process.poll() is None:
                process.terminate()
                status = process.wait(20)
                assert status == 0, f"the server ended with {status}"
        finally:
            process.kill()
            process.wait()
            for reader in readers:
                reader.join()


def listen_to(*files: int) -> tuple["Queue[str]", list[Thread]]:
    """The lines that come from these pipes, and who reads them to their ends."""
    lines: Queue[str] = Queue()
    readers = [Thread(target=_read, args=(file, lines), daemon=True) for file in files]
    for reader in readers:
        reader.start()
    return lines, readers


def await_banner(process: subprocess.Popen[str], lines: "Queue[str]") -> tuple[str, str]:
    """What a server says when it serves, and its URL."""
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


def _read(stream: int, lines: "Queue[str]") -> None:
    with open(stream, encoding="utf-8") as text:
        for line in text:
            lines.put(line)


@cache
def _fork_server() -> ForkServer:
    used = ("serve.command", "serve.runtime.decoder", "onnxruntime", "uvloop", "pydantic.v1")
    return ForkServer(_environment(None), "serve.__main__", *used)


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    own = {name: text for name, text in os.environ.items() if not name.startswith("STEPDIAL_")}
    return own | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"} | dict(extra or {})
