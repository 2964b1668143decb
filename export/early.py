"""Certified early answers: how far ahead a jump's best class must be for its answer to be given.

A row stops at the first evaluation whose largest logit is ahead of the second by the threshold. A
row with a label at each position stops where the least sure of them is; its answer differs if any
position does. Logits are used because probabilities order the errors no better and saturate at 1 in
float32.

A level is certified by fixed-sequence testing. The thresholds are fixed before any answer is seen,
from strict to loose; each is tested with the exact (Clopper-Pearson) bound on the share of rows
whose early answer differs from the full one, and the first that fails ends the sequence. A wrong
certificate needs the first threshold that is really too loose to pass its one test, so the
confidence is that of one test, however many thresholds there are. It holds for each level alone.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from serve.bundle import Calibration, Level
from serve.runtime.classifier import Present, ahead
from serve.runtime.protocol import FloatArray

CONFIDENCE = 0.95
REFUSED = "requests with max_disagreement will be refused"
MIN_ROWS = 3000  # with fewer, hardly a threshold passes at the strict levels
LEVELS = (0.002, 0.005, 0.01, 0.02, 0.05)
# From beyond any trained logit down to "always": parts of an octave suit logits of any scale.
THRESHOLDS = (*(round(64.0 * 2.0 ** (-k / 32), 4) for k in range(32 * 10 + 1)), 0.0)


class Jumps(NamedTuple):
    """The answers to some rows after each of M evaluations."""

    logits: FloatArray  # (M, B, C), or (M, B, N, C) of a label at each position
    present: Present | None = None  # (B, N): which of them are no padding


class _Answers(NamedTuple):
    ahead: npt.NDArray[np.float32]  # (M, R): the largest margin up to this evaluation
    differs: npt.NDArray[np.bool_]  # (M, R): whether the answer is another than the last


class _Outcomes(NamedTuple):
    """What stopping at each threshold comes to on all rows."""

    differing: npt.NDArray[np.intp]  # (thresholds,): rows whose answer is not the full one
    evaluations: npt.NDArray[np.float64]  # (thresholds,): in the mean over the rows


def certify(
    jumps: Iterable[Jumps],
    source: str,
    say: Callable[[str], None] = print,
    endings: bool = False,
) -> Calibration | None:
    """Thresholds from answers after each of M evaluations, the last of which is the full one.

    With endings an answer before that takes one of its own, so that a row that goes on costs two.
    None, having said so, where there are too few rows.
    """
    answers = _gathered(jumps)
    rows = answers.differs.shape[1]
    if rows < MIN_ROWS:
        say(
            f"{REFUSED}: to measure it takes {MIN_ROWS:,} held-out rows, and there are {rows:,}. "
            "Everything else works. With more rows, train again with a larger data.held_out"
        )
        return None
    outcomes = _outcomes(answers, 2 if endings else 1)
    levels = tuple(_level(level, outcomes, answers) for level in LEVELS)
    return Calibration(rows, CONFIDENCE, source, levels)


def most_differing(rows: int, share: float) -> int:
    """The most differing rows that still put the exact upper bound at or below a share; else -1.

    The bound of `count` is at most `share` just where Binomial(rows, share) is rarely <= count.
    """
    below = 0.0
    for count in range(rows + 1):
        ways = math.lgamma(rows + 1) - math.lgamma(count + 1) - math.lgamma(rows - count + 1)
        below += math.exp(ways + count * math.log(share) + (rows - count) * math.log1p(-share))
        if below > 1 - CONFIDENCE:
            return count - 1
    return rows


def _level(share: float, outcomes: _Outcomes, answers: _Answers) -> Level:
    """The loosest threshold before the first that fails; none if it costs more than all steps."""
    full, rows = answers.differs.shape
    most = most_differing(rows, share)
    certified = Level(share, None, float(full), 0.0)
    for threshold, differing, evaluations in zip(THRESHOLDS, *outcomes, strict=True):
        if differing > most:
            break
        if evaluations <= full:
            certified = Level(share, threshold, float(evaluations), float(differing / rows))
    return certified


def _gathered(jumps: Iterable[Jumps]) -> _Answers:
    """Batch by batch, so that the logits of all rows are never held at once."""
    batches = [_answered(*one) for one in jumps]
    if not batches:
        return _Answers(np.zeros((1, 0), np.float32), np.zeros((1, 0), np.bool_))
    ahead = np.concatenate([batch.ahead for batch in batches], axis=1)
    return _Answers(ahead, np.concatenate([batch.differs for batch in batches], axis=1))


def _answered(logits: FloatArray, present: Present | None) -> _Answers:
    labels = logits.argmax(-1)  # (M, B), or (M, B, N)
    differs = labels != labels[-1]
    if present is not None:
        differs = (differs & present).any(axis=-1)
    return _Answers(np.maximum.accumulate(ahead(logits, present)), differs)


def _outcomes(answers: _Answers, going_on_costs: int) -> _Outcomes:
    """For all thresholds at once: a row has not stopped where all margins so far lie below."""
    full, rows = answers.differs.shape
    differing = np.zeros(len(THRESHOLDS), np.intp)
    going_on = np.zeros(len(THRESHOLDS), np.intp)
    before = np.full(rows, -np.inf, np.float32)
    for margins, differs in zip(answers.ahead[: full - 1], answers.differs, strict=False):
        # Of the rows that would differ here: those that get here, less those that go on.
        differing += _below(before[differs]) - _below(margins[differs])
        going_on += _below(margins)
        before = margins
    return _Outcomes(differing, 1 + going_on_costs * going_on / rows)


def _below(margins: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
    """How many margins lie below each threshold."""
    return np.searchsorted(np.sort(margins), np.array(THRESHOLDS, np.float32))
