"""Rows of different rungs in one call: bit for bit what each would get alone."""

import errno
import gc
import weakref

import numpy as np
import pytest

from serve.runtime import OpenedModel, open_model
from serve.runtime.cache import Bytes, RowCaches
from serve.runtime.decoder import OrtDecodeBatch
from serve.runtime.protocol import FloatArray
from tests.fixtures.tiny_rungs import KINDS, STEPS, alone, best, open_rungs, prompt


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return open_rungs(tmp_path_factory.mktemp("bundles"), request.param)


def test_rows_of_all_rungs_in_one_call_get_what_they_get_alone(model: OpenedModel) -> None:
    mix = model.mix()
    assert mix is not None and mix.most_batches == len(STEPS)
    batches: dict[int, OrtDecodeBatch] = {}
    found: dict[tuple[int, int], list[FloatArray]] = {}
    lengths = {steps: [5 + 20 * row + 7 * steps for row in range(3)] for steps in STEPS}
    for steps in STEPS:
        batch = model.decoder(steps).open_batch()
        assert isinstance(batch, OrtDecodeBatch)
        batches[steps] = batch
        for row, length in enumerate(lengths[steps]):
            found[steps, row] = [batch.add(prompt(model, length, row))]
    stands = dict.fromkeys(STEPS, 0)
    for call in range(48):
        going = [steps for steps in STEPS if stands[steps] or (call + steps) % 3]
        if first := [steps for steps in going if stands[steps] == 0]:
            tokens = [best([found[steps, row][-1] for row in range(3)]) for steps in first]
            mix.begin([batches[steps] for steps in first], tokens)
        mix.advance([batches[steps] for steps in going])
        stands |= {steps: (stands[steps] + 1) % steps for steps in going}
        if last := [steps for steps in going if stands[steps] == 0]:
            ended = mix.end([batches[steps] for steps in last])
            for steps, answers in zip(last, ended, strict=True):
                for row, logits in enumerate(answers):
                    found[steps, row].append(logits)
    for (steps, row), mixed in found.items():
        asked = prompt(model, lengths[steps][row], row)
        np.testing.assert_array_equal(mixed, alone(model, steps, asked, len(mixed) - 1))
    assert {steps: len(found[steps, 0]) > 3 for steps in STEPS} == dict.fromkeys(STEPS, True)


def test_a_batch_may_change_between_two_tokens_of_others(model: OpenedModel) -> None:
    mix = model.mix()
    assert mix is not None
    one, four = (model.decoder(steps).open_batch() for steps in (1, 4))
    assert isinstance(one, OrtDecodeBatch) and isinstance(four, OrtDecodeBatch)
    last = four.add(prompt(model, 60))
    expected = alone(model, 4, prompt(model, 60), 6)
    for token in range(6):  # across a boundary of 64 positions
        mix.begin([four], [best([last])])
        for call in range(4):
            logits = one.add(prompt(model, 10 + 40 * call, seed=token))
            mix.begin([one], [np.full(len(one.lengths), logits.argmax())])
            mix.advance([one, four])
            mix.end([one])
            if call % 2:
                one.remove(0)
        ((last,),) = mix.end([four])
        np.testing.assert_array_equal(last, expected[token + 1])


def test_calls_that_come_again_find_caches_that_have_moved_since(model: OpenedModel) -> None:
    """As many rows as before, in buffers that others have made larger."""
    mix = model.mix()
    assert mix is not None
    two, four = (model.decoder(steps).open_batch() for steps in (2, 4))
    assert isinstance(two, OrtDecodeBatch) and isinstance(four, OrtDecodeBatch)
    found: dict[tuple[int, int], list[FloatArray]] = {}
    for batch in (two, four):
        for row in range(2):
            found[batch.steps, row] = [batch.add(prompt(model, 20 + row, row))]
    for others in (0, 3, 0, 7):  # they come, and leave before the next token
        for batch in (two, four):
            for other in range(others):
                batch.add(prompt(model, 5, 7 + other))
            while batch.rows > 2:
                batch.remove(batch.rows - 1)
            mix.begin([batch], [best([found[batch.steps, row][-1] for row in range(2)])])
        for left in range(4, 0, -1):
            mix.advance([batch for batch in (four, two) if batch.steps >= left])
        for batch in (two, four):
            for row, logits in enumerate(mix.end([batch])[0]):
                found[batch.steps, row].append(logits)
    for (steps, row), mixed in found.items():
        asked = prompt(model, 20 + row, row)
        np.testing.assert_array_equal(mixed, alone(model, steps, asked, len(mixed) - 1))


def test_rungs_take_turns_where_memory_has_one_place_only(
    model: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cache", "mixing"):
        monkeypatch.setattr(f"serve.runtime.{name}.can_map_shared", lambda: False)
    opened = open_model(model.bundle, threads=1)
    mix = opened.mix()
    assert mix is not None and mix.most_batches == 1
    tokens = prompt(model, 20)
    np.testing.assert_array_equal(alone(opened, 4, tokens, 3), alone(model, 4, tokens, 3))


def test_rungs_go_one_by_one_once_no_more_memory_can_be_mapped(
    model: OpenedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(_: object) -> Bytes:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    mix = open_model(model.bundle, threads=1).mix()
    assert mix is not None
    monkeypatch.setattr("serve.runtime.mixing.map_adjacent", refused)
    batches: dict[int, OrtDecodeBatch] = {}
    for steps in (2, 4):
        batch = model.decoder(steps).open_batch()
        assert isinstance(batch, OrtDecodeBatch)
        batches[steps] = batch
    found = {steps: [batch.add(prompt(model, 20))] for steps, batch in batches.items()}
    for _ in range(3):
        for steps, batch in batches.items():
            mix.begin([batch], [best(found[steps][-1:])])
        for left in range(4, 0, -1):
            mix.advance([batch for steps, batch in batches.items() if steps >= left])
        for steps, batch in batches.items():
            found[steps].append(mix.end([batch])[0][0])
    for steps, logits in found.items():
        np.testing.assert_array_equal(logits, alone(model, steps, prompt(model, 20), 3))
    assert [record.message for record in caplog.records if "share no more calls" in record.message]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("lost", [False, True])
def test_nothing_keeps_the_caches_of_rows_that_have_left(model: OpenedModel, lost: bool) -> None:
    """Nor those of a batch that was dropped whole, as it is after a failed call."""
    mix = model.mix()
    assert mix is not None
    kept = []
    for seed in range(4):
        opened = [model.decoder(steps).open_batch() for steps in (1, 2)]
        batches = [batch for batch in opened if isinstance(batch, OrtDecodeBatch)]
        assert len(batches) == 2
        for batch in batches:
            batch.add(prompt(model, 3, seed))
            assert isinstance(batch._caches, RowCaches)
            kept += [weakref.ref(block) for block in batch._caches._blocks]
        for batch in batches:
            mix.begin([batch], [np.array([3])])
        mix.advance(batches)
        mix.end(batches[:1])
        mix.advance(batches[1:])
        mix.end(batches[1:])
        for batch in batches:
            if not lost:
                batch.remove(0)
        del batch, opened
        batches.clear()
    gc.collect()
    assert kept and all(block() is None for block in kept)
