"""Tables of text and label: CSV and JSONL, plain or compressed, with the columns a recipe names.

Knows files, not tokens. Errors name the file, the row and what to pass.
"""

import csv
import gzip
import io
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from train.config import DataConfig


class DataError(ValueError):
    """Data that is missing or cannot be used, with what to pass or change."""


Rows = list[tuple[str, str]]


def read_table(config: DataConfig, name: str) -> Rows:
    """(text, label as written in the file) of every row of one table."""
    path = table_path(config, name)
    plain = path.name.removesuffix(".gz").removesuffix(".xz")
    rows: Rows = []
    with _open(path) as file:
        if plain.endswith((".jsonl", ".json")):
            records: Iterator[Any] = _json_lines(file, path)
        elif plain.endswith(".csv"):
            by_number = all(c.isdigit() for c in (*config.text, config.label))
            records = iter(csv.reader(file)) if by_number else iter(csv.DictReader(file))
        else:
            raise DataError(f"{path}: expected .csv or .jsonl, plain or as .gz or .xz")
        for number, record in enumerate(records, 1):
            try:
                text = " ".join(str(_cell(record, column)) for column in config.text)
                label = str(_cell(record, config.label))
            except (KeyError, IndexError):
                known = ", ".join(record) if isinstance(record, dict) else f"0 to {len(record) - 1}"
                raise DataError(
                    f"{path}, row {number}: no columns {', '.join(config.text)} and {config.label};"
                    f" there are {known}. Set data.text and data.label."
                ) from None
            rows.append((text, label))
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def table_path(config: DataConfig, name: str) -> Path:
    base = Path(config.path)
    if not config.path:
        raise DataError(f"this recipe needs a data set: pass --data FOLDER, where {name} is")
    path = base / name
    if base.is_file():  # the training table itself; a test table stands beside it
        path = base.parent / name if name == config.test else base
    if not path.is_file():
        raise DataError(f"{path} does not exist: pass --data FOLDER, the folder that holds {name}")
    return path


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8", newline="")
    if path.suffix == ".xz":
        return io.TextIOWrapper(lzma.open(path), encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _json_lines(file: IO[str], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not valid JSON: {error}") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: expected an object with text and label")
        yield record


def _cell(record: Any, column: str) -> Any:
    return record[column] if isinstance(record, dict) else record[int(column)]
