"""The quickest of several ways is found, used most, and left when another becomes quicker."""

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from serve.engine.tuner import Tuner

WAYS = ("a", "b", "c", "d")


def tuner() -> Tuner[str]:
    return Tuner(WAYS, trial_work=30, chosen_work=500)


def used(tried: Tuner[str], seconds: Mapping[str, float], work: int) -> Counter[str]:
    """Work done in each way, where a unit takes so many seconds."""
    done: Counter[str] = Counter()
    for unit in range(work):
        option = tried.option
        done[option] += 1
        tried.observe(1, seconds[option] * (1 + 0.2 * (unit % 3)))
    return done


@pytest.mark.parametrize("quickest", WAYS)
def test_the_quickest_way_is_found_and_used_most(quickest: str) -> None:
    seconds = {"a": 2.0, "b": 2.1, "c": 2.2, "d": 2.3} | {quickest: 1.6}
    done = used(tuner(), seconds, 5000)
    assert done[quickest] > 4200 and set(done) == set(WAYS)


def test_a_first_round_that_was_unlucky_is_not_believed_for_long() -> None:
    tried = tuner()
    unlucky = {"a": 9.0, "b": 2.0, "c": 2.0, "d": 2.0}
    used(tried, unlucky, 30 * len(WAYS))
    assert tried.best != "a"
    used(tried, unlucky | {"a": 1.0}, 2 * 500)
    assert tried.best == "a"


def test_another_way_takes_over_when_times_change() -> None:
    tried = tuner()
    assert used(tried, {"a": 1.0, "b": 2.0, "c": 2.0, "d": 2.0}, 2000).most_common(1)[0][0] == "a"
    later = used(tried, {"a": 3.0, "b": 2.0, "c": 1.0, "d": 2.0}, 9000)
    assert later.most_common(1)[0][0] == "c"


def test_one_way_is_no_choice() -> None:
    tried = Tuner(("only",), trial_work=1, chosen_work=1)
    for _ in range(5):
        tried.observe(1, 1.0)
        assert tried.option == "only"


def test_work_counts_and_not_how_often_it_is_told() -> None:
    tried = Tuner(("many", "few"), trial_work=100, chosen_work=1000)
    for _ in range(200):
        tried.observe(10 if tried.option == "many" else 50, 1.0)
    assert tried.best == "few"


def test_a_machine_that_is_slow_for_a_while_does_not_hide_the_quickest_way() -> None:
    """Now and then all takes three times as long, which is far more than the ways differ."""
    seconds, spent_s, units = {"a": 1.0, "b": 0.65, "c": 0.7}, 0.0, 20_000
    for seed in range(10):
        chance, tried = random.Random(seed), Tuner(("a", "b", "c"), trial_work=32, chosen_work=500)
        slower, left = 1.0, 0.0
        for _ in range(units):
            if left <= 0:
                slower, left = chance.choice((1.0, 1.0, 3.0)), chance.expovariate(1 / 300)
            left -= 1
            spent_s += seconds[tried.option]
            tried.observe(1, seconds[tried.option] * slower * chance.uniform(0.8, 1.4))
    assert spent_s / (10 * units) < 1.05 * seconds["b"]


def test_the_cost_of_a_change_is_not_counted() -> None:
    tried, option, since = Tuner((0, 1), trial_work=40, chosen_work=400), 0, 0
    for _ in range(1000):
        since = since + 1 if tried.option == option else 0
        option = tried.option
        tried.observe(1, (2.0, 1.5)[option] + (30.0 if option and since < 5 else 0.0))
    assert tried.best == 1


@pytest.mark.parametrize(("others", "rounds"), [(1.01, 12), (2.0, 2)])
def test_with_patience_ways_that_are_far_behind_are_tried_seldom(
    others: float, rounds: int
) -> None:
    tried = Tuner(("a", "b"), trial_work=30, chosen_work=500, patience=8)
    used(tried, {"a": 1.0, "b": others}, 5000)  # some rounds are known
    done = used(tried, {"a": 1.0, "b": others}, 12 * 900)
    assert abs(done["b"] - rounds * 30) <= 30


@pytest.mark.parametrize(("others", "best"), [(0.99, "a"), (0.9, "b")])
def test_the_first_way_may_be_favoured(others: float, best: str) -> None:
    tried = Tuner(("a", "b"), trial_work=30, chosen_work=100, favour=0.03)
    used(tried, {"a": 1.0, "b": others}, 2000)
    assert tried.best == best
