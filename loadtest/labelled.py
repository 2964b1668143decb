"""Texts whose labels are known: a file of `text<TAB>label` lines, given by the user.

It deliberately knows nothing of which model they are meant for.
"""

from dataclasses import dataclass
from pathlib import Path


class LabelledError(ValueError):
    """The file of labelled texts cannot be used; the text says where and why."""


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A text to classify, and the right answer."""

    text: str
    label: str


def read_labelled(path: Path) -> list[LabelledText]:
    """All lines that are not empty, in order."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LabelledError(f"The labelled texts {path} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text, tab, label = line.rstrip("\r").rpartition("\t")
        if not (tab and text.strip() and label.strip()):
            raise LabelledError(f"Line {number} of {path} is not text, a tab, and a label.")
        found.append(LabelledText(text, label.strip()))
    if not found:
        raise LabelledError(f"{path} holds no labelled text.")
    return found
