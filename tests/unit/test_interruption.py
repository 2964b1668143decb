"""A real model of onnxruntime throws while it is interrupted, with rows under way or without."""

from collections.abc import Callable

import numpy as np
import pytest

from serve.runtime import open_model
from tests.fixtures.tiny_folders import generate_bundle

TOKENS = np.arange(1, 6)  # (S,)


def test_an_interrupted_model_throws_until_it_resumes() -> None:
    model = open_model(generate_bundle())
    batch = model.decoder(2).open_batch()
    batch.add(TOKENS)
    batch.step(TOKENS[:1])
    model.interrupt()
    calls: list[Callable[[], object]] = [
        lambda: batch.step(TOKENS[:1]),
        lambda: batch.read(TOKENS).advance(),
    ]
    for call in calls:
        with pytest.raises(Exception, match="terminate"):
            call()
    model.resume()
    assert batch.lengths == [6]
    batch.step(TOKENS[:1])
    assert batch.lengths == [7]


def test_rows_that_share_steps_throw_too() -> None:
    model = open_model(generate_bundle())
    batches = [model.decoder(steps).open_batch() for steps in (2, 4)]
    mix = model.mix()
    assert mix is not None
    for batch in batches:
        batch.add(TOKENS)
        mix.begin([batch], [TOKENS[:1]])
    mix.advance(batches)
    model.interrupt()
    with pytest.raises(Exception, match="terminate"):
        mix.advance(batches)
