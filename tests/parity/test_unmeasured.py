"""An 8-bit classifier without rows to measure it on, or nothing to save: said to be."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from export.inspect import describe
from export.run import ExportRequest, export_run
from tests.fixtures.tiny_runs import tiny_label_run
from train.data.batch import Batch
from train.data.labelled import LabelledDataset


def exported(run: Path, target: Path) -> str:
    request = ExportRequest(target, (1,), precision="int8", samples=1, latency=False)
    bundle = export_run(run, request, say=lambda _: None)
    return describe(bundle) + (bundle.folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_missing_validation_rows_are_told_everywhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def none(self: LabelledDataset, size: int) -> Iterator[Batch]:
        return iter(())

    monkeypatch.setattr("export.int8.LEAST_ELEMENTS", 64)
    label_run = tiny_label_run(tmp_path)
    capsys.readouterr()
    assert "no validation rows" not in exported(label_run, tmp_path / "measured")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(LabelledDataset, "validation", none)
    assert exported(label_run, tmp_path / "unmeasured").count("no validation rows") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no validation rows" in line and "data.held_out" in line and "fp32" in line


def test_a_model_too_small_for_8_bits_is_told_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    label_run = tiny_label_run(tmp_path)
    capsys.readouterr()
    assert exported(label_run, tmp_path / "small").count("stay float32") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "32,768" in line and "--precision fp32" in line
