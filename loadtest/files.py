"""Files that are there whole or not at all, and whether a place can be written to.

It deliberately knows nothing of what is written.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """A file of text."""
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside it first, so that a full disk leaves no half of a file, and the old one."""
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def unwritable(path: Path) -> str | None:
    """Why no report could be kept there; None if one can."""
    folder = path.parent if path.suffix == ".json" else path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if folder != path and path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
    except OSError as error:
        return f"--out {path} cannot be written: {error.strerror or error}"
    return None
