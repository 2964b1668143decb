"""The command `stepdial serve`, also `python -m serve`.

The server itself is imported late, because that takes a moment and a signal may come before.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_ENDED = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; returns the exit status of the process."""
    with early_signals() as repeat:
        from serve.settings import parse

        line = parse(sys.argv[1:] if argv is None else argv)  # `--help` ends here
        gc.disable()  # imports leave no garbage, and looking for it takes a tenth of their time
        from serve.command import command

        gc.enable()
        return command(line, repeat)


@contextmanager
def early_signals() -> Iterator[Callable[[], None]]:
    """Signals before there is a server: SIGTERM ends the process, SIGHUP is kept for later.

    What is given hands the server the signals that came before.
    """
    kept: list[int] = []

    def end(sig: int, frame: FrameType | None) -> None:
        # Nothing was accepted yet, and threads that load models cannot be told to end.
        os._exit(_ENDED)

    def repeat() -> None:
        if kept:
            kept.clear()
            signal.raise_signal(signal.SIGHUP)

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, end),
        signal.SIGHUP: signal.signal(signal.SIGHUP, lambda sig, frame: kept.append(sig)),
    }
    try:
        yield repeat
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
