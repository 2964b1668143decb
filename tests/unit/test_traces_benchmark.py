"""The benchmark that replays a trace: what it asks, and what it says without one."""

from pathlib import Path

import pytest

from benchmarks import traces
from benchmarks.options import NOTHING_TO_MEASURE
from benchmarks.result import Result
from tests.tiny_folders import generate_bundle


def test_a_trace_is_replayed_at_both_loads(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"{number * 0.5 + (number % 3) * 0.1},{40 + number},{30}\n" for number in range(60)]
    trace.write_text("time,prompt,output\n" + "".join(lines), encoding="utf-8")
    folder = str(generate_bundle().folder)
    kept = ["--quick", "--trace", str(trace), "--bundles", folder, "--results", str(tmp_path)]
    assert traces.main(kept) == 0
    result = Result.read(tmp_path / "traces.json")
    asked = [row[:3] for row in result.tables[0].rows]
    assert asked == [
        [arm, load, 40] for arm in ("Stepdial", "full steps") for load in ("0.8 x", "1.5 x")
    ]
    assert [target.wanted for target in result.targets] == [traces.WANTED]
    assert result.targets[0].value > 0


def test_without_a_trace_it_says_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert traces.main([]) == NOTHING_TO_MEASURE
    assert "--trace FILE" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"cannot be read: .* It must be a CSV file"):
        traces.main(["--trace", str(tmp_path / "missing.csv")])
