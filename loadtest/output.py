"""Files that are written whole or not at all, and messages on any terminal."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TextIO


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


# Prints a message for the person who runs a test, in what their terminal can show.


def room(otherwise: int) -> int:
    """Columns of the terminal; what is written to a file or to another program has `otherwise`."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else otherwise


def say(text: str, stream: TextIO | None = None) -> None:
    """A line for the terminal, or for the stream that is named."""
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
    except BrokenPipeError:
        # What is still said goes nowhere, and Python must not complain of it when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
