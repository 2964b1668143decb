"""Two reports side by side: what is damaged is refused in one line, whatever it is."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadtest.comparison import main

ROW: dict[str, Any] = {
    **{"endpoint": "classify", "model": "judge", "ask": "steps=4", "requests": 90, "errors": 1},
    **{"p50_ms": 3.0, "p50_interval_ms": [2.5, 3.5], "p99_ms": 9.0, "first_token_p50_ms": None},
}
STAGE = {"rate_per_s": 5.0, "offered_per_s": 5.1, "rows": [ROW]}
REPORT = {"schema_version": 2, "saturated": False, "rows": [ROW], "stages": [STAGE], "users": 3}
NONSENSE = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    *(st.just([]), st.just({}), st.just([None]), st.just([1.0, "x"]), st.just([[1.0], {}])),
)


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a record, those within others too."""
    inner: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        inner = [*value.items()]
    elif isinstance(value, list):
        inner = [*enumerate(value)]
    return [path, *(found for key, one in inner for found in places(one, (*path, key)))]


def put(folder: Path, record: object) -> str:
    file = folder / "report.json"
    file.write_text(json.dumps(record), encoding="utf-8")
    return str(file)


@pytest.fixture
def whole(tmp_path: Path) -> str:
    (tmp_path / "whole").mkdir()
    return put(tmp_path / "whole", REPORT)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(place=st.sampled_from(places(REPORT)), nonsense=NONSENSE | st.just(...))
def test_whatever_is_damaged_is_compared_or_refused_in_one_line(
    place: tuple[str | int, ...],
    nonsense: object,
    whole: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record: Any = json.loads(json.dumps(REPORT))
    if place:
        holder = record
        for key in place[:-1]:
            holder = holder[key]
        if nonsense is ...:
            del holder[place[-1]]
        else:
            holder[place[-1]] = nonsense
    elif nonsense is not ...:
        record = nonsense
    status = main([put(tmp_path, record), whole])
    said = capsys.readouterr().err
    assert (status == 0) == (not said)
    assert said.count("\n") == (status == 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"stages": ...}, "is a damaged report: it has no stages. Run that test again."),
        ({"saturated": "no"}, "saturated is 'no', neither true nor false"),
        (
            {"rows": [ROW | {"p50_ms": "fast"}]},
            "p50_ms of row 1 of the report is 'fast'",
        ),
        ({"rows": [ROW | {"p50_interval_ms": [1]}]}, "is [1], no pair of numbers"),
        ({"stages": [STAGE | {"rows": [ROW | {"ask": 4}]}]}, "row 1 of stage 1"),
        ({"schema_version": 1}, "schema version 1, not 2"),
    ],
)
def test_a_damaged_report_is_named_with_what_is_wrong(
    change: dict[str, Any],
    says: str,
    whole: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = {name: value for name, value in (REPORT | change).items() if value is not ...}
    damaged = put(tmp_path, record)
    assert main([whole, damaged]) == 2
    said = capsys.readouterr().err
    assert says in said and damaged in said


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[1]"])
def test_what_is_no_report_at_all_says_so(
    content: bytes, whole: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_bytes(content)
    assert main([str(tmp_path), whole]) == 2
    assert "is no report of a load test" in capsys.readouterr().err


def test_a_comparison_that_cannot_be_kept_says_so(
    whole: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([whole, whole, "--out", str(tmp_path / "file" / "in")]) == 2
    assert "could not be written" in capsys.readouterr().err


def test_a_rate_that_comes_twice_is_compared_twice_and_a_seed_of_0_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [STAGE, STAGE | {"rate_per_s": 9.0}, STAGE]
    paths = []
    for name, seed in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        paths.append(put(tmp_path / name, REPORT | {"stages": stages, "seed": seed}))
    assert main([*paths, "--out", str(tmp_path / "out")]) == 0
    assert "seed: A 0, B 1" in capsys.readouterr().out
    changes = json.loads((tmp_path / "out" / "comparison.json").read_text())["changes"]
    assert [one["rate_per_s"] for one in changes if one["what"] == changes[0]["what"]] == [5, 9, 5]
