"""The fastest of several leads is found, used most, and left when another becomes faster."""

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from serve.engine.generate import LeadTuner

LEADS = (0, 1, 2, 4)
TRIAL, CHOSEN = 64, 1024  # tokens


def used(tried: LeadTuner, seconds: Mapping[int, float], tokens: int) -> Counter[int]:
    """Tokens decoded with each lead, where one takes so many seconds."""
    done: Counter[int] = Counter()
    for token in range(tokens):
        lead = tried.lead
        done[lead] += 1
        tried.observe(seconds[lead] * (1 + 0.2 * (token % 3)))
    return done


@pytest.mark.parametrize("fastest", LEADS)
def test_the_fastest_lead_is_found_and_used_most(fastest: int) -> None:
    seconds = {0: 2.0, 1: 2.1, 2: 2.2, 4: 2.3} | {fastest: 1.6}
    done = used(LeadTuner(LEADS), seconds, 12_000)
    assert done[fastest] > 9000 and set(done) == set(LEADS)


def test_a_first_round_that_was_unlucky_is_not_believed_for_long() -> None:
    tried = LeadTuner(LEADS)
    unlucky = {0: 9.0, 1: 2.0, 2: 2.0, 4: 2.0}
    used(tried, unlucky, TRIAL * len(LEADS))
    assert tried.best != 0
    used(tried, unlucky | {0: 1.0}, 2 * CHOSEN)
    assert tried.best == 0


def test_another_lead_takes_over_when_times_change() -> None:
    tried = LeadTuner(LEADS)
    assert used(tried, {0: 1.0, 1: 2.0, 2: 2.0, 4: 2.0}, 6000).most_common(1)[0][0] == 0
    later = used(tried, {0: 3.0, 1: 2.0, 2: 1.0, 4: 2.0}, 90_000)
    assert later.most_common(1)[0][0] == 2


def test_one_lead_is_no_choice() -> None:
    tried = LeadTuner((0,))
    used(tried, {0: 1.0}, 3 * CHOSEN)
    assert tried.lead == 0


def test_a_machine_that_is_slow_for_a_while_does_not_hide_the_fastest_lead() -> None:
    """Now and then all takes three times as long, which is far more than the leads differ."""
    seconds, spent_s, tokens = {0: 1.0, 1: 0.65, 2: 0.7}, 0.0, 40_000
    for seed in range(10):
        chance, tried = random.Random(seed), LeadTuner((0, 1, 2))
        slower, left = 1.0, 0.0
        for _ in range(tokens):
            if left <= 0:
                slower, left = chance.choice((1.0, 1.0, 3.0)), chance.expovariate(1 / 600)
            left -= 1
            spent_s += seconds[tried.lead]
            tried.observe(seconds[tried.lead] * slower * chance.uniform(0.8, 1.4))
    assert spent_s / (10 * tokens) < 1.05 * seconds[1]


def test_the_cost_of_a_change_is_not_counted() -> None:
    tried, lead, since = LeadTuner((0, 1)), 0, 0
    for _ in range(3000):
        since = since + 1 if tried.lead == lead else 0
        lead = tried.lead
        tried.observe((2.0, 1.5)[lead] + (30.0 if lead and since < 10 else 0.0))
    assert tried.best == 1


@pytest.mark.parametrize(("others", "rounds"), [(1.01, 12), (2.0, 2)])
def test_leads_that_are_far_behind_are_tried_seldom(others: float, rounds: int) -> None:
    tried = LeadTuner((0, 1))
    used(tried, {0: 1.0, 1: others}, 40_000)  # as many rounds as are kept
    done = used(tried, {0: 1.0, 1: others}, 12 * 3 * CHOSEN)
    assert abs(done[1] - rounds * TRIAL) <= TRIAL


@pytest.mark.parametrize(("others", "best"), [(0.95, 0), (0.85, 1)])
def test_running_ahead_must_gain_something(others: float, best: int) -> None:
    tried = LeadTuner((0, 1))
    used(tried, {0: 1.0, 1: others}, 10_000)
    assert tried.best == best
