"""What the scheduler does with more than it can serve, on a clock of its own; see simulated."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, cast

import pytest

from serve.api.body import ClassifyRequest, Reader
from serve.api.submission import Submission
from serve.engine.cost import IDLE_ANSWER_S, CostKey
from serve.engine.job import Deadline, Job, Limits
from serve.errors import ImpossibleDeadline, QueueFull, TooBusy
from serve.exchange import Exchange, OwnConnection
from serve.inputs.rows import InputRow
from serve.settings import Settings
from tests.simulated import LADDER, LATE, MODEL, Request, Simulation, capacity, poisson, usual_cost
from tests.stepped import classification

RATE = capacity(LADDER[-1])
LIMITS = Limits(degrade_wait_s=0.5)


def served(load: float, given_s: float | None, **fields: int) -> tuple[Simulation, list[Request]]:
    simulation = Simulation(LIMITS)
    requests = poisson(load * RATE, 6.0, 1, given_s, **fields)
    simulation.run(requests)
    assert simulation.idle
    return simulation, requests


def share(found: list[bool]) -> float:
    return sum(found) / len(found)


@pytest.mark.parametrize("given_s", [0.1, 0.25, 1.0])
@pytest.mark.parametrize(("load", "wanted"), [(1, 0.99), (2, 0.95), (4, 0.90)])
def test_with_fewer_steps_nearly_all_are_in_time(load: int, wanted: float, given_s: float) -> None:
    _, requests = served(load, given_s)
    assert share([request.in_time for request in requests]) >= wanted
    admitted = [request for request in requests if request.outcome in ("done", "lapsed")]
    assert share([request.in_time for request in admitted]) >= 0.999


def test_who_is_admitted_is_in_time_though_the_machine_becomes_slower_now_and_then() -> None:
    def cost(steps: int, rows: int, length: int) -> float:
        slow = simulation is not None and simulation.now_s % 1.0 > 0.6
        return (1.4 if slow else 1.0) * usual_cost(steps, rows, length)

    simulation = None
    simulation = Simulation(LIMITS, cost)
    requests = poisson(1.1 * capacity(LADDER[0]), 12.0, 1, 0.25)  # too many even at one step
    simulation.run(requests)
    outcomes = Counter(request.outcome for request in requests)
    assert outcomes["too_busy"] > 100 and outcomes["done"] > 0.75 * len(requests)
    admitted = [request for request in requests if request.outcome in ("done", "lapsed")]
    assert share([request.in_time for request in admitted]) >= 0.999


def test_who_is_refused_unread_would_be_refused_in_any_case() -> None:
    class EngineGauges(Simulation):
        refused = missed = 0

        def arrive(self, request: Request) -> Job | None:
            assert request.given_s is not None
            now_s, unread = max(self.now_s, request.at_s), False
            try:
                deadline = Deadline(request.at_s, request.given_s)
                self.engine.now_s = now_s
                self.engine.check_early(LATE, LADDER[0], (1,), (128,), deadline)
            except TooBusy:
                unread = True
            job = super().arrive(request)
            self.refused += unread
            self.missed += request.outcome == "too_busy" and not unread
            assert not unread or request.outcome == "too_busy"
            return job

    simulation = EngineGauges(LIMITS)
    requests = poisson(16 * RATE, 3.0, 1, 0.25)
    requests += poisson(RATE, 3.0, 2, 0.1)  # those go before others that wait
    simulation.run(requests)
    assert simulation.refused > 500
    assert simulation.missed < 0.2 * simulation.refused


def test_what_no_text_could_meet_is_refused_unread() -> None:
    simulation = Simulation(LIMITS)
    simulation.run(poisson(RATE, 0.5, 1, 0.25))
    engine = simulation.engine
    with pytest.raises(ImpossibleDeadline, match="even on an idle server"):
        engine.check_early(LATE, LADDER[0], (1,), (128,), Deadline(engine.now_s, 1e-6))


def test_the_least_time_that_a_busy_server_names_is_enough_for_an_idle_one() -> None:
    simulation = Simulation(LIMITS, noise=0.0)
    busy, refused = Request(0.0, (64,)), Request(1e-4, (128,) * 40, 0.001)
    simulation.run([busy, refused])
    assert refused.outcome == "impossible_deadline" and refused.least_s is not None
    assert not simulation.call()  # it rests
    again = Request(simulation.now_s, (128,) * 40, refused.least_s)
    simulation.run([again])
    assert again.outcome == "done"


def test_a_slowly_sent_body_makes_no_short_deadline_impossible() -> None:
    simulation = Simulation(LIMITS)
    alone_s = usual_cost(LADDER[0], 1, 64) + IDLE_ANSWER_S
    simulation.engine.now_s = 3.0  # when it is there
    slow = Request(0.0, (64,), 1.5 * alone_s)
    simulation.run([slow])
    assert slow.outcome == "deadline_lapsed"


@pytest.mark.parametrize("characters", [400, 40_000])
def test_the_least_time_that_is_named_is_that_of_the_text(characters: int) -> None:
    simulation = Simulation(LIMITS)
    simulation.run(poisson(RATE, 0.5, 1, 0.25))
    engine = simulation.engine
    exchange = Exchange(engine.now_s, connection=cast(OwnConnection, object()))
    asked = ClassifyRequest.model_validate({"input": "-", "deadline_ms": 0.01})
    submission = Submission.of(exchange, engine, engine.catalog.find(MODEL), asked)
    engine.submit(classification(submission._lane(), (8,), lambda event: None, choices=(1,)))
    while engine.jobs():
        engine.step()

    reader = Reader(Settings(), engine)

    def read() -> list[InputRow]:
        time.sleep(0.001)  # longer than the deadline
        return [InputRow([1] * 128)]

    async def ask() -> None:
        await submission.classify(reader, 1, characters, read)

    with pytest.raises(ImpossibleDeadline) as error:
        asyncio.run(ask())
    reader.close()
    least_s = error.value.details["least_ms"] / 1000
    again = Request(engine.now_s, (128,), least_s)
    simulation.run([again])
    assert again.outcome == "done"


def test_one_row_on_an_idle_server_has_the_time_of_one_row_however_full_batches_were() -> None:
    simulation = Simulation(LIMITS)
    simulation.run(poisson(4 * RATE, 1.0, 1, 0.25))
    alone_s = usual_cost(LADDER[0], 1, 64) + IDLE_ANSWER_S
    usual_rows = round(median(len(call.rows) for call in simulation.calls))
    assert usual_cost(LADDER[0], usual_rows, 64) > 1.5 * alone_s
    after = [Request(10.0 + number, (64,), 1.3 * alone_s) for number in range(5)]
    simulation.run(after)
    assert {request.outcome for request in after} == {"done"}


def test_with_full_steps_only_as_many_as_there_is_time_for() -> None:
    _, requests = served(4, 0.25, steps=LADDER[-1])
    assert 0.15 <= share([request.in_time for request in requests]) <= 0.3
    outcomes = Counter(request.outcome for request in requests)
    assert outcomes["too_busy"] > 20 * outcomes["lapsed"]


def test_the_more_comes_the_fewer_steps() -> None:
    means = []
    for load in (0.3, 1.5, 3, 6):
        _, requests = served(load, 0.25)
        steps = [one for request in requests for one in request.taken]
        means.append(sum(steps) / len(steps))
    assert means[0] > 7.9 and means == sorted(means, reverse=True) and means[-1] < 2


def test_who_names_nothing_gets_fewer_steps_before_anyone_is_refused() -> None:
    _, requests = served(3, None)
    assert {request.outcome for request in requests} == {"done"}
    steps = [one for request in requests for one in request.taken]
    assert sum(steps) / len(steps) < 5 and max(steps) == LADDER[-1]
    # It comes back as the queue drains, and it does not flap.
    after = Request(1000.0, (64,))
    simulation = Simulation(LIMITS)
    simulation.run([*requests_again(requests), after])
    assert after.taken == [LADDER[-1]]
    chosen = [call.steps for call in simulation.calls]
    changes = sum(one != other for one, other in pairwise(chosen))
    assert changes < len(chosen) / 4


def requests_again(requests: list[Request]) -> list[Request]:
    return [Request(one.at_s, one.lengths, one.given_s) for one in requests]


def test_switched_off_nobody_gets_fewer() -> None:
    simulation = Simulation(Limits(degrade_wait_s=None, queue_requests=10_000))
    requests = poisson(2 * RATE, 2.0, 1, None)
    simulation.run(requests)
    assert {one for request in requests for one in request.taken} == {LADDER[-1]}


def test_min_steps_hold_whatever_comes() -> None:
    simulation = Simulation(LIMITS)
    requests = poisson(3 * RATE, 4.0, 1, 0.25, choices=(4, 8))
    requests += poisson(RATE, 4.0, 2, None, choices=(2, 4))
    simulation.run(requests)
    assert {one for request in requests for one in request.taken} == {2, 4, 8}
    for request in requests:
        assert set(request.taken) <= set(request.choices)


def test_one_large_request_on_an_idle_server_is_not_overload() -> None:
    simulation = Simulation(LIMITS)
    request = Request(0.0, (100,) * 64)
    simulation.run([request])
    assert set(request.taken) == {LADDER[-1]}
    assert request.ended_s > 0.5


def test_an_idle_server_takes_the_most_steps_that_make_it() -> None:
    for steps in LADDER:
        # A little more than what these steps take, and less than the next ones.
        given_s = 1.25 * usual_cost(steps, 1, 128) + 0.003
        simulation = Simulation(LIMITS, noise=0.0)
        request = Request(0.0, (128,), given_s)
        simulation.run([request])
        assert (request.outcome, request.taken) == ("done", [steps])


def test_what_is_impossible_even_when_idle_says_so() -> None:
    simulation = Simulation(LIMITS)
    request = Request(0.0, (64,), 0.5 * usual_cost(8, 1, 64), steps=8)
    simulation.run([request])
    assert request.outcome == "impossible_deadline"


@pytest.mark.parametrize("lengths", [(512, *(8,) * 15), (8, *(500, 8, 8, 8) * 5)])
def test_short_texts_are_not_taken_to_be_as_long_as_the_longest_beside_them(
    lengths: tuple[int, ...],
) -> None:
    alone = Request(0.0, lengths, steps=1)
    Simulation(LIMITS, noise=0.0).run([alone])
    for share_given, outcome in ((0.9, "impossible_deadline"), (2.5, "done")):
        simulation = Simulation(LIMITS, noise=0.0)
        request = Request(0.0, lengths, share_given * alone.ended_s, steps=1)
        simulation.run([request])
        assert request.outcome == outcome


def test_tight_deadlines_get_small_batches() -> None:
    simulation = Simulation(LIMITS)
    given_s = 3 * usual_cost(1, 1, 64)
    requests = [Request(0.0, (64,), given_s) for _ in range(16)]
    simulation.run(requests)
    done = [request for request in requests if request.outcome == "done"]
    assert done and all(request.in_time for request in done)
    assert max(len(call.rows) for call in simulation.calls) < 16


def test_rows_without_a_deadline_do_not_starve_behind_rows_that_have_one() -> None:
    simulation = Simulation(LIMITS)
    patient = [Request(0.5, (64,), None, choices=(1,))]
    requests = poisson(8 * RATE, 6.0, 1, 0.25)
    simulation.run([*requests, *patient])
    assert patient[0].outcome == "done" and patient[0].ended_s < 3.0


def burst_of(steps: int | None, places: int) -> list[Request]:
    """What became of requests that came all at once, their times counted from then."""
    simulation = Simulation(Limits(queue_requests=places, degrade_wait_s=0.5))
    simulation.run(poisson(RATE, 3.0, 3, None, steps=steps))  # so that it knows the usual row
    begun_s = simulation.now_s
    burst = poisson(300, 1.2, 4, None, steps=steps)
    for request in burst:
        request.at_s = begun_s + 1e-4 * request.at_s
    simulation.run(burst)
    for request in burst:
        request.at_s, request.ended_s = request.at_s - begun_s, request.ended_s - begun_s
    return burst


def test_a_refusal_says_how_long_until_its_turn() -> None:
    burst = burst_of(8, 200)
    refused = [request for request in burst if request.outcome == "queue_full"]
    assert len(refused) > 50
    ends_s = sorted(request.ended_s for request in burst_of(8, 100_000))
    turns_s = ends_s[len(burst) - len(refused) - 1 :]  # where all have a place
    for request, turn_s in zip(refused, turns_s, strict=False):
        assert request.retry_after_s == pytest.approx(turn_s - request.at_s, rel=0.25)


def test_nobody_is_told_to_wait_for_longer_than_the_queue_may_be() -> None:
    """Those that were refused before may never come: a flood of them is no reason to wait long."""
    told_s, drained_s = {}, {}
    for wait_s in (math.inf, 2.0):
        simulation = Simulation(Limits(queue_requests=8, queue_wait_s=wait_s))
        burst = [Request(1e-4 * number, (128,) * 64, steps=8) for number in range(200)]
        simulation.run(burst)
        told_s[wait_s] = [one.retry_after_s for one in burst if one.outcome == "queue_full"]
        drained_s[wait_s] = max(one.ended_s for one in burst if one.outcome == "done")
    assert max(told_s[math.inf]) > 1.5 * drained_s[math.inf] and len(told_s[2.0]) > 100
    assert 0 < max(told_s[2.0]) <= 1.25 * max(2.0, drained_s[2.0])


def test_with_fewer_steps_the_wait_is_shorter_and_a_refusal_says_so() -> None:
    burst = burst_of(None, 200)
    first = next(request for request in burst if request.outcome == "queue_full")
    drained_s = max(request.ended_s for request in burst if request.outcome == "done")
    assert first.retry_after_s == pytest.approx(drained_s - first.at_s, rel=0.25)


def test_the_queue_is_bounded_by_its_predicted_wait_too() -> None:
    simulation = Simulation(Limits(queue_requests=100_000, queue_wait_s=4.0))
    requests = [Request(0.0, (128,) * 64, steps=8) for _ in range(40)]
    simulation.run(requests)
    outcomes = Counter(request.outcome for request in requests)
    assert outcomes["queue_full"] > 20
    done = [request.ended_s for request in requests if request.outcome == "done"]
    assert 2.5 < max(done) < 8.0


@pytest.mark.parametrize("given_s", [None, 60.0])
def test_so_is_the_wait_to_be_read_however_late_the_deadline(given_s: float | None) -> None:
    engine = Simulation(Limits(queue_wait_s=4.0)).engine
    deadline = None if given_s is None else Deadline(engine.now_s, given_s)
    engine.check_unread(3.9, deadline)
    with pytest.raises(QueueFull) as refused:
        engine.check_unread(4.1, deadline)
    assert (refused.value.code, refused.value.retry_after_s) == ("queue_full", 4.1)


def test_who_will_be_in_time_is_not_refused_for_the_wait_of_others() -> None:
    simulation = Simulation(Limits(queue_requests=100_000, queue_wait_s=4.0))
    patient = [Request(0.0, (128,) * 64, steps=8) for _ in range(40)]
    urgent = [Request(0.0, (64,), given_s=0.5) for _ in range(4)]
    simulation.run([*patient, *urgent])
    assert "queue_full" in {request.outcome for request in patient}
    assert all(request.in_time for request in urgent)


def test_a_decision_is_quick() -> None:
    simulation = Simulation(LIMITS)
    requests = poisson(4 * RATE, 3.0, 1, 0.25)
    seconds = []
    backlog = simulation.engine._backlog
    check = backlog.check

    def timed(jobs: Sequence[Any], now_s: float) -> None:
        begun_s = time.thread_time()
        check(jobs, now_s)
        seconds.append(time.thread_time() - begun_s)

    # One simulation's own backlog, so that what it is asked for is timed as it comes.
    backlog.check = timed  # type: ignore[method-assign]
    simulation.run(requests)
    assert sorted(seconds)[len(seconds) // 2] <= 50e-6


def test_what_cannot_be_in_time_any_more_is_given_up_before_its_deadline() -> None:
    simulation = Simulation(Limits(), noise=0.0)
    job = simulation.arrive(Request(0.0, (64,), given_s=0.05))
    cost, engine = simulation.cost, simulation.engine
    call_s = cost.call_s(CostKey("classify", LADDER[0]), 1, 64)
    assert job is not None and call_s is not None
    least_s, answer_s = call_s * cost.caution, engine.answer.seconds
    assert engine.lapsed(0.05 - least_s - 1.5 * answer_s) == []
    # The call would fit, but its answer would not have left.
    assert engine.lapsed(0.05 - least_s - 0.5 * answer_s) == [job]
    assert engine.lapsed(0.05) == [job]


def test_who_comes_back_does_not_wait_again_for_what_ran_when_it_was_refused() -> None:
    simulation = Simulation(Limits(queue_requests=1, degrade_wait_s=0.5))
    simulation.run(poisson(RATE, 3.0, 3, None, steps=8))
    now_s = simulation.now_s
    long = Request(now_s, (128,) * 4, steps=8)
    waits, first, second = (Request(now_s + 1e-3 * place, (32,), steps=8) for place in (1, 2, 3))
    simulation.run([long, waits, first, second])
    assert [one.outcome for one in (first, second)] == ["queue_full"] * 2
    assert first.retry_after_s == pytest.approx(waits.ended_s - first.at_s, rel=0.25)
    assert simulation.calls[-2].rows[0][0].lengths == long.lengths
    again_s = waits.ended_s + (waits.ended_s - long.ended_s)
    assert second.retry_after_s == pytest.approx(again_s - second.at_s, rel=0.25)
