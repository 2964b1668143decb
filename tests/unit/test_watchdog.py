"""The watchdog: late calls are asked to end, those that do not are given up, and no others."""

from itertools import count
from typing import cast

import pytest

from serve.engine.engine import StallLimits, Watchdog
from serve.engine.job import LaneKey
from serve.engine.loaded import Call, Planner
from serve.metrics import Metrics

PATIENCE = StallLimits(stall_s=1.5, stall_unknown_s=10.0, stall_exit_s=5.0)
STEP_S = 0.125
NUMBERS = count(1)


def another() -> Call:
    """A call like no other."""
    return Call(cast(Planner, None), LaneKey("m", "classify", next(NUMBERS)), None, ())


class Notes(Watchdog):
    """A watchdog that writes down what it would do, on a clock that only moves when pushed."""

    def __init__(self, usual: float | None = 0.01) -> None:
        self.usual, self.now_s = usual, 0.0
        self.told: list[tuple[str, Call]] = []
        nothing = Metrics(), PATIENCE, lambda: self.now_s, lambda error: None, lambda: None
        super().__init__(*nothing)

    def usual_s(self, call: Call) -> float | None:
        return self.usual

    def interrupt(self, call: Call, seconds: float) -> None:
        self.told.append(("interrupt", call))

    def ended(self, call: Call) -> None:
        self.told.append(("ended", call))

    def give_up(self, call: Call, seconds: float) -> None:
        self.told.append(("give up", call))

    def late(self) -> bool:
        return self.late_s is not None

    def pass_s(self, seconds: float) -> None:
        """The watchdog looks on all the time."""
        for _ in range(round(seconds / STEP_S)):
            self.now_s += STEP_S
            self.look()

    def run(self) -> Call:
        call = another()
        self.begin(call)
        self.look()
        return call


@pytest.mark.parametrize(("usual", "limit_s"), [(0.01, 1.5), (0.15, 1.5), (0.5, 5.0), (None, 10.0)])
def test_a_call_is_late_when_it_takes_far_longer_than_usual(
    usual: float | None, limit_s: float
) -> None:
    notes = Notes(usual)
    call = notes.run()
    notes.pass_s(limit_s - STEP_S)
    assert not notes.told and notes.late_s is None
    notes.pass_s(STEP_S)
    assert notes.told == [("interrupt", call)] and notes.late_s == limit_s


def test_a_late_call_that_ends_is_forgotten() -> None:
    notes = Notes()
    late = notes.run()
    notes.pass_s(2)
    notes.end()
    assert notes.told == [("interrupt", late), ("ended", late)]
    assert not notes.late()
    for _ in range(30):
        notes.run()
        notes.pass_s(1)
        notes.end()
    notes.pass_s(60)
    assert len(notes.told) == 2


def test_a_late_call_that_does_not_end_is_given_up_once() -> None:
    notes = Notes()
    call = notes.run()
    notes.pass_s(1.5 + 5 - STEP_S)
    assert notes.told == [("interrupt", call)]
    notes.pass_s(30)
    assert notes.told == [("interrupt", call), ("give up", call)]
    assert notes.late()
    notes.end()
    assert notes.told[2:] == [("ended", call)] and not notes.late()
    other = notes.run()
    notes.pass_s(30)
    assert notes.told[3:] == [("interrupt", other), ("give up", other)]


def test_a_process_that_stood_still_is_no_late_call() -> None:
    notes = Notes()
    notes.run()
    notes.pass_s(0.5)
    notes.now_s += 3600
    notes.look()
    assert not notes.told


def test_what_is_known_may_change_while_a_call_runs() -> None:
    notes = Notes()
    notes.run()
    notes.pass_s(0.5)
    notes.usual = None
    notes.pass_s(0.5)
    notes.usual = 0.01
    notes.pass_s(8.5)
    assert not notes.told
    notes.pass_s(1)
    assert [what for what, _ in notes.told] == ["interrupt"]


def test_a_call_that_ends_while_it_is_found_late_is_not_asked() -> None:
    notes = Notes()
    notes.run()
    notes.pass_s(1.25)
    usual_s = notes.usual_s

    def end_meanwhile(call: Call) -> float | None:
        notes.end()
        notes.begin(another())
        return usual_s(call)

    notes.usual_s = end_meanwhile  # type: ignore[method-assign]  # the moment before it is asked
    notes.pass_s(1)
    assert not notes.told and notes.late_s is None
