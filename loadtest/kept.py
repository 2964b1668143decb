"""A report that was kept, read back and checked: a file may have been cut, edited, or be another.

It deliberately knows nothing of comparing.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.report import SCHEMA_VERSION

FIGURES = (
    *("requests_per_s", "errors", "refused", "p50_ms", "p95_ms", "p99_ms"),
    *("first_token_p50_ms", "first_token_p99_ms", "gap_p50_ms", "gap_p99_ms"),
    *("per_token_p50_ms", "per_token_p99_ms"),
    *("steps_mean", "accuracy"),
)
INTERVALS = ("p50_interval_ms", "p99_interval_ms", "accuracy_interval")
TERMS = ("url", "mix", "arrivals", "users", "seed", "objective", "client")


class KeptError(ValueError):
    """The file is no report that can be read; the text says which and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class KeptRow:
    """One operation; of figures and intervals only those that were measured."""

    name: str
    requests: float
    figures: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class KeptStage:
    """One stretch of the test."""

    rate_per_s: float | None
    offered_per_s: float
    rows: tuple[KeptRow, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """As much of a report as a comparison needs."""

    terms: Mapping[str, Any]
    saturated: bool
    rows: tuple[KeptRow, ...]
    stages: tuple[KeptStage, ...]


def read_report(path: Path) -> Kept:
    """A report.json of this version, or that of a folder."""
    file = path / "report.json" if path.is_dir() else path
    try:
        record = _object(json.loads(file.read_text(encoding="utf-8")), "the report")
        version = _of(record, "schema_version")
    except RecursionError:
        raise KeptError(f"{file} is no report of a load test: it is nested too deep") from None
    except (OSError, ValueError) as error:
        raise KeptError(f"{file} is no report of a load test: {error}") from None
    if version != SCHEMA_VERSION:
        raise KeptError(
            f"{file} has schema version {version!r}, not {SCHEMA_VERSION}: run that test again."
        )
    try:
        return _kept(record)
    except ValueError as error:
        raise KeptError(f"{file} is a damaged report: {error}. Run that test again.") from None


def _kept(record: dict[str, Any]) -> Kept:
    saturated = _of(record, "saturated")
    if not isinstance(saturated, bool):
        raise ValueError(f"saturated is {_short(saturated)}, neither true nor false")
    return Kept(
        terms={name: record.get(name) for name in TERMS},
        saturated=saturated,
        rows=_rows(record, "the report"),
        stages=tuple(
            _stage(stage, f"stage {at}") for at, stage in enumerate(_list(record, "stages"), 1)
        ),
    )


def _stage(value: Any, where: str) -> KeptStage:
    stage = _object(value, where)
    rate, offered = _of(stage, "rate_per_s"), _of(stage, "offered_per_s")
    return KeptStage(
        rate_per_s=None if rate is None else _number(rate, f"rate_per_s of {where}"),
        offered_per_s=_number(offered, f"offered_per_s of {where}"),
        rows=_rows(stage, where),
    )


def _rows(record: dict[str, Any], where: str) -> tuple[KeptRow, ...]:
    return tuple(
        _row(row, f"row {at} of {where}") for at, row in enumerate(_list(record, "rows"), 1)
    )


def _row(value: Any, where: str) -> KeptRow:
    row = _object(value, where)
    words = [_of(row, name) for name in ("endpoint", "model", "ask")]
    if not all(isinstance(word, str) for word in words):
        raise ValueError(f"endpoint, model and ask of {where} are {_short(words)}, not all words")
    return KeptRow(
        name=" ".join(words),
        requests=_number(_of(row, "requests"), f"requests of {where}"),
        figures={
            name: _number(row[name], f"{name} of {where}")
            for name in FIGURES
            if row.get(name) is not None
        },
        intervals={
            name: _pair(row[name], f"{name} of {where}")
            for name in INTERVALS
            if row.get(name) is not None
        },
    )


def _of(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise ValueError(f"it has no {name}")
    return record[name]


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {_short(value)}, no object")
    return value


def _list(record: dict[str, Any], name: str) -> list[Any]:
    found = _of(record, name)
    if not isinstance(found, list):
        raise ValueError(f"{name} is {_short(found)}, no list")
    return found


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what} is {_short(value)}, no number")
    if value < 0:
        raise ValueError(f"{what} is {_short(value)}, below 0")
    return value


def _pair(value: Any, what: str) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{what} is {_short(value)}, no pair of numbers")
    return _number(value[0], what), _number(value[1], what)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
