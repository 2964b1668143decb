"""The benchmark of converted encoders runs on a small case, and its table says what it should."""

from pathlib import Path

import pytest

from benchmarks import converted
from benchmarks.lab import NOTHING_TO_MEASURE, Result
from export.run import ExportRequest, export_run
from tests.pretrained_folders import write_folder, write_table
from train.convert import Conversion, convert

pytestmark = pytest.mark.long


def test_every_rung_stands_beside_the_original_in_two_ways(tmp_path: Path) -> None:
    write_folder(tmp_path / "bert", "bert")
    table = write_table(tmp_path / "table.csv", 64)
    few = ("optim.batch=16", "optim.precision=fp32", "run.threads=1")
    columns = ('data.text="body"', 'data.label="topic"')
    request = Conversion(
        max_tokens=24, epochs=1, teacher_epochs=1, steps=(1, 2), overrides=(*few, *columns)
    )
    convert(str(tmp_path / "bert"), tmp_path / "run", request, str(table), quiet=True)
    asked = ExportRequest(tmp_path / "dial", (1, 2), name="dial", samples=12, latency=False)
    export_run(tmp_path / "run", asked, say=lambda _: None)
    arguments = ["--quick", "--results", str(tmp_path / "results"), "--threads", "1"]
    arguments += ["--bundles", str(tmp_path / "dial"), "--original", str(tmp_path / "bert")]
    assert converted.main(arguments) == 0
    result = Result.read(tmp_path / "results/converted.json")
    (found,) = result.tables
    assert [row[:2] for row in found.rows] == [
        [converted.GRAPH, ""],
        [converted.TORCH, ""],
        ["dial", 1],
        ["dial", 2],
    ]
    by_way = {(str(row[0]), row[1]): row for row in found.rows}
    graph, torch = by_way[converted.GRAPH, ""], by_way[converted.TORCH, ""]
    assert graph[3] == 1 and torch[4] == 1  # each beside itself
    for row in found.rows:  # one round: its ratios are those of the rates
        rate, of_graph, of_torch = row[2:5]
        assert isinstance(rate, float) and rate > 0
        assert isinstance(graph[2], float) and isinstance(torch[2], float)
        assert of_graph == pytest.approx(rate / graph[2])
        assert of_torch == pytest.approx(rate / torch[2])
    assert "at most 24 tokens" in result.about and "4 layers of width 16" in result.about


def test_it_says_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert converted.main(["--quick"]) == NOTHING_TO_MEASURE
    assert "--original" in capsys.readouterr().err


def test_the_texts_are_of_many_lengths() -> None:
    lengths = {len(text.split()) for text in converted.some_texts(200)}
    assert min(lengths) == 4 and max(lengths) == 60 and len(lengths) > 40
