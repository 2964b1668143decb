"""docs/errors.md has every error of the server, and quotes messages that the code still says."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.errors import ServeError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
SOURCES = [
    *(ROOT / name for name in ("serve", "train", "export", "loadtest")),
    ROOT / "stepdial.py",
]
_HEADING = re.compile(r"^### `(\w+)`: (\d+)$", re.MULTILINE)
_TABLE = re.compile(r"^\| message \| what to do \|\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)
_MESSAGE = re.compile(r"^\| (`{1,2}) ?(.*?) ?\1 \| ")
_ANY = "…"


def kinds(of: type[ServeError] = ServeError) -> Iterator[type[ServeError]]:
    """Those of the server; other parts document their own."""
    for kind in of.__subclasses__():
        if kind.__module__ == ServeError.__module__:
            yield kind
            yield from kinds(kind)


def said() -> set[str]:
    """Every text in the code, with `…` for what is put into it; and the lines of the Makefile."""
    texts = set((ROOT / "Makefile").read_text(encoding="utf-8").splitlines())
    for source in SOURCES:
        for path in [source] if source.is_file() else source.rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            texts |= {text for node in ast.walk(tree) if (text := flat(node)) is not None}
    return texts


def flat(node: ast.AST) -> str | None:
    match node:
        case ast.Constant(value=str() as text):
            # Of a log: its `%s` and `%d` are what is put into it.
            return re.sub(r"%[sd]", _ANY, text)
        case ast.JoinedStr(values=parts):
            return "".join(flat(part) or _ANY for part in parts)
    return None


def test_every_error_of_the_server_has_a_section_with_its_status() -> None:
    wanted = {(kind.code, str(kind.status)) for kind in kinds()}
    found = _HEADING.findall(PAGE)
    assert set(found) == wanted
    assert len(found) == len(wanted)


def quoted() -> list[str]:
    rows = [row for table in _TABLE.findall(PAGE) for row in table.splitlines()]
    found = [_MESSAGE.match(row) for row in rows]
    assert all(found), [row for row, match in zip(rows, found, strict=True) if not match]
    return [match[2] for match in found if match]


@pytest.fixture(scope="module")
def texts() -> set[str]:
    return said()


def test_every_message_on_the_page_is_one_that_the_code_says(texts: set[str]) -> None:
    messages = quoted()
    assert len(messages) > 100
    stale = [message for message in messages if not any(message in text for text in texts)]
    assert not stale


def test_the_page_names_the_torch_that_is_asked_for() -> None:
    pinned = re.findall(r"torch==[\d.]+", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(re.findall(r"torch==[\d.]+", PAGE)) == set(pinned)


def test_a_message_is_found_as_the_code_writes_it() -> None:
    tree = ast.parse('raise X(f"{a} does not offer {b!r} steps; " "it " f"has {c:,}")')
    texts = [text for node in ast.walk(tree) if (text := flat(node)) is not None]
    assert "… does not offer … steps; it has …" in texts
