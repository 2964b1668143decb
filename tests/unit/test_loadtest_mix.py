"""The mix: its syntax, what it covers on a given server, and the order of requests."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.mix import MixError, Operation, Rota, Wish, parse_mix, resolve_mix
from loadtest.plan import Plan, Terms
from loadtest.target import Offer

OFFERS = (
    Offer("shakespeare", "generate", (1, 2, 4, 8), max_tokens=40),
    Offer("sentiment", "classify", (1, 2, 4), max_tokens=None),
    Offer("topics", "classify", (1, 4), max_tokens=None),
)


def test_items_are_read_in_order() -> None:
    assert parse_mix("generate:1=2, classify@topics:4=0.5,classify:*") == [
        Wish("generate", None, 1, 2.0),
        Wish("classify", "topics", 4, 0.5),
        Wish("classify", None, None, 1.0),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        (" , ", "empty"),
        ("generate", "no item of a mix"),
        ("generate:one=2", "no item of a mix"),
        ("generate:1=-2", "no item of a mix"),
        ("generate:1=0", "above 0"),
        ("generate:1=1.2.3", "above 0"),
        ("translate:1=2", "there are classify and generate"),
    ],
)
def test_a_malformed_mix_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(MixError, match=says):
        parse_mix(text)


def test_by_default_every_rung_of_every_model_counts_the_same() -> None:
    weights = resolve_mix(None, OFFERS)
    assert len(weights) == 9
    assert set(weights.values()) == {1.0}


def test_a_weight_is_shared_by_what_the_item_covers() -> None:
    weights = resolve_mix("classify:4=3,generate:*=2,classify@topics:4=1", OFFERS)
    assert weights == {
        Operation("classify", "sentiment", 4): 1.5,
        Operation("classify", "topics", 4): 2.5,
        **{Operation("generate", "shakespeare", steps): 0.5 for steps in (1, 2, 4, 8)},
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("classify:3=1", r"has 3 steps. Ladders: sentiment: 1, 2, 4; topics: 1, 4"),
        ("classify@topics:2=1", r"Ladders: topics: 1, 4"),
        ("classify@shakespeare:1=1", r"classify@sentiment"),
        ("generate@nobody:1=1", r"generate@shakespeare"),
    ],
)
def test_what_the_server_lacks_is_refused_with_what_it_has(text: str, says: str) -> None:
    with pytest.raises(MixError, match=says):
        resolve_mix(text, OFFERS)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_the_rota_keeps_the_proportions(weights: list[int], rounds: int) -> None:
    operations = {Operation("classify", "m", steps): w for steps, w in enumerate(weights)}
    rota = Rota({operation: float(weight) for operation, weight in operations.items()})
    # A whole number of hands and of cycles, where the proportions are exact.
    count = rounds * sum(weights) * 4 * len(weights)
    dealt = Counter(rota.deal() for _ in range(count))
    for operation, weight in operations.items():
        assert dealt[operation] == count * weight // sum(weights)


def test_an_empty_rota_is_refused() -> None:
    with pytest.raises(MixError):
        Rota({})


def test_prompts_leave_half_the_window_to_the_answer() -> None:
    plan = Plan(Terms(mix="generate:8=1", max_tokens=500), OFFERS)
    for _ in range(20):
        operation, body = plan.next_request()
        assert body["model"] == "shakespeare"
        assert body["steps"] == operation.steps == 8
        assert body["stream"] is True
        assert 1 <= len(body["prompt"]) <= 20
        assert body["max_tokens"] == 500


def test_a_model_is_asked_with_its_own_examples() -> None:
    offer = Offer("listops", "classify", (1,), max_tokens=None, examples=("[MAX 1 2]",))
    _, body = Plan(Terms(), [offer]).next_request()
    assert body == {"model": "listops", "steps": 1, "input": "[MAX 1 2]"}
