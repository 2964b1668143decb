"""The benchmarks of the dial beside plain models: what they count, say and draw."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ladders, overload
from benchmarks.client import Shot
from benchmarks.ladders import Point, at_latency, draw, kept, says
from benchmarks.overload import Arm, Outcome, Right
from benchmarks.texts import TaggedText, check_same_data, tagged_texts
from serve.bundle import Bundle
from tests.fixtures.tiny_folders import tag_bundle
from tests.fixtures.tiny_runs import tiny_logic_recipe


def trained_on(*overrides: str) -> Bundle:
    recipe = tiny_logic_recipe(Path(), *overrides).to_json()
    bundle = tag_bundle()
    manifest = replace(bundle.manifest, provenance={"recipe": recipe})
    return replace(bundle, manifest=manifest)


def test_held_out_puzzles_are_texts_with_the_labels_of_their_empty_cells() -> None:
    bundle = trained_on()
    texts = tagged_texts(bundle)
    assert 16 <= len(texts) < 40  # a fifth of 80 in whole forms
    for one in texts:
        assert len(one.text) == len(one.labels) == 36
        for cell, label in zip(one.text, one.labels, strict=True):
            assert (label is None) == (cell != ".") and (label is None or label in "123456")
    one = texts[0]
    answer = [label or cell for cell, label in zip(one.text, one.labels, strict=True)]
    empty = one.text.count(".")
    assert one.right(answer) == (empty, True)
    wrong = one.labels.index(next(label for label in one.labels if label is not None))
    answer[wrong] = "1" if answer[wrong] != "1" else "2"
    assert one.right(answer) == (empty - 1, False)
    check_same_data(bundle, [trained_on("optim.iterations=9")])
    with pytest.raises(SystemExit, match="was trained on other data"):
        check_same_data(bundle, [trained_on("data.rows=90")])


def test_words_that_are_not_tokens_are_refused() -> None:
    from tests.fixtures.tiny_folders import words_tag_bundle

    with pytest.raises(SystemExit, match="has tokens of bpe"):
        tagged_texts(words_tag_bundle())


TEXT = TaggedText("1..", (None, "2", "3"))


def answered(labels: str, at_s: float, status: int = 200) -> tuple[Shot, list[TaggedText]]:
    result = {"tokens": [{"label": label} for label in labels], "budget": {"steps": 4}}
    shot = Shot(1.0, {}, ended_s=at_s, status=status)
    shot.answer = json.dumps({"results": [result]}).encode()
    return shot, [TEXT]


def test_only_what_was_right_and_in_time_counts() -> None:
    outcome = Outcome()
    lost = Shot(1.0, {}), [TEXT]
    shots = [answered("123", 1.4), answered("924", 1.4), answered("123", 1.6), lost]
    outcome.add([*shots, answered("", 1.1, status=422)], deadline_s=0.5, seconds=2.0)
    assert (outcome.requests, outcome.in_time, outcome.steps) == (5, 2, [4, 4])
    assert outcome.right == [Right(3, 1)]
    assert (outcome.a_second("positions"), outcome.a_second("texts")) == (1.5, 0.5)
    assert len(outcome.latencies_s) == 3


def outcome(*rounds: Right) -> Outcome:
    return Outcome(requests=1, seconds=[1.0] * len(rounds), right=list(rounds))


def test_the_dial_stands_beside_the_better_of_the_plain_models() -> None:
    dial, small, large = trained_on(), trained_on(), trained_on()
    arms = [Arm("dial", dial, {}), Arm("full", dial, {}), Arm("small", small, {})]
    arms.append(Arm("large", large, {}))
    found = {(arm, 2): outcome(Right(10, 0), Right(10, 0)) for arm in arms}
    found[arms[0], 2] = outcome(Right(30, 6), Right(60, 6))
    found[arms[1], 2] = outcome(Right(900, 900), Right(900, 900))  # no plain model
    found[arms[3], 2] = outcome(Right(20, 0), Right(20, 0))
    found |= {(arm, 4): one for (arm, _), one in found.items()}
    table, targets = overload._ratios(found, arms[0], arms[2:])
    assert table.rows[0] == ["right positions, 2 x", "large", 20.0, 45.0, 2.25, "1.50 to 3.00"]
    assert table.rows[2][2:] == [0.0, 6.0, None, None]  # nothing to divide by
    assert [target.value for target in targets] == [2.25, 2.25]


def point(dial: bool, blocks: int, steps: int, ms: float, value: float, **fields: Any) -> Point:
    size = 50_000 if dial else 50_000 * blocks
    name = "dial" if dial else f"plain{blocks}"
    made = Point(name, dial, blocks, size, steps, ms, "accuracy", value, value - 0.01, value + 0.01)
    return replace(made, **fields)


POINTS = [
    *(point(True, 1, steps, 0.2 * steps, value) for steps, value in ((1, 0.5), (2, 0.7), (8, 0.9))),
    *(point(False, blocks, 1, 0.1 * blocks, 0.4 + 0.05 * blocks) for blocks in (1, 4, 8)),
]


def test_rungs_are_compared_at_equal_latency_and_at_equal_quality() -> None:
    plain = [p for p in POINTS if not p.dial]
    assert at_latency(plain, 0.05) is None
    assert at_latency(plain, 0.2) == pytest.approx(0.525)  # half way, in the logarithm
    assert at_latency(plain, 5.0) == at_latency(plain, 0.8) == pytest.approx(0.8)
    assert at_latency([*plain, point(False, 9, 1, 0.9, 0.3)], 0.9) == pytest.approx(0.8)
    said = {str(what): str(found) for what, found in says(POINTS)}
    assert said["1 step, beside plain models as fast"] == "-0.0250"
    assert said["8 steps, beside plain models as fast"].startswith("+0.1000 (slower than all")
    assert said["2 steps, parameters beside a plain model as good"] == (
        "50,000 against 400,000: 0.12 times"
    )
    assert said["8 steps, parameters beside a plain model as good"] == (
        "50,000 against more than 400,000: less than 0.12 times"
    )


def test_less_loss_is_better() -> None:
    loss = [replace(p, metric="loss", value=2 - p.value) for p in POINTS]
    assert [found for _, found in says(loss)][::2] == [found for _, found in says(POINTS)][::2]


def test_the_picture_is_that_of_the_points(tmp_path: Path) -> None:
    lossy = [replace(p, metric="loss", low=p.low, high=p.high) for p in POINTS]
    draw([POINTS, lossy], tmp_path / "one.svg")
    draw([POINTS, lossy], tmp_path / "two.svg")
    picture = (tmp_path / "one.svg").read_text()
    assert picture == (tmp_path / "two.svg").read_text()
    for words in (
        "dial: quality per millisecond",
        "milliseconds of the processor, one row",
        "accuracy, % of positions",
        "loss (nats a token), lower is better",
        "one model with a dial; labels: steps",
        "plain models; labels: blocks",
    ):
        assert words in picture
    assert "@media(prefers-color-scheme:dark)" in picture
    for colour in (ladders.INK, ladders.DIAL, ladders.PLAIN):  # only as what can change
        assert picture.count(colour) == picture.count(f", {colour})") + 1
    with pytest.raises(SystemExit, match="nothing was measured"):
        draw([], tmp_path / "none.svg")


def test_points_are_kept_as_a_table() -> None:
    assert [Point.of(p.cells) for p in POINTS] == POINTS
    assert kept(Path("nowhere")) == []
