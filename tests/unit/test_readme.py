"""The code blocks of the pages, run as a reader would run them, against a server with the zoo.

How to mark a block of a page, with a comment on the line above its fence:

    <!-- test: NAME -->        a `bash` or `python` block that is run here; it must succeed
    <!-- output: NAME -->      a block of any language: what block NAME prints
    <!-- not tested: WHY -->   a `bash` or `python` block that is not run here

Every `bash` and `python` block needs one of the three, so that none is forgotten. Blocks run in
the order of the page, in one scratch folder where `zoo` and `train` are those of the repository
and `stepdial` is on the PATH. `127.0.0.1:8000` in a block means the server that runs here.

Output is compared loosely: white space does not count, any number stands for any number, and
`...` stands for anything.
"""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from train.config import ModelConfig, StepsConfig

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/training.md")
README_ADDRESS = "127.0.0.1:8000"
_BLOCK = re.compile(
    r"^(?:<!--\s*(?P<mark>[^\n]*?)\s*-->[ \t]*\n(?:[ \t]*\n)?)?"
    r"```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
_RUNNABLE = {"bash", "sh", "shell", "python"}


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block and what the comment above it says."""

    language: str
    text: str
    kind: str  # test, output, not tested, or empty
    name: str


def read_blocks(markdown: str) -> list[Block]:
    blocks = []
    for match in _BLOCK.finditer(markdown):
        kind, _, name = (match["mark"] or "").partition(":")
        blocks.append(Block(match["language"], match["text"], kind.strip(), name.strip()))
    return blocks


def prints_like(expected: str, printed: str) -> bool:
    """Whether a text is what the page shows, but for white space, numbers and `...`."""
    pieces = re.split(rf"(\.\.\.|{_NUMBER})", "".join(expected.split()))
    patterns = [re.escape(piece) for piece in pieces]
    for index in range(1, len(pieces), 2):
        patterns[index] = ".*?" if pieces[index] == "..." else _NUMBER
    return re.fullmatch("".join(patterns), "".join(printed.split()), re.DOTALL) is not None


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        found = f"127.0.0.1:{listener.getsockname()[1]}"
    port = found.rpartition(":")[2]
    command = [sys.executable, "-m", "stepdial", "serve", "--port", port]
    with subprocess.Popen(command, cwd=ROOT) as server:
        try:
            wait_until_ready(f"http://{found}/health/ready", server)
            yield found
        finally:
            server.terminate()
            server.wait(timeout=60)


def wait_until_ready(url: str, server: subprocess.Popen[bytes], patience_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + patience_s
    while True:
        assert server.poll() is None, "the server ended before it was ready"
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline_s, f"{url} was not ready in {patience_s:.0f} s"
            time.sleep(0.1)


def run_block(block: Block, address: str, folder: Path) -> subprocess.CompletedProcess[str]:
    text = block.text.replace(README_ADDRESS, address)
    shell = ["bash", "-euo", "pipefail", "-c", text]
    command = [sys.executable, "-c", text] if block.language == "python" else shell
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_runs_and_prints_what_it_shows(
    page: str, address: str, tmp_path: Path
) -> None:
    for name in ("zoo", "train"):
        (tmp_path / name).symlink_to(ROOT / name)
    blocks = read_blocks((ROOT / page).read_text(encoding="utf-8"))
    shown = {block.name: block.text for block in blocks if block.kind == "output"}
    tested = [block for block in blocks if block.kind == "test"]
    assert tested, f"{page} marks no block with <!-- test: NAME -->"
    wrong = []
    for block in tested:
        done = run_block(block, address, tmp_path)
        if done.returncode != 0:
            wrong.append(f"{block.name} failed ({done.returncode}):\n{done.stdout}{done.stderr}")
        elif block.name in shown and not prints_like(shown[block.name], done.stdout):
            wrong.append(f"{block.name} printed:\n{done.stdout}\nnot:\n{shown[block.name]}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_forgotten(page: str) -> None:
    blocks = read_blocks((ROOT / page).read_text(encoding="utf-8"))
    for block in blocks:
        if block.language in _RUNNABLE:
            assert block.kind in ("test", "not tested"), f"this block has no mark:\n{block.text}"
            assert block.name, f"the mark of this block names nothing:\n{block.text}"
    names = [block.name for block in blocks if block.kind == "test"]
    assert len(names) == len(set(names)), "two tested blocks have one name"
    assert {block.name for block in blocks if block.kind == "output"} <= set(names)


def test_the_page_of_training_names_every_recipe_and_every_key_of_models_and_steps() -> None:
    named = set(re.findall(r"[\w.-]+", (ROOT / "docs/training.md").read_text(encoding="utf-8")))
    recipes = {path.stem for path in (ROOT / "train" / "recipes").glob("*.toml")}
    keys = {field.name for config in (ModelConfig, StepsConfig) for field in fields(config)}
    ends = {word.rpartition(".")[2] for word in named}
    assert not recipes - named
    assert not keys - ends


def test_marks_belong_to_the_block_below_them() -> None:
    page = (
        "<!-- test: one -->\n```bash\necho 1\n```\n\ntext\n\n"
        "<!-- output: one -->\n\n```json\n1\n```\n"
        "<!-- other -->\nbetween\n```python\nprint()\n```\n"
        "<!-- not tested: needs a GPU -->\n```bash\nx\n```\n"
    )
    assert read_blocks(page) == [
        Block("bash", "echo 1\n", "test", "one"),
        Block("json", "1\n", "output", "one"),
        Block("python", "print()\n", "", ""),
        Block("bash", "x\n", "not tested", "needs a GPU"),
    ]


@pytest.mark.parametrize(
    ("expected", "printed", "alike"),
    [
        ('{"a": 1.25}', '{\n  "a": -3e-05\n}', True),
        ('{"id": "...", "steps": 2}', '{"id":"ab-1","steps":4}', True),
        ("a\n...\nb", "a\n1\n2\nb\n", True),
        ('{"a": 1}', '{"b": 1}', False),
        ("label positive", "label negative", False),
        ("a ... b", "a 1 2 c", False),
        ('{"a": 1}', '{"a": 1, "b": 2}', False),
        ('{"a": 1}', '{"a": null}', False),
    ],
)
def test_outputs_are_compared_loosely(expected: str, printed: str, alike: bool) -> None:
    assert prints_like(expected, printed) is alike


def test_a_block_runs_to_its_first_failure(tmp_path: Path) -> None:
    block = Block("bash", "echo http://127.0.0.1:8000\nfalse | true\necho no\n", "test", "x")
    done = run_block(block, "127.0.0.1:9", tmp_path)
    assert done.returncode != 0
    assert done.stdout == "http://127.0.0.1:9\n"
