"""Verification of rungs that share calls: each must answer as it does in calls of its own.

Bit for bit, so no tolerance is needed, and any tokens will do.
"""

from typing import cast

import numpy as np

from export.verify import VerificationError
from serve.bundle import steps_in_words
from serve.runtime import OpenedModel, SteppedBatch
from serve.runtime.protocol import IntArray


def verify_mix(opened: OpenedModel, tokens: IntArray) -> None:
    """The last of tokens (B, N), behind the others, at all rungs together and at each alone."""
    mix = opened.mix()
    if mix is None or mix.most_batches == 1:
        return
    ladder = opened.bundle.manifest.steps[-mix.most_batches :]
    rows, length = tokens.shape
    alone, together = {}, {}
    for index, steps in enumerate(ladder):
        run = opened.decoder(steps)
        batch, other = run.open_batch(), cast(SteppedBatch, run.open_batch())
        for row in range(rows):
            prompt = tokens[row, : max(1, length - 1 - row - index)]  # ragged on purpose
            batch.add(prompt)
            other.add(prompt)
        alone[steps] = batch.step(tokens[:, -1].copy())
        other.begin(tokens[:, -1].copy())
        together[steps] = other
    for left in range(ladder[-1], 0, -1):  # they end together, and so stand at different steps
        mix.advance([batch for steps, batch in together.items() if steps >= left])
    for steps, batch in together.items():
        if not np.array_equal(batch.end(), alone[steps]):
            raise VerificationError(
                f"the rung of {steps_in_words(steps)} answers otherwise when it shares calls with "
                "others: no bundle was written; report this, with the recipe"
            )
