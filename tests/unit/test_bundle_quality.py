"""Quality of a bundle's rungs, measured one by one or on one way."""

from pathlib import Path

import numpy as np
import torch

from export.quality import compare, measure_rung, on_the_way, one_way
from serve.bundle import read_bundle
from serve.runtime import open_model
from train.data.batch import IGNORED, Batch

ZOO = Path(__file__).parents[2] / "zoo"


def test_one_pass_with_the_dial_of_time_finds_what_each_rung_answers_by_itself() -> None:
    bundle = read_bundle(ZOO / "logic")
    manifest, draw = bundle.manifest, torch.Generator().manual_seed(0)
    batches = []
    for rows in (5, 2):
        tokens = torch.randint(1, manifest.text_tokenizer.vocab_size, (rows, 36), generator=draw)
        targets = torch.randint(len(manifest.labels or ()), (rows, 36), generator=draw)
        targets[:, ::3] = IGNORED
        batches.append(Batch((tokens,), targets))
    opened, other = open_model(bundle), open_model(bundle)
    assert one_way(manifest)
    found = on_the_way(opened, manifest.steps, batches, other)
    assert list(found) == list(manifest.steps)
    for steps, one in found.items():
        alone = measure_rung(opened, steps, batches)
        assert one.measured().quality == alone.quality
        assert np.array_equal(one.measured().per_row, alone.per_row)
        assert one.against() == compare(opened, other, steps, batches)[1]
    assert len({one.measured().quality.value for one in found.values()}) > 1


def test_steps_of_different_sizes_are_not_on_one_way() -> None:
    assert not one_way(read_bundle(ZOO / "digits").manifest)
    assert not one_way(read_bundle(ZOO / "shakespeare").manifest)
