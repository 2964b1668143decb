"""Says something to whoever runs a test, whatever their terminal can show.

A report must not be lost because its reader has gone, or knows no such letters.
It deliberately knows nothing of what is said.
"""

import os
import shutil
import sys
from typing import TextIO


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
