"""What a caller of Stepdial can see of it, as text: HTTP routes and shapes, metrics, commands.

`python -m tests.contract.outside` renews the golden files beside this one.
"""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import stepdial
from docs import generate

GOLDEN = Path(__file__).parent / "golden"
COMMANDS = (
    *((name,) for name in (*stepdial.COMMANDS, "demo")),
    ("loadtest", "compare"),
)


def openapi() -> str:
    """The document of `/openapi.json`."""
    return json.dumps(generate.api_document(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def metrics() -> str:
    """Every metric: its name, type, labels and help text."""
    lines = [
        f"{name} {family.type} [{' '.join(labels)}] {family.documentation}"
        for name, (family, labels) in sorted(generate.instruments().items())
    ]
    return "\n".join(lines) + "\n"


def help_of(*command: str) -> str:
    """What a command prints for `--help`, in lines of 100 columns."""
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="100"),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        stepdial.main([*command, "--help"])
    return out.getvalue()


def files() -> Iterator[tuple[str, str]]:
    """Every golden file by its name, with what it must say."""
    yield "openapi.json", openapi()
    yield "metrics.txt", metrics()
    yield "help.txt", help_of()
    for command in COMMANDS:
        yield f"help-{'-'.join(command)}.txt", help_of(*command)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, text in files():
        (GOLDEN / name).write_text(text, encoding="utf-8")
