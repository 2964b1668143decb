"""How long a caller of a closed loop rests before it asks again.

People who are told to come back later do, and where nobody answers they do not knock without a
pause; without that, a few callers would fill a report with what one refusal was.
It deliberately knows nothing of how resting is done.
"""

from loadtest.outcomes import Outcome

_KNOCK_S = 1.0  # between two attempts where there is no server


def rest_s(outcome: Outcome, most_s: float) -> float:
    """Seconds from the end of a request to the next."""
    if outcome.retry_after_s is not None:
        return min(outcome.retry_after_s, most_s)
    if outcome.error is not None and outcome.status is None:
        return min(max(_KNOCK_S - outcome.total_ms / 1e3, 0.0), most_s)
    return 0.0
