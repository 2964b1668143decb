"""The code blocks of the pages, run as a reader would run them, against a server with the zoo.

How to mark a block of a page, with a comment on the line above its fence:

    <!-- test: NAME -->        a `bash` or `python` block that is run here; it must succeed
    <!-- output: NAME -->      a block of any language: what block NAME prints
    <!-- not tested: WHY -->   a `bash` or `python` block that is not run here

Every `bash` and `python` block needs one of the three, so that none is forgotten. Blocks run in
the order of the page, in one scratch folder where `zoo` and `train` are those of the repository
and `stepdial` is on the PATH. `127.0.0.1:8000` in a block means the server that runs here.

Output is compared to the letter, but for white space and `...`, which stands for anything. A `json`
block is compared as an answer: a time or a drawn seed may be any, and other fractions may differ in
their last digits; `"..."` stands for any value, `{...}` for any object.
"""

import json
import math
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
from typing import Any

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
_ANYTHING = "..."
_DRAWN = ("seed", "queue_ms", "compute_ms", "total_ms")
_LAST_DIGITS = 1e-4  # of a score: processors add up in different orders
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
    shown = {block.name: block for block in blocks if block.kind == "output"}
    tested = [block for block in blocks if block.kind == "test"]
    assert tested, f"{page} marks no block with <!-- test: NAME -->"
    wrong = []
    for block in tested:
        done = run_block(block, address, tmp_path)
        if done.returncode != 0:
            wrong.append(f"{block.name} failed ({done.returncode}):\n{done.stdout}{done.stderr}")
            continue
        output = shown.get(block.name)
        if output and not prints_like(output.text, done.stdout, output.language):
            wrong.append(f"{block.name} printed:\n{done.stdout}\nnot:\n{output.text}")
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
        ('{"score": 0.865022}', '{\n  "score": 0.865018\n}', True),
        ('{"score": 0.865022}', '{"score": 0.8652}', False),
        ('{"queue_ms": 0.2, "seed": 3}', '{"queue_ms": 17.5, "seed": 9}', True),
        ('{"queue_ms": 0.2}', '{"queue_ms": null}', False),
        ('{"id": "...", "steps": 2}', '{"id":"ab-1","steps":2}', True),
        ('{"id": "...", "steps": 2}', '{"id":"ab-1","steps":4}', False),
        ('{"label": "2"}', '{"label": "7"}', False),
        ('{"label": "2"}', '{"label": 2}', False),
        ('{"cut": true}', '{"cut": 1}', False),
        ('{"budget": {...}}', '{"budget": {"steps": 1}}', True),
        ('{"budget": {...}}', '{"budget": null}', False),
        ('{"a": 1}', '{"a": 1, "b": 2}', False),
        ("[1, 2]", "[1, 2, 3]", False),
        ("[1, 2]", "[1, 3]", False),
    ],
)
def test_answers_are_compared_but_for_times_and_last_digits(
    expected: str, printed: str, alike: bool
) -> None:
    assert prints_like(expected, printed, "json") is alike


@pytest.mark.parametrize(
    ("expected", "printed", "alike"),
    [
        ("a\n...\nb", "a\n1\n2\nb\n", True),
        ("a ... b", "a 1 2 c", False),
        ("torch.Size([1, 32])", "torch.Size([1, 33])", False),
    ],
)
def test_texts_are_compared_to_the_letter(expected: str, printed: str, alike: bool) -> None:
    assert prints_like(expected, printed, "text") is alike


def test_a_block_runs_to_its_first_failure(tmp_path: Path) -> None:
    block = Block("bash", "echo http://127.0.0.1:8000\nfalse | true\necho no\n", "test", "x")
    done = run_block(block, "127.0.0.1:9", tmp_path)
    assert done.returncode != 0
    assert done.stdout == "http://127.0.0.1:9\n"
