"""The code blocks of the pages: read, run as a reader would run them, compared with what is shown.

How to mark a block of a page, with a comment on the line above its fence:

    <!-- test: NAME -->        a `bash` or `python` block that is run here; it must succeed
    <!-- output: NAME -->      a block of any language: what block NAME prints
    <!-- serve: NAME -->       a `bash` block that starts a server, which the blocks below talk to
    <!-- not tested: WHY -->   a `bash` or `python` block that is not run here

Output is compared to the letter, but for white space and `...`, which stands for anything. A `json`
block is compared as an answer: a time or a drawn seed may be any, and other fractions may differ in
their last digits; `"..."` stands for any value, `{...}` for any object.

Knows blocks and processes; deliberately not which pages there are.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server_process import await_banner, listen_to

README_ADDRESS = "127.0.0.1:8000"
_PATIENCE_S = 60.0
_BLOCK = re.compile(
    r"^(?:<!--\s*(?P<mark>[^\n]*?)\s*-->[ \t]*\n(?:[ \t]*\n)?)?"
    r"```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_ANYTHING = "..."
_DRAWN = ("seed", "queue_ms", "compute_ms", "total_ms")
_LAST_DIGITS = 1e-4  # of a score: processors add up in different orders


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block and what the comment above it says."""

    language: str
    text: str
    kind: str  # test, output, serve, not tested, or empty
    name: str


def read_blocks(markdown: str) -> list[Block]:
    blocks = []
    for match in _BLOCK.finditer(markdown):
        kind, _, name = (match["mark"] or "").partition(":")
        blocks.append(Block(match["language"], match["text"], kind.strip(), name.strip()))
    return blocks


def prints_like(expected: str, printed: str, language: str) -> bool:
    """Whether a text is what the page shows."""
    if language == "json":
        shown = json.loads(expected.replace("{...}", '{"...": "..."}'))
        return answers_like(shown, json.loads(printed))
    pieces = map(re.escape, "".join(expected.split()).split(_ANYTHING))
    return re.fullmatch(".*?".join(pieces), "".join(printed.split()), re.DOTALL) is not None


def answers_like(shown: Any, given: Any, key: str = "") -> bool:
    """Whether a JSON value, found under a key, is what the page shows."""
    if shown == _ANYTHING:
        return True
    if type(shown) is not type(given):
        return False
    if isinstance(shown, dict):
        return _ANYTHING in shown or (
            shown.keys() == given.keys()
            and all(answers_like(shown[name], given[name], name) for name in shown)
        )
    if isinstance(shown, list):
        return len(shown) == len(given) and all(map(answers_like, shown, given))
    if key in _DRAWN:
        return bool(given >= 0)
    if isinstance(shown, float):
        return math.isclose(shown, given, rel_tol=_LAST_DIGITS)
    return bool(shown == given)


def run_block(
    block: Block, address: str, folder: Path, programs: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Run it to its end in a folder; `programs` are folders of commands that come first."""
    text = block.text.replace(README_ADDRESS, address)
    shell = ["bash", "-euo", "pipefail", "-c", text]
    return subprocess.run(
        [sys.executable, "-c", text] if block.language == "python" else shell,
        cwd=folder,
        env=_environment(programs),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )


@contextmanager
def served(block: Block, folder: Path, programs: Sequence[Path] = ()) -> Iterator[str]:
    """Run a block that starts a server; gives its address, which is on a free port."""
    environment = _environment(programs) | {
        "STEPDIAL_PORT": "0",
        "MAKEFLAGS": "PORT=0",
        "STEPDIAL_THREADS": "1",  # those of two would wait for each other on a busy machine
        "PIP_DRY_RUN": "1",  # whatever a page starts, it installs nothing here
    }
    command = ["bash", "-euo", "pipefail", "-c", block.text]
    out, written = os.pipe()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=written,
        stderr=written,
        text=True,
        start_new_session=True,  # a group: a shell does not pass on the signal that ends it
    )
    os.close(written)
    lines, readers = listen_to(out)
    try:
        _, url = await_banner(process, lines)
        yield url.removeprefix("http://")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=_PATIENCE_S)
        for reader in readers:
            reader.join()


def _environment(programs: Sequence[Path]) -> dict[str, str]:
    path = [*map(str, programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {**os.environ, "PATH": os.pathsep.join(path)}
