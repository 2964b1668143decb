"""The command `stepdial serve`, also `python -m serve`.

What it does is in serve.command, which takes a moment to load; signals may come before that.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType, TracebackType

_ENDED = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; returns the exit status of the process."""
    with EarlySignals() as early:
        from serve.settings import parse

        line = parse(sys.argv[1:] if argv is None else argv)  # `--help` ends here
        from serve.command import command

        return command(line, early.repeat)


class EarlySignals:
    """Those that come before there is a server: SIGTERM ends the process, SIGHUP is kept for it."""

    def __enter__(self) -> "EarlySignals":
        self._hung_up = False
        wanted = {signal.SIGTERM: self._end, signal.SIGHUP: self._keep}
        self._before = {number: signal.signal(number, do) for number, do in wanted.items()}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def repeat(self) -> None:
        """There is a server now: tell it what came before."""
        if self._hung_up:
            self._hung_up = False
            signal.raise_signal(signal.SIGHUP)

    def _end(self, sig: int, frame: FrameType | None) -> None:
        # Nobody was promised anything yet, and threads that load could not be told to end.
        os._exit(_ENDED)

    def _keep(self, sig: int, frame: FrameType | None) -> None:
        self._hung_up = True


if __name__ == "__main__":
    sys.exit(main())
