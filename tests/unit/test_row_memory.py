"""Prompts on their way into a batch, and the memory of its rows."""

import numpy as np
import pytest

from serve.runtime import OpenedModel
from serve.runtime.cache import RowCaches
from serve.runtime.decoder import CHUNK_TOKENS, PIECE_TOKENS, OrtDecodeBatch
from tests.fixtures.tiny_rungs import KINDS, MAX_TOKENS, STEPS, open_rungs, prompt


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return open_rungs(tmp_path_factory.mktemp("bundles"), request.param)


def test_a_prompt_is_read_in_pieces_of_bounded_work(model: OpenedModel) -> None:
    for steps in STEPS:
        for length in (1, 63, 64, 65, 130, MAX_TOKENS):
            batch = model.decoder(steps).open_batch()
            tokens = prompt(model, length)
            prefill, pieces = batch.read(tokens), 1
            while (logits := prefill.advance()) is None:
                pieces += 1
            assert prefill.positions == length and not batch.lengths
            assert pieces * PIECE_TOKENS >= length * steps
            assert pieces <= -(-length // CHUNK_TOKENS) * steps
            batch.join(prefill)
            assert batch.lengths == [length]
            whole = model.decoder(steps).forward(tokens[None])[0, -1]
            np.testing.assert_allclose(logits, whole, atol=2e-5)


def test_a_short_row_leaves_the_others_their_room(model: OpenedModel) -> None:
    batch = model.decoder(2).open_batch()
    assert isinstance(batch, OrtDecodeBatch)
    for positions in (MAX_TOKENS, 10):
        prefill = batch.read(prompt(model, 5), positions)
        while prefill.advance() is None:
            pass
        batch.join(prefill)
    assert isinstance(batch._caches, RowCaches)
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
