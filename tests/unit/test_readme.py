"""The code blocks of the pages, run as a reader would run them; `tests/page_blocks.py` says how to
mark one.

Every `bash` and `python` block needs a mark, so that none is forgotten. Blocks run in the order of
the page, in one scratch folder where `zoo` and `train` are those of the repository and `stepdial`
is on the PATH. `127.0.0.1:8000` in a block means the server that the page started, or else one of
the zoo that runs here.
"""

import csv
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from tests.page_blocks import Block, prints_like, read_blocks, run_block, served
from tests.warm import CLIENT, ForkServer
from train.recipe import ModelConfig, StepsConfig

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/budgets.md",
    "docs/clients.md",
    "docs/own-data.md",
    "docs/quickstart.md",
    "docs/training.md",
)
EVERY_PAGE = [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]
_ZOO = Block("bash", "stepdial serve\n", "serve", "zoo")
_RUNNABLE = {"bash", "sh", "shell", "python"}
# The same commands as on the page, made short: few rows and iterations, a narrow model, two rungs.
_SHORT = """case "$1" in
train) set -- "$@" --set data.rows=500 --set optim.iterations=4 --set model.width=32 \\
    --set model.layers=1 --set run.evaluate_every=4 --set run.threads=1 ;;
evaluate) set -- "$@" --steps 1,2 ;;
export) set -- "$@" --steps 1,2 --no-calibrate ;;
esac
"""
# The command, in a process that need not import torch first.
_COMMAND = """#!/bin/sh
{short}
case "$1" in
train|evaluate|export|inspect|predict) exec "{python}" -I -c '{client}' {fork_server} "$@" ;;
*) exec "{stepdial}" "$@" ;;
esac
"""
_IMPORTED = (
    *("train.loop", "train.evaluate", "train.classifier_report", "lightning_fabric"),
    *("export.run", "tests.exporter", "serve.predict"),
    *("sklearn.feature_extraction.text", "sklearn.linear_model"),
    *("matplotlib.pyplot", "matplotlib.backends.backend_agg"),
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(_ZOO, tmp_path_factory.mktemp("zoo")) as found:
        yield found


@cache
def fork_server() -> str:
    """The name of a process that has imported what commands need."""
    return ForkServer(os.environ | {"PYTHONPATH": str(ROOT)}, "stepdial", *_IMPORTED).name


def prepare(page: str, folder: Path) -> list[Path]:
    """What a page expects in its folder; gives folders of commands."""
    for name in ("zoo", "train", "Makefile", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    # The environment that runs this test, in which `make` finds that all is installed.
    environment = folder / ".venv"
    environment.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (environment / name).symlink_to(Path(sys.prefix) / name)
    for stamp in (".created", ".installed-serve"):
        (environment / stamp).touch()
    short = page in ("README.md", "docs/own-data.md")
    program = folder / "programs" / "stepdial"
    program.parent.mkdir()
    program.write_text(
        _COMMAND.format(
            short=_SHORT if short else "",
            python=sys.executable,
            client=CLIENT,
            fork_server=fork_server(),
            stepdial=Path(sys.executable).with_name("stepdial"),
        )
    )
    program.chmod(0o755)
    if not short:
        return [program.parent]
    subjects = {"Sports": "the team won its match", "Business": "shares of the firm fell"}
    with (folder / "news.csv").open("w", encoding="utf-8", newline="") as file:
        rows = [
            (label, f"{text} on day {i}") for i in range(20) for label, text in subjects.items()
        ]
        csv.writer(file).writerows([("label", "text"), *rows])
    (folder / "book.txt").write_text("It is a truth that all men know.\n" * 400, encoding="utf-8")
    return [program.parent]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_runs_and_prints_what_it_shows(
    page: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    programs = prepare(page, tmp_path)
    blocks = read_blocks((ROOT / page).read_text(encoding="utf-8"))
    shown = {block.name: block for block in blocks if block.kind == "output"}
    tested = [block for block in blocks if block.kind in ("test", "serve")]
    assert tested, f"{page} marks no block with <!-- test: NAME -->"
    serves_itself = any(block.kind == "serve" for block in tested)
    address = "" if serves_itself else request.getfixturevalue("address")
    wrong = []
    with ExitStack() as servers:
        for block in tested:
            if block.kind == "serve":
                servers.close()
                address = servers.enter_context(served(block, tmp_path, programs))
                continue
            done = run_block(block, address, tmp_path, programs)
            if done.returncode != 0:
                said = f"{done.stdout}{done.stderr}"
                wrong.append(f"{block.name} failed ({done.returncode}):\n{said}")
                continue
            output = shown.get(block.name)
            if output and not prints_like(output.text, done.stdout, output.language):
                wrong.append(f"{block.name} printed:\n{done.stdout}\nnot:\n{output.text}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("page", sorted({*PAGES, *EVERY_PAGE}))
def test_no_block_is_forgotten(page: str) -> None:
    blocks = read_blocks((ROOT / page).read_text(encoding="utf-8"))
    for block in blocks:
        if block.language in _RUNNABLE:
            known = block.kind in ("test", "serve", "not tested")
            assert known, f"this block has no mark:\n{block.text}"
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
