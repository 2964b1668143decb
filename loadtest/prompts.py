"""Prompts of the user's own: a file with one a line, as text or as JSON.

It deliberately knows nothing of the models that will read them.
"""

import json
from pathlib import Path

_KEYS = ("prompt", "text")


class PromptsError(ValueError):
    """The file of prompts cannot be used; the text says where and why."""


def read_prompts(path: Path) -> tuple[str, ...]:
    """All lines that are not empty, in order; a JSON object is asked for its prompt."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"The prompts {path} cannot be read: {error}") from None
    found = [
        _prompt(line.rstrip("\r"), f"Line {number} of {path}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise PromptsError(f"{path} holds no prompt.")
    return tuple(found)


def _prompt(line: str, where: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        read = json.loads(line)
    except ValueError as error:
        raise PromptsError(f"{where} is no JSON: {error}") from None
    said = next((read[key] for key in _KEYS if key in read), None)
    if not isinstance(said, str) or not said:
        raise PromptsError(f'{where} must be {{"prompt": "..."}}, or a line of plain text.')
    return said
