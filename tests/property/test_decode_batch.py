"""Rows that come, decode and go in any order answer exactly as if each were alone."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from serve.runtime import DecodeBatch, Decoder, WindowFullError, open_model
from tests.examples import examples
from tests.fixtures.tiny_bundles import build_generate

MAX_TOKENS = 100
VOCABULARY = 20


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    folder = tmp_path_factory.mktemp("bundles") / "g"
    model = open_model(build_generate(folder, steps=(1, 2), max_tokens=MAX_TOKENS), threads=1)
    yield model.decoder(2)


def test_a_batch_is_the_sum_of_its_rows(decoder: Decoder) -> None:
    class Rows(RuleBasedStateMachine):
        """Every row lives twice: in the batch, and alone in a batch of its own."""

        @initialize()
        def start(self) -> None:
            self.batch: DecodeBatch = decoder.open_batch()
            self.alone: list[DecodeBatch] = []

        @precondition(lambda self: len(self.alone) < 6)
        @rule(length=st.integers(1, MAX_TOKENS), seed=st.integers(0, 9))
        def add(self, length: int, seed: int) -> None:
            tokens = np.random.default_rng(seed).integers(1, VOCABULARY, length)
            alone = decoder.open_batch()
            np.testing.assert_array_equal(self.batch.add(tokens), alone.add(tokens))
            self.alone.append(alone)

        @precondition(lambda self: self.alone)
        @rule(times=st.integers(1, 20), seed=st.integers(0, 9))
        def step(self, times: int, seed: int) -> None:
            generator = np.random.default_rng(seed)
            for _ in range(times):
                tokens = generator.integers(1, VOCABULARY, len(self.alone))
                if MAX_TOKENS in self.batch.lengths:
                    with pytest.raises(WindowFullError):
                        self.batch.step(tokens)
                    return
                together = self.batch.step(tokens)
                for row, alone in enumerate(self.alone):
                    logits = alone.step(tokens[row : row + 1])[0]
                    np.testing.assert_array_equal(together[row], logits)

        @precondition(lambda self: self.alone)
        @rule(data=st.data())
        def remove(self, data: st.DataObject) -> None:
            row = data.draw(st.integers(0, len(self.alone) - 1))
            self.batch.remove(row)
            self.alone[row] = self.alone[-1]
            self.alone.pop()

        @invariant()
        def lengths_are_those_of_the_rows(self) -> None:
            assert self.batch.lengths == [alone.lengths[0] for alone in self.alone]

        @invariant()
        def memory_follows_the_rows(self) -> None:
            longest = max(self.batch.lengths, default=0)
            assert self.batch.nbytes >= len(self.alone) * decoder.bytes_for(longest) * bool(longest)
            # Less than three quarters may be slack.
            most = 4 * len(self.alone) * decoder.bytes_for(longest + 1)
            assert self.batch.nbytes <= most

    run_state_machine_as_test(
        Rows, settings=settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
    )
