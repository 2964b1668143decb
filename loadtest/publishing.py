"""What becomes of a report when its test is over: it is told, kept, and turned into a status.

It deliberately knows nothing of how tests run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.outcomes import Outcome
from loadtest.report import Report
from loadtest.say import room, say
from loadtest.tables import UNLIMITED, render_text


def publish(report: Report, outcomes: Sequence[Outcome] | None, path: Path | None) -> int:
    """Tell it, and keep it where it is wanted, with each request if given; the exit status."""
    say("\n" + render_text(report, room(UNLIMITED)))
    if path is not None:
        # Draws pictures, which takes a second to load: only who wants them waits for it.
        from loadtest.writing import keep

        try:
            keep(report, outcomes, path)
        except OSError as error:
            say(f"The report could not be written to {path}: {error}.", sys.stderr)
            return 2
        say(f"Report written to {path}.")
    return 0 if report.passed else 1
