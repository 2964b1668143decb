"""Bundles of runs whose data, or whose bundle, has changed since: said, and nothing promised."""

from pathlib import Path

import pytest

from export.__main__ import main
from export.latency import calibrate_latency, measure_latency
from export.run import ExportRequest, export_run
from serve.bundle import MAX_RUNGS, Latency, read_bundle
from serve.runtime import OpenedModel
from tests.fixtures.tiny_bundles import build_classify
from tests.fixtures.tiny_runs import TINY, tiny_label_recipe, tiny_text_recipe, trained
from train.recipe import load_recipe


def own_rows(folder: Path, count: int, labels: tuple[str, str] = ("odd", "even")) -> Path:
    """Strings of 8 digits at most and whether their ones are even, in a table."""
    lines = [f"{i:b},{labels[i.bit_count() % 2 == 0]}\n" for i in range(1, count)]
    (folder / "mine.csv").write_text("text,label\n" + "".join(lines))
    return folder / "mine.csv"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    short = ["optim.iterations=2", "data.held_out=0.9", "model.window=24", "data.vocabulary=300"]
    steps = ["steps.full=2", "steps.short=[1]", "optim.precision=fp32"]
    data = str(own_rows(folder, 3500))
    trained(load_recipe("classifier", [*TINY, *short, *steps], data), folder)
    return folder


@pytest.mark.long
def test_early_answers_are_certified_on_its_own_data_alone(folder: Path, tmp_path: Path) -> None:
    run, said = folder / "run", list[str]()
    own = ExportRequest(tmp_path / "own", (1, 2), latency=False)
    assert export_run(run, own, say=said.append).manifest.calibration is not None
    assert not [line for line in said if "not the data it was trained on" in line]
    other = ExportRequest(tmp_path / "other", (1, 2), latency=False)
    data = str(own_rows(tmp_path, 3501))
    assert export_run(run, other, data, said.append).manifest.calibration is None
    assert [line for line in said if "not the data it was trained on" in line]
    assert [line for line in said if "max_disagreement will be refused: rows of this data" in line]


def test_a_bundle_is_not_measured_on_other_classes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = ExportRequest(tmp_path / "b", (1,), samples=4, latency=False)
    bundle = export_run(folder / "run", request, say=lambda line: None)
    data = own_rows(tmp_path, 3500, ("false", "true"))
    assert main(["evaluate", str(bundle.folder), "--data", str(data)]) == 2
    assert "has the classes false, true, but the model was trained on" in capsys.readouterr().err


def test_a_bundle_has_so_many_rungs_at_most(tmp_path: Path) -> None:
    run = trained(tiny_label_recipe("optim.iterations=1"), tmp_path)
    request = ExportRequest(tmp_path / "b", tuple(range(1, MAX_RUNGS + 2)))
    with pytest.raises(ValueError, match=f"has {MAX_RUNGS + 1} counts: a bundle takes {MAX_RUNGS}"):
        export_run(run, request, say=lambda line: None)


def test_heads_too_odd_for_caches_are_named(tmp_path: Path) -> None:
    run = trained(tiny_text_recipe(tmp_path, "optim.iterations=1", "model.width=12"), tmp_path)
    said: list[str] = []
    request = ExportRequest(tmp_path / "b", (1,), samples=2, latency=False)
    assert export_run(run, request, say=said.append).manifest.cache == "none"
    assert [line for line in said if "no KV cache" in line and "must be a multiple of 8" in line]


def test_a_damaged_measurement_is_replaced(tmp_path: Path) -> None:
    bundle = build_classify(tmp_path / "b")
    (bundle.folder / "latency.json").write_text('{"machine": ')
    calibrate_latency(bundle.folder, threads=1)
    assert read_bundle(bundle.folder).latency is not None


def test_a_measurement_is_of_the_bundle_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = build_classify(tmp_path / "b")
    before = (bundle.folder / "latency.json").read_bytes()

    def slowly(model: OpenedModel, threads: int) -> Latency:
        measured = measure_latency(model, threads)
        build_classify(tmp_path / "other", seed=7)
        (tmp_path / "b").rename(tmp_path / "old")
        (tmp_path / "other").rename(tmp_path / "b")
        (tmp_path / "b" / "latency.json").write_bytes(before)
        return measured

    monkeypatch.setattr("export.latency.measure_latency", slowly)
    with pytest.raises(ValueError, match="was replaced while it was measured"):
        calibrate_latency(bundle.folder, threads=1)
    assert (bundle.folder / "latency.json").read_bytes() == before
