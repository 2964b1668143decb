"""A row that runs ahead of itself: bit for bit what it would get step by step."""

import numpy as np
import pytest

from serve.runtime import OpenedModel
from tests.fixtures.tiny_rungs import KINDS, alone, best, open_rungs, prompt


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return open_rungs(tmp_path_factory.mktemp("bundles"), request.param)


@pytest.mark.parametrize("lead", [1, 2, 4])
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_a_row_that_speculates_gets_what_it_gets_alone(
    model: OpenedModel, lead: int, right: float
) -> None:
    """Whatever is drafted, wrong or right, beyond a boundary of 64 positions too."""
    mix = model.mix()
    assert mix is not None and mix.can_speculate
    chance = np.random.default_rng(lead)
    tokens = prompt(model, 50)
    expected = alone(model, 8, tokens, 40)
    batch = model.decoder(8).open_batch()
    found = [batch.add(tokens)]
    speculation, most = mix.speculation(batch, lead), 0
    while len(found) < len(expected):
        (token,) = best(found[-1:])
        if speculation.tokens and speculation.tokens[0] != token:
            speculation.keep(0)
        if not speculation.tokens:
            speculation.begin(int(token))
        output = speculation.advance()
        if output.drafts is not None and speculation.tokens:
            assert len(output.drafts) == len(speculation.tokens)
            if chance.random() > right:
                speculation.keep(int(chance.integers(1, len(speculation.tokens) + 1)))
            behind = len(found) - 1 + len(speculation.tokens) + (output.last is not None)
            if speculation.room and behind < len(expected):
                (drafted,) = best(expected[behind : behind + 1])  # the token that comes next
                speculation.begin(int(drafted) if chance.random() < right else 1)
        most = max(most, len(speculation.tokens))
        if output.last is not None:
            found.append(output.last)
    np.testing.assert_array_equal(found, expected)
    assert most == 8 // lead if right == 1.0 else most <= 8 // lead


def test_a_draft_of_the_dial_of_time_is_what_a_rung_of_fewer_steps_answers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = open_rungs(tmp_path_factory.mktemp("bundles"), ("kv", 1, 4))
    mix, tokens = model.mix(), prompt(model, 20)
    assert mix is not None
    batch = model.decoder(8).open_batch()
    batch.add(tokens)
    speculation = mix.speculation(batch, 1)
    speculation.begin(3)
    for steps in range(1, 8):
        drafts = speculation.advance().drafts
        assert drafts is not None
        if steps in model.bundle.manifest.steps:
            rung = model.decoder(steps).open_batch()
            rung.add(tokens)
            np.testing.assert_allclose(drafts[0], rung.step(np.array([3]))[0], atol=2e-6)


def test_the_jump_after_the_last_but_one_step_is_nearly_the_answer(model: OpenedModel) -> None:
    """A jump prolongs the velocity: what it misses falls with the steps that it replaces."""
    mix = model.mix()
    assert mix is not None
    tokens = prompt(model, 20)
    (last,) = alone(model, 8, np.append(tokens, 3), 0)
    batch = model.decoder(8).open_batch()
    batch.add(tokens)
    speculation = mix.speculation(batch, 1)
    speculation.begin(3)
    drafts = [speculation.advance().drafts for _ in range(7)]
    missed = [float(np.abs(drafted[0] - last).max()) for drafted in drafts if drafted is not None]
    assert len(missed) == 7
    assert missed[0] > missed[3] > missed[6] > 0
