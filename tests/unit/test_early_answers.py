"""What early answers save is counted against the full answers, row by row."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import early_answers
from benchmarks.lab import FOLDER, Result
from serve.bundle import Bundle, Calibration, Level
from serve.runtime import open_model
from tests.fixtures.tiny_bundles import build_classify
from train.data.batch import Batch

LEVELS = (Level(0.01, 0.3, 2.0, 0.01), Level(0.05, 0.0, 1.0, 0.01))


class Rows:
    """Texts of one length, all of the class 0."""

    def __init__(self, bundle: Bundle) -> None:
        draw = torch.Generator().manual_seed(0)
        high = bundle.manifest.text_tokenizer.vocab_size
        self.tokens = torch.randint(1, high, (40, 12), generator=draw)

    def held_out(self, size: int) -> Iterator[Batch]:
        for rows in self.tokens.split(16):
            yield Batch((rows,), torch.zeros(len(rows), dtype=torch.int64))


def test_levels_are_tested_on_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibration = Calibration(3000, 0.95, "made up", LEVELS)
    bundle = build_classify(tmp_path / "b", name="sure", calibration=calibration)
    data = Rows(bundle)
    monkeypatch.setattr(early_answers, "dataset_of", lambda *_: data)
    monkeypatch.setenv(FOLDER, str(tmp_path))  # whatever trains on this machine
    arguments = ["--bundles", str(bundle.folder), "--data", "sure=here", "--results", str(tmp_path)]
    assert early_answers.main(arguments) == 0
    result = Result.read(tmp_path / "early_answers.json")
    assert result.command.startswith("python -m benchmarks.early_answers --bundles ")
    classifier = open_model(bundle, 1).step_classifier(4)
    jumps = classifier.jumps(data.tokens.numpy())  # (4, 40, 2)
    margins = np.abs(jumps[..., 0] - jumps[..., 1])
    margins[-1] = np.inf
    stopped = (margins >= 0.3).argmax(0)  # (40,)
    labels = jumps.argmax(-1)
    differing = (labels[stopped, np.arange(40)] != labels[-1]).mean()
    one_at_once = (labels[0] != labels[-1]).mean()
    shown = [[row[2], row[3]] for row in result.tables[0].rows]
    assert shown == [
        [f"{100 * differing:.2f} %", f"{(stopped + 1).mean():.2f} of 4"],
        [f"{100 * one_at_once:.2f} %", "1.00 of 4"],
    ]
    assert 1 < (stopped + 1).mean() < 4
    with pytest.raises(ValueError, match="plain was not calibrated"):
        plain = build_classify(tmp_path / "p", name="plain")
        early_answers.main(["--bundles", str(plain.folder), "--data", "plain=here"])
