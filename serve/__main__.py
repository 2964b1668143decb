"""The command `stepdial serve`, also `python -m serve`.

The server itself is imported late, because that takes a moment and a signal may come before.
"""

import gc
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
        gc.disable()  # imports leave no garbage, and looking for it takes a tenth of their time
        from serve.command import command

        gc.enable()
        return command(line, early.repeat)


class EarlySignals:
    """Signals before there is a server: SIGTERM ends the process, SIGHUP is kept for later."""

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
        """Hand the signals that came before to the server."""
        if self._hung_up:
            self._hung_up = False
            signal.raise_signal(signal.SIGHUP)

    def _end(self, sig: int, frame: FrameType | None) -> None:
        # Nothing was accepted yet, and threads that load models cannot be told to end.
        os._exit(_ENDED)

    def _keep(self, sig: int, frame: FrameType | None) -> None:
        self._hung_up = True


if __name__ == "__main__":
    sys.exit(main())
