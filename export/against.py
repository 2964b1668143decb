"""A precision against float32: how many answers stay the same, and what it costs in quality.

Knows two opened models and batches; not how either was made.
"""

from collections.abc import Iterable

import torch

from export.calibrate import Measured, logits_of, measured_by
from serve.bundle import AgainstFp32
from serve.runtime import Model
from train.data.batch import IGNORED, Batch
from train.quality import Tally


def compare(
    opened: Model, reference: Model, steps: int, batches: Iterable[Batch]
) -> tuple[Measured, AgainstFp32]:
    """The quality of a rung, and how it differs from the other's on the same rows."""
    labelled = opened.bundle.manifest.labelled
    tally, reference_tally = Tally(), Tally()
    same = counted = 0
    for batch in batches:
        pair = [torch.from_numpy(logits_of(one, steps, batch)) for one in (opened, reference)]
        tally.add(batch, pair[0], 0.0)
        reference_tally.add(batch, pair[1], 0.0)
        kept = batch.targets != IGNORED
        same += int((pair[0].argmax(-1) == pair[1].argmax(-1))[kept].sum())
        counted += int(kept.sum())
    measured = measured_by(tally, labelled)
    change = measured.quality.value - reference_tally.quality(labelled).value
    return measured, AgainstFp32(same / counted, change, counted)
