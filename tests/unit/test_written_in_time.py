"""What is told of, and done about, too many generations, on a clock of its own; see simulated."""

import random

import pytest

from serve.engine.job import Deadline, Event, GeneratedEvent, Limits
from serve.errors import ImpossibleDeadline, TooBusy
from tests.simulated_writing import LADDER, Wish, WritingSimulation, lane_of
from tests.stepped import SteppedEngine, generation

SPARE = Limits(queue_requests=10_000)


def burst(steps: int) -> list[Wish]:
    return [Wish(1e-4 * number, 20, 32, steps=steps) for number in range(128)]


@pytest.mark.parametrize("steps", [1, 8])
def test_who_is_refused_is_told_the_time_until_its_turn(steps: int) -> None:
    wishes, all_taken = burst(steps), burst(steps)
    WritingSimulation(Limits(queue_requests=64)).run(wishes)
    WritingSimulation(SPARE).run(all_taken)
    refused = [wish for wish in wishes if wish.outcome == "queue_full"]
    turns_s = sorted(wish.begun_s for wish in all_taken)[-len(refused) :]
    assert len(refused) > 40
    for wish, turn_s in zip(refused, turns_s, strict=True):
        assert wish.told_s == [pytest.approx(turn_s - wish.ended_s, rel=0.25)]


@pytest.mark.parametrize("steps", [1, 8])
def test_who_comes_back_when_told_is_served_and_nobody_waits_for_them(steps: int) -> None:
    simulation = WritingSimulation(Limits(queue_requests=64), retries=2)
    no_refusal = WritingSimulation(SPARE)
    wishes = burst(steps)
    simulation.run(wishes)
    no_refusal.run(burst(steps))
    assert {wish.outcome for wish in wishes} == {"done"}
    assert {len(wish.told_s) for wish in wishes} == {0, 1}
    assert simulation.now_s < 1.2 * no_refusal.now_s


def arriving(load: float, count: int, given_s: float | None, steps: int | None) -> list[Wish]:
    """By chance, at this share of what the server sustains at full steps."""
    chance, at_s = random.Random(1), 0.0
    everything = [
        (chance.randint(5, 100), chance.randint(5, 60), chance.expovariate(1.0))
        for _ in range(count)
    ]
    whole = WritingSimulation(SPARE)
    whole.run([Wish(0.0, prompt, tokens, steps=LADDER[-1]) for prompt, tokens, _ in everything])
    wishes = []
    for prompt, tokens, gap in everything:
        at_s += gap * whole.now_s / count / load
        wishes.append(Wish(at_s, prompt, tokens, given_s, steps))
    return wishes


@pytest.mark.parametrize("most_lanes", [1, 4])
@pytest.mark.parametrize("load", [0.8, 1.5])
def test_with_fewer_steps_nearly_all_are_in_time(load: float, most_lanes: int) -> None:
    wishes = arriving(load, 400, 2.0, None)
    WritingSimulation(Limits(), most_lanes=most_lanes).run(wishes)
    assert sum(wish.in_time for wish in wishes) >= 0.97 * len(wishes)
    assert not [wish for wish in wishes if wish.outcome == "lapsed"]
    taken = [wish.taken for wish in wishes]
    assert (max(taken), sum(taken) / len(taken) > 4) == (LADDER[-1], True)


def test_with_full_steps_whoever_is_taken_in_is_in_time() -> None:
    wishes = arriving(1.5, 400, 2.0, LADDER[-1])
    WritingSimulation(Limits()).run(wishes)
    admitted = [wish for wish in wishes if wish.outcome in ("done", "lapsed")]
    assert 0.4 * len(wishes) < len(admitted) < 0.9 * len(wishes)
    assert sum(wish.in_time for wish in admitted) >= 0.97 * len(admitted)


def test_an_idle_server_takes_the_most_steps_that_make_it() -> None:
    for steps in LADDER:
        alone = Wish(0.0, 40, 40, steps=steps)
        WritingSimulation(Limits(), noise=0.0).run([alone])
        wish = Wish(0.0, 40, 40, 1.2 * alone.ended_s + 0.005)
        WritingSimulation(Limits(), noise=0.0).run([wish])
        assert (wish.outcome, wish.taken) == ("done", steps)


def test_short_prompts_are_not_taken_to_be_as_long_as_the_longest_beside_them() -> None:
    def submit(given_s: float | None) -> SteppedEngine:
        engine = WritingSimulation(Limits(), noise=0.0).engine
        deadline = None if given_s is None else Deadline(0.0, given_s)
        prompts = (200, *(5,) * 31)
        engine.submit(
            *[generation(lane_of(1), one, 16, events.append, deadline=deadline) for one in prompts]
        )
        while engine.jobs():
            engine.step()
        return engine

    events: list[Event] = []
    alone_s = submit(None).now_s
    submit(1.3 * alone_s)
    assert len(events) == 64 and all(isinstance(one, GeneratedEvent) for one in events)
    with pytest.raises(ImpossibleDeadline) as refused:
        submit(0.8 * alone_s)
    assert refused.value.details["least_ms"] == pytest.approx(1000 * alone_s, rel=0.1)


def test_the_least_time_that_a_busy_server_names_is_enough_for_an_idle_one() -> None:
    simulation = WritingSimulation(Limits(), noise=0.3)
    simulation.run([Wish(0.02 * number, 40, 40, steps=8) for number in range(60)])
    engine, events = simulation.engine, list[Event]()
    assert engine.model("m").cost.caution > 1.2
    engine.submit(generation(lane_of(8), 20, 5, events.append))
    engine.step()
    with pytest.raises(ImpossibleDeadline) as refused:
        engine.submit(
            generation(lane_of(8), 60, 60, events.append, deadline=Deadline(engine.now_s, 0.001))
        )
    while engine.jobs():
        engine.step()
    deadline = Deadline(engine.now_s, refused.value.details["least_ms"] / 1000)
    engine.submit(generation(lane_of(8), 60, 60, events.append, deadline=deadline))


def test_memory_that_others_hold_makes_no_time_impossible() -> None:
    def submit(tokens: int, count: int, steps: int, given_s: float | None = None) -> None:
        deadline = None if given_s is None else Deadline(engine.now_s, given_s)
        lane = lane_of(steps)
        engine.submit(
            *[generation(lane, 20, tokens, events.append, deadline=deadline) for _ in range(count)]
        )

    events: list[Event] = []
    engine = WritingSimulation(Limits(cache_bytes=17_000), noise=0.0).engine
    submit(40, 8, 1)
    while engine.jobs():
        engine.step()
    alone_s = engine.now_s
    submit(400, 4, 8)
    while len(engine.rows(lane_of(8))) < 4:
        engine.step()
    with pytest.raises(TooBusy):
        submit(40, 8, 1, 1.5 * alone_s)


def test_who_is_too_slow_beside_others_is_told_when_they_end() -> None:
    long = [Wish(0.0, 20, 300, steps=8) for _ in range(14)]
    late = Wish(0.3, 20, 40, 0.1, steps=1)
    WritingSimulation(Limits(), noise=0.0).run([*long, late])
    ended_s = min(wish.ended_s for wish in long)
    assert late.outcome == "too_busy" and ended_s > 1.0
    assert late.told_s == [pytest.approx(ended_s - late.at_s, rel=0.25)]


def test_who_is_late_behind_prompts_only_is_told_when_they_are_read() -> None:
    long = Wish(0.0, 20, 400, steps=8)
    reading = [Wish(0.3, 120, 2, steps=8) for _ in range(8)]
    late = Wish(0.301, 20, 5, 0.12, steps=1)
    WritingSimulation(Limits(), noise=0.0).run([long, *reading, late])
    assert late.outcome == "too_busy" and long.ended_s > 1.0
    assert 0 < late.told_s[0] < max(wish.ended_s for wish in reading) - late.at_s
