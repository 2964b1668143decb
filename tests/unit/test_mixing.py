"""Rows of different rungs in one call: bit for bit what each would get alone."""

import errno
import gc
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest

from serve.runtime import Leg, Mix, OpenedModel, SteppedBatch, open_model
from serve.runtime.kv_cache import RowCaches
from serve.runtime.ort_batch import OrtDecodeBatch
from serve.runtime.ort_reading import CHUNK_TOKENS, PIECE_TOKENS
from serve.runtime.pages import Bytes
from serve.runtime.protocol import FloatArray, IntArray
from tests.tiny_bundles import build_generate

STEPS = (1, 2, 3, 4, 6, 8)
MAX_TOKENS = 160


@pytest.fixture(
    scope="module",
    params=[("kv", 1), ("kv_int8", 1), ("kv", 3)],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    folder = tmp_path_factory.mktemp("bundles") / "g"
    cache, threads = request.param
    bundle = build_generate(folder, steps=STEPS, max_tokens=MAX_TOKENS, cache=cache)
    return open_model(bundle, threads=threads)


def prompt(model: OpenedModel, length: int, seed: int = 0) -> IntArray:
    vocab_size = model.bundle.manifest.text_tokenizer.vocab_size
    return np.random.default_rng(seed).integers(1, vocab_size, length)


def went(mix: Mix, sides: list[list[Leg]]) -> list[list[FloatArray | None]]:
    """The logits of legs abreast, none of which throws."""
    found: list[list[FloatArray | None]] = []
    for side in mix.abreast(sides):
        found.append([])
        for outcome in side:
            assert not isinstance(outcome, Exception)
            found[-1].append(outcome)
    return found


def best(logits: list[FloatArray]) -> IntArray:
    return np.array([row.argmax() for row in logits])


def alone(model: OpenedModel, steps: int, tokens: IntArray, count: int) -> list[FloatArray]:
    """The logits of the prompt and of so many tokens behind it, greedy."""
    batch = model.decoder(steps).open_batch()
    found = [batch.add(tokens)]
    for _ in range(count):
        found.append(batch.step(best(found[-1:]))[0])
    return found


def test_rows_of_all_rungs_in_one_call_get_what_they_get_alone(model: OpenedModel) -> None:
    mix = model.mix()
    assert mix is not None and mix.most_batches == len(STEPS)
    batches: dict[int, SteppedBatch] = {}
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


def test_rungs_that_go_abreast_get_what_they_get_alone(model: OpenedModel) -> None:
    """Each on a thread of its own, so many steps at once; and shared calls in between."""
    mix = model.mix()
    assert mix is not None
    chance = np.random.default_rng(0)
    batches: dict[int, OrtDecodeBatch] = {}
    found: dict[int, list[FloatArray]] = {}
    for steps in STEPS:
        batch = model.decoder(steps).open_batch()
        assert isinstance(batch, OrtDecodeBatch)
        batches[steps], found[steps] = batch, [batch.add(prompt(model, 55 + steps))]
    for call in range(60):
        legs = {}
        for steps, batch in batches.items():
            stands = None if batch.stand is None else batch.stand.step
            left = steps - (stands or 0)
            tokens = best(found[steps][-1:]) if stands is None else None
            legs[steps] = Leg(batch, int(chance.integers(1, left + 1)), tokens)
        if call % 4:
            sides = [list(STEPS[side :: mix.sides]) for side in range(mix.sides)]
            answers = went(mix, [[legs[steps] for steps in side] for side in sides])
        else:
            sides, answers = [list(STEPS)], [[]]
            for steps, leg in legs.items():
                if leg.tokens is not None:
                    batches[steps].begin(leg.tokens)
            for first in range(0, len(STEPS), mix.most_batches):
                mix.advance([batches[steps] for steps in STEPS[first : first + mix.most_batches]])
            for batch in batches.values():
                ends = batch.stand is not None and batch.stand.step == batch.steps
                answers[0].append(batch.end() if ends else None)
        for side, ended in zip(sides, answers, strict=True):
            for steps, logits in zip(side, ended, strict=True):
                if logits is not None:
                    found[steps].append(logits[0])
    for steps, logits_of_all in found.items():
        count = len(logits_of_all) - 1
        assert count >= 5
        expected = alone(model, steps, prompt(model, 55 + steps), count)
        np.testing.assert_array_equal(logits_of_all, expected)


def test_rungs_go_abreast_on_one_session_once_their_bundle_was_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = open_model(build_generate(tmp_path / "g", steps=(1, 2)), threads=2)
    mix, tokens = opened.mix(), np.arange(1, 9)
    assert mix is not None and mix.sides == 2
    expected = {steps: alone(opened, steps, tokens, 3) for steps in (1, 2)}
    shutil.rmtree(tmp_path / "g")
    batches = {steps: opened.decoder(steps).open_batch() for steps in (1, 2)}
    found = {steps: [batch.add(tokens)] for steps, batch in batches.items()}
    for _ in range(3):
        legs = [Leg(batch, n, best(found[n][-1:])) for n, batch in batches.items()]
        for steps, (logits,) in zip(batches, went(mix, [[leg] for leg in legs]), strict=True):
            assert logits is not None
            found[steps].append(logits[0])
    assert caplog.text.count("rungs that go abreast share a session") == 1
    for steps, logits_of_all in found.items():
        np.testing.assert_array_equal(logits_of_all, expected[steps])


def test_a_leg_that_throws_leaves_the_others(model: OpenedModel) -> None:
    mix = model.mix()
    assert mix is not None
    batches = [model.decoder(steps).open_batch() for steps in (2, 1, 3)]
    for batch in batches:
        batch.add(prompt(model, 5))
    too_many = np.array([3, 4])
    good = [
        Leg(batch, steps, np.array([3])) for batch, steps in zip(batches, (2, 1, 3), strict=True)
    ]
    legs = [good[0], Leg(batches[1], 1, too_many), good[2]]
    sides = [legs] if mix.sides == 1 else [legs[:2], legs[2:]]
    found = [one for side in mix.abreast(sides) for one in side]
    assert isinstance(found[1], ValueError)
    for one, steps in ((found[0], 2), (found[2], 3)):
        assert isinstance(one, np.ndarray)
        row = model.decoder(steps).open_batch()
        row.add(prompt(model, 5))
        np.testing.assert_array_equal(one, row.step(np.array([3])))


def test_a_batch_may_change_between_two_tokens_of_others(model: OpenedModel) -> None:
    mix = model.mix()
    assert mix is not None
    one, four = (model.decoder(steps).open_batch() for steps in (1, 4))
    assert isinstance(one, OrtDecodeBatch) and isinstance(four, OrtDecodeBatch)
    last = four.add(prompt(model, 60))
    expected = alone(model, 4, prompt(model, 60), 6)
    for token in range(6):  # across a boundary of 64 positions
        four.begin(best([last]))
        for call in range(4):
            logits = one.add(prompt(model, 10 + 40 * call, seed=token))
            one.begin(np.full(len(one.lengths), logits.argmax()))
            mix.advance([one, four])
            one.end()
            if call % 2:
                one.remove(0)
        (last,) = four.end()
        np.testing.assert_array_equal(last, expected[token + 1])


def test_a_prompt_is_read_in_pieces_of_bounded_work(model: OpenedModel) -> None:
    for steps in STEPS:
        for length in (1, 63, 64, 65, 130, MAX_TOKENS):
            batch = model.decoder(steps).open_batch()
            tokens = prompt(model, length)
            reading, pieces = batch.read(tokens), 1
            while (logits := reading.advance()) is None:
                pieces += 1
            assert reading.positions == length and not batch.lengths
            assert pieces * PIECE_TOKENS >= length * steps
            assert pieces <= -(-length // CHUNK_TOKENS) * steps
            batch.join(reading)
            assert batch.lengths == [length]
            whole = model.decoder(steps).forward(tokens[None])[0, -1]
            np.testing.assert_allclose(logits, whole, atol=2e-5)


def test_rungs_take_turns_where_memory_has_one_place_only(
    model: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pages", "ort_mix"):
        monkeypatch.setattr(f"serve.runtime.{name}.can_be_neighbours", lambda: False)
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
    monkeypatch.setattr("serve.runtime.ort_mix.side_by_side", refused)
    batches: dict[int, SteppedBatch] = {}
    for steps in (2, 4):
        batch = model.decoder(steps).open_batch()
        assert isinstance(batch, OrtDecodeBatch)
        batches[steps] = batch
    found = {steps: [batch.add(prompt(model, 20))] for steps, batch in batches.items()}
    for _ in range(3):
        for steps, batch in batches.items():
            batch.begin(best(found[steps][-1:]))
        for left in range(4, 0, -1):
            mix.advance([batch for steps, batch in batches.items() if steps >= left])
        for steps, batch in batches.items():
            found[steps].append(batch.end()[0])
    for steps, logits in found.items():
        np.testing.assert_array_equal(logits, alone(model, steps, prompt(model, 20), 3))
    assert [record.message for record in caplog.records if "share no more calls" in record.message]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("lead", [1, 2, 4])
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_a_row_that_runs_ahead_gets_what_it_gets_alone(
    model: OpenedModel, lead: int, right: float
) -> None:
    """Whatever is drafted, wrong or right, beyond a boundary of 64 positions too."""
    mix = model.mix()
    assert mix is not None and mix.runs_ahead
    chance = np.random.default_rng(lead)
    tokens = prompt(model, 50)
    expected = alone(model, 8, tokens, 40)
    batch = model.decoder(8).open_batch()
    found = [batch.add(tokens)]
    wave, most = mix.wave(batch, lead), 0
    while len(found) < len(expected):
        (token,) = best(found[-1:])
        if wave.tokens and wave.tokens[0] != token:
            wave.keep(0)
        if not wave.tokens:
            wave.begin(int(token))
        crossed = wave.cross()
        if crossed.drafts is not None and wave.tokens:
            assert len(crossed.drafts) == len(wave.tokens)
            if chance.random() > right:
                wave.keep(int(chance.integers(1, len(wave.tokens) + 1)))
            behind = len(found) - 1 + len(wave.tokens) + (crossed.last is not None)
            if wave.room and behind < len(expected):
                (drafted,) = best(expected[behind : behind + 1])  # the token that comes next
                wave.begin(int(drafted) if chance.random() < right else 1)
        most = max(most, len(wave.tokens))
        if crossed.last is not None:
            found.append(crossed.last)
    np.testing.assert_array_equal(found, expected)
    assert most == 8 // lead if right == 1.0 else most <= 8 // lead


def test_the_jump_after_the_last_but_one_step_is_nearly_the_answer(model: OpenedModel) -> None:
    """A jump prolongs the velocity: what it misses falls with the steps that it replaces."""
    mix = model.mix()
    assert mix is not None
    tokens = prompt(model, 20)
    (last,) = alone(model, 8, np.append(tokens, 3), 0)
    batch = model.decoder(8).open_batch()
    batch.add(tokens)
    wave = mix.wave(batch, 1)
    wave.begin(3)
    drafts = [wave.cross().drafts for _ in range(7)]
    missed = [float(np.abs(drafted[0] - last).max()) for drafted in drafts if drafted is not None]
    assert len(missed) == 7
    assert missed[0] > missed[3] > missed[6] > 0


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
            kept += [weakref.ref(block) for block in batch._caches._blocks]
        legs = [Leg(batch, batch.steps, np.array([3])) for batch in batches]
        mix.abreast([legs] if mix.sides == 1 else [[leg] for leg in legs])
        for batch in batches:
            batch.begin(np.array([3]))
        mix.advance(batches)
        batches[0].end()
        mix.advance(batches[1:])
        batches[1].end()
        for batch in batches:
            if not lost:
                batch.remove(0)
        del batch, opened, legs
        batches.clear()
    gc.collect()
    assert all(block() is None for block in kept)


def test_a_short_row_leaves_the_others_their_room(model: OpenedModel) -> None:
    batch = model.decoder(2).open_batch()
    assert isinstance(batch, OrtDecodeBatch)
    for positions in (MAX_TOKENS, 10):
        reading = batch.read(prompt(model, 5), positions)
        while reading.advance() is None:
            pass
        batch.join(reading)
    assert batch._caches.capacity == MAX_TOKENS


def test_a_batch_goes_on_where_memory_cannot_be_given_back(
    model: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    batch = model.decoder(2).open_batch()
    for seed in range(8):
        batch.add(prompt(model, 5, seed))
    with monkeypatch.context() as patched:
        patched.setattr(RowCaches, "_resize", no_memory)
        for row in range(7, 0, -1):
            batch.remove(row)
    other = model.decoder(2).open_batch()
    other.add(prompt(model, 5, 0))
    token = np.array([3])
    assert np.array_equal(batch.step(token), other.step(token))
