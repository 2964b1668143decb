"""The mix: its syntax, what it covers on a given server, and the order of requests."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.mix import MixError, MixItem, Operation, RoundRobin, parse_mix, resolve_mix
from loadtest.outcomes import Generator, Outcome, share_interval
from loadtest.plan import LabelledError, Plan, PromptsError
from loadtest.schedule import Terms, parse_levels
from loadtest.target import Ask, Offer

OFFERS = (
    Offer("shakespeare", "generate", (1, 2, 4, 8), max_tokens=40),
    Offer("sentiment", "classify", (1, 2, 4), max_tokens=None, labels=("bad", "good")),
    Offer("topics", "classify", (1, 4), max_tokens=None, efforts=("low",)),
)


def test_items_are_read_in_order() -> None:
    assert parse_mix("generate:1=2, classify@topics:4=0.5,classify:*") == [
        MixItem("generate", None, Ask(1), 2.0),
        MixItem("classify", "topics", Ask(4), 0.5),
        MixItem("classify", None, None, 1.0),
    ]


def test_budgets_of_every_kind_can_be_asked_for() -> None:
    text = (
        "completions-whole:low,generate-whole:50ms+min2+max8,classify:disagree0.05,classify:default"
    )
    assert [wish.ask for wish in parse_mix(text)] == [
        Ask(effort="low"),
        Ask(deadline_ms=50.0, min_steps=2, max_steps=8),
        Ask(max_disagreement=0.05),
        Ask(),
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
        ("translate:1=2", "there are classify, generate, "),
        ("classify:4+8", "says steps twice"),
        ("classify:1.2.3ms", "no budget"),
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
        Operation("classify", "sentiment", Ask(4)): 1.5,
        Operation("classify", "topics", Ask(4)): 2.5,
        **{Operation("generate", "shakespeare", Ask(steps)): 0.5 for steps in (1, 2, 4, 8)},
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("classify:3=1", r"has 3 steps. Step counts: sentiment: 1, 2, 4; topics: 1, 4"),
        ("classify@topics:2=1", r"Step counts: topics: 1, 4"),
        ("classify@shakespeare:1=1", r"classify@sentiment"),
        ("generate@nobody:1=1", r"generate@shakespeare"),
        ("classify@sentiment:low", r"has effort=low"),
        ("classify@sentiment:low", r"has effort=low"),
    ],
)
def test_what_the_server_lacks_is_refused_with_what_it_has(text: str, says: str) -> None:
    with pytest.raises(MixError, match=says):
        resolve_mix(text, OFFERS)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_the_turns_keep_the_proportions(weights: list[int], rounds: int) -> None:
    operations = {Operation("classify", "m", Ask(steps)): w for steps, w in enumerate(weights)}
    turns = RoundRobin({operation: float(weight) for operation, weight in operations.items()})
    # A whole number of rounds and of cycles, where the proportions are exact.
    count = rounds * sum(weights) * 4 * len(weights)
    counts = Counter(turns.next() for _ in range(count))
    for operation, weight in operations.items():
        assert counts[operation] == count * weight // sum(weights)


def test_no_operations_are_refused() -> None:
    with pytest.raises(MixError):
        RoundRobin({})


def bodies(terms: Terms, offers: Sequence[Offer] = OFFERS, count: int = 20) -> list[dict[str, Any]]:
    plan = Plan(terms, offers)
    return [json.loads(plan.next_request()[1]) for _ in range(count)]


@pytest.mark.parametrize("unsent", [0, 1])
def test_what_was_sent_whole_is_no_test_that_ended_early(unsent: int) -> None:
    terms = Terms(mix="generate:8=1", shape="onoff", rates=parse_levels("10"), duration_s=2.0)
    plan = Plan(terms, OFFERS)
    assert plan.schedule is not None
    sent = len(plan.schedule.shots) - unsent
    plan.begin_s, plan.ended_s = 1000.0, 1000.6  # all are due in the begin of a period
    plan.note("one", sent, Generator(0.1, 0.1))
    plan.outcomes = [
        Outcome(shot.operation, shot.due_s + 1000.0, 5.0) for shot in plan.schedule.shots[:sent]
    ]
    report = plan.report(1000.6)
    assert report.ended_early == bool(unsent)
    took_s = 0.6 if unsent else 2.0
    assert report.stages[0].offered_per_s == pytest.approx(sent / took_s)


def test_prompts_leave_half_the_window_to_the_answer() -> None:
    for body in bodies(Terms(mix="generate:8=1", max_tokens=500)):
        assert body["model"] == "shakespeare"
        assert body["steps"] == 8
        assert body["stream"] is True
        assert 1 <= len(body["prompt"]) <= 20
        assert body["max_tokens"] == 500


def test_a_budget_is_sent_as_its_fields_and_nothing_else() -> None:
    [body] = bodies(Terms(mix="generate-whole:50ms+max4"), count=1)
    assert (body["deadline_ms"], body["max_steps"]) == (50.0, 4)
    assert not {"steps", "stream", "effort"} & body.keys()


def test_a_model_is_asked_with_its_own_examples() -> None:
    offer = Offer("listops", "classify", (1,), max_tokens=None, examples=("[MAX 1 2]",))
    assert bodies(Terms(), [offer], 1) == [{"model": "listops", "steps": 1, "input": "[MAX 1 2]"}]


def test_prompts_of_ones_own_are_sent_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('one\r\n\n{"prompt": "two\\nlines"}\n{"text": "three"}\n', encoding="utf-8")
    sent = bodies(Terms(mix="generate:1,chat-whole:1", prompts=str(file)), count=6)
    said = [body.get("prompt") or body["messages"][0]["content"] for body in sent]
    assert said == ["one", "two\nlines", "three"] * 2
    assert sum("messages" in body for body in sent) == 3
    for text, says in (("\n", "no prompt"), ("a\n{", "Line 2.*no JSON"), ('{"a": 1}', "must be")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(PromptsError, match=says):
            Plan(Terms(prompts=str(file)), OFFERS)
    with pytest.raises(PromptsError, match="the mix has none"):
        Plan(Terms(mix="classify@sentiment:1", prompts=str(file)), OFFERS)


def test_known_labels_make_answers_right_or_wrong(tmp_path: Path) -> None:
    file = tmp_path / "texts.tsv"
    file.write_text("so good\tgood\nso\tbad\tbad\n\n", encoding="utf-8")
    plan = Plan(Terms(mix="classify@sentiment:1", labels=str(file), seed=3), OFFERS)
    for _ in range(4):
        shot, body = plan.next_request()
        label = {"so good": "good", "so\tbad": "bad"}[json.loads(body)["input"]]
        assert plan.is_correct(shot, label) is True
        assert plan.is_correct(shot, "else") is False
    # Two texts answered a hundred times tell no more of the model than once.
    plan.outcomes = [Outcome(shot.operation, float(at), 5.0, correct=at < 100) for at in range(200)]
    [row] = plan.report(200.0).rows
    assert (row.known, row.accuracy, row.accuracy_interval) == (200, 0.5, share_interval(1, 2))
    with pytest.raises(LabelledError, match=r"knows all labels.*bad, good.*topics: unknown"):
        Plan(Terms(mix="classify@topics:1", labels=str(file)), OFFERS)
    file.write_text("no tab", encoding="utf-8")
    with pytest.raises(LabelledError, match="Line 1"):
        Plan(Terms(labels=str(file)), OFFERS)
