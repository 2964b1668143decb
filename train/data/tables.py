"""Tables of text and label: CSV, TSV and JSONL, plain or compressed; and the order of their rows.

Errors name the file, the row and what to pass.
"""

import codecs
import csv
import gzip
import hashlib
import io
import itertools
import json
import logging
import lzma
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from train.recipe import DataConfig

_log = logging.getLogger("stepdial")
LONGEST_CELL = 1 << 24
KINDS = (".csv", ".tsv", ".jsonl", ".json")
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)  # of a file, plain or compressed
_SEPARATORS = {".csv": ",", ".tsv": "\t"}


class DataError(ValueError):
    """Data that is missing or cannot be used, with what to pass or change."""


Rows = list[tuple[str, str]]


def read_table(config: DataConfig, name: str) -> Rows:
    """(text, label as written in the file) of every row of one table that has a text."""
    path = table_path(config, name)
    if plain_name(path).suffix.lower() not in KINDS:
        raise DataError(f"{path}: expected .csv, .tsv or .jsonl, plain or as .gz or .xz")
    try:
        with open_text(path) as file:
            rows = [
                _row(record, config, f"{path}, {at}") for at, record in _records(file, path, config)
            ]
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from None
    except (*UNREADABLE, json.JSONDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    kept = [row for row in rows if row[0].strip() and row[1]]
    if len(kept) < len(rows):
        texts = sum(not text.strip() for text, _ in rows)
        _warn_of_empty(path, texts, len(rows) - len(kept) - texts)
    if not kept:
        raise DataError(f"{path}: no rows")
    label, others = kept[0][1], kept[1:]
    by_number = all(column.isdecimal() for column in (*config.text, config.label))
    if by_number and others and not config.values and all(label != one for _, one in others):
        raise DataError(
            f"{path}: no other row has the label of the first one, {label!r}. If that is a header, "
            "pass the names of its columns as --text and --label; if not, remove the row"
        )
    return kept


@cache  # a training reads its table several times
def _warn_of_empty(path: Path, texts: int, labels: int) -> None:
    for count, what in ((texts, "text"), (labels, "a label")):
        if count:
            _log.warning(
                "%s: left out %d row%s without %s", path, count, "" if count == 1 else "s", what
            )


def table_path(config: DataConfig, name: str) -> Path:
    base = Path(config.path)
    if not config.path:
        raise DataError(
            f"this recipe needs a data set: pass --data FOLDER, where {name} is, or --data FILE, "
            "a table of your own"
        )
    if not base.exists():
        own = plain_name(base).suffix.lower() in KINDS
        raise DataError(
            f"{base} does not exist: pass --data FILE, where the table is"
            if own
            else f"{base} does not exist: pass --data FOLDER, the folder that holds {name}, or "
            "--data FILE, a table of your own"
        )
    path = base / name
    if base.is_file():  # the training table itself; a test table stands beside it
        path = base.parent / name if name == config.test else base
        if not path.is_file():
            raise DataError(f"{path} does not exist: data.test is a path from the folder of {base}")
    if not path.is_file():
        raise DataError(f"{path} does not exist: pass --data FOLDER, the folder that holds {name}")
    return path


def plain_name(path: Path) -> Path:
    return path.with_suffix("") if path.suffix.lower() in (".gz", ".xz") else path


def not_utf8(path: Path, error: UnicodeDecodeError) -> DataError:
    """What to say of a file that is not UTF-8."""
    wide = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return DataError(
        f"{path}: not UTF-8 ({error.reason}); convert it first, as in: "
        f"iconv -f {'utf-16' if wide else 'cp1252'} -t utf-8 old > new"
    )


def read_text(path: Path) -> str:
    """A whole file of text, plain or as .gz; its lines end with a line feed."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Is the file whole?") from None


def open_text(path: Path) -> IO[str]:
    if path.suffix.lower() == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig", newline="")
    if path.suffix.lower() == ".xz":
        return io.TextIOWrapper(lzma.open(path), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _records(file: IO[str], path: Path, config: DataConfig) -> Iterator[tuple[str, Any]]:
    """Where each record stands, and the record: a dictionary by column, or a list."""
    separator = _SEPARATORS.get(plain_name(path).suffix.lower())
    if separator is None:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", _json_line(line, f"{path}, line {number}")
        return
    csv.field_size_limit(LONGEST_CELL)
    columns = (*config.text, config.label)
    by_number = all(column.isdecimal() for column in columns)
    lines, separator = _separated(file, separator, [] if by_number else columns)
    rows = _cells(csv.reader(lines, delimiter=separator, strict=True), path)
    header = None if by_number else [name.strip() for name in next(rows, [])]
    for column in columns:
        if header is not None and header.count(column) > 1:
            raise DataError(f"{path}: two columns are called {column}: rename one")
    width = None if header is None else len(header)
    for number, cells in enumerate(rows, 1):
        width = width or len(cells)
        if len(cells) != width:
            if header is not None:  # cut at another separator, it lacks the columns
                _row(dict.fromkeys(header), config, f"{path}, row {number}")
            first = "first row" if header is None else "header"
            raise DataError(
                f"{path}, row {number}: {len(cells)} cells, but the {first} has {width}: put a "
                "text that holds commas, semicolons, tabs or line ends in quotes"
            )
        yield (
            f"row {number}",
            cells if header is None else dict(zip(header, cells, strict=True)),
        )


def _separated(
    lines: Iterator[str], separator: str, columns: Sequence[str]
) -> tuple[Iterator[str], str]:
    """The lines of a table, and what separates its columns, of which some are known.

    A .csv is separated by semicolons if its first line has some and no comma, or if only so its
    header has the columns: spreadsheets save it so where a comma is for decimals.
    """
    first = next(lines, "")
    if separator == "," and ";" in first and len(first) <= LONGEST_CELL:
        at_commas, at_semicolons = (_names(first, one) for one in ",;")
        found = bool(columns) and at_semicolons.issuperset(columns)
        if "," not in first or (found and not at_commas.issuperset(columns)):
            separator = ";"
    return itertools.chain([first], lines), separator


def _names(header: str, separator: str) -> set[str]:
    return {name.strip() for name in next(csv.reader([header], delimiter=separator), [])}


def _cells(reader: Any, path: Path) -> Iterator[list[str]]:
    """The rows of a table, the header with them, without empty lines."""
    read = 0  # lines
    try:
        for cells in reader:
            read = reader.line_num
            if cells:
                yield cells
    except csv.Error as error:
        raise DataError(
            f"{path} cannot be read: line {read + 1}: {error}; is a quote inside a text not "
            "doubled, or is a quote of a text never closed?"
        ) from None


def _json_line(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # of a number of many digits too
        raise DataError(
            f"{where}: not valid JSON: {error}; write one object a line, as .jsonl has it"
        ) from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected one object a line, with text and label")
    return record


def _row(record: Any, config: DataConfig, where: str) -> tuple[str, str]:
    try:
        texts = [_cell(record, column, where) for column in config.text]
        label = _cell(record, config.label, where).strip()
    except (KeyError, IndexError):
        known = list(record) if isinstance(record, dict) else list(map(str, range(len(record))))
        there = known
        if not isinstance(record, dict):  # perhaps a header, whose names tell more
            there = [f"{number} ({cell[:20]})" for number, cell in zip(known, record, strict=True)]
        wanted = dict.fromkeys((*config.text, config.label))
        missing = " and ".join(column for column in wanted if column not in known)
        raise DataError(
            f"{where}: no column {missing}; there are {', '.join(there)}. "
            "Name yours with --text COLUMN --label COLUMN, or number them from 0 if the first row "
            "is no header. Commas or semicolons separate columns, tabs in .tsv."
        ) from None
    return " ".join(texts), label


def _cell(record: Any, column: str, where: str) -> str:
    value = record[column] if isinstance(record, dict) else record[int(column)]
    return "" if is_missing(value) else plain_text(value, f"{where}: {column}")


def is_missing(value: Any) -> bool:
    """Whether a cell is null, or NaN."""
    return value is None or bool(value != value)


def plain_text(value: Any, what: str) -> str:
    """A cell as text; `what` says where it stands."""
    if isinstance(value, list | dict):
        raise DataError(f"{what} is a {type(value).__name__}; give a text or a number")
    text = str(value)
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError(f"{what} has half a character (a lone surrogate); repair it")
    return text


# The order of rows: epochs that are a function of (seed, epoch), in batches of like length.


POOL_BATCHES = 50  # batches sorted by length together, so that padding is small

IndexArray = npt.NDArray[np.int64]


class Shuffle:
    """Which rows make a batch; rows of one length only if `lengths` is a number of rows."""

    def __init__(self, lengths: Sequence[int] | int) -> None:
        equal = isinstance(lengths, int)
        self._lengths = np.zeros(lengths, np.int64) if equal else np.asarray(lengths, np.int64)
        self._epochs: dict[tuple[int, int, int], list[IndexArray]] = {}

    def rows(self, iteration: int, size: int, seed: int) -> IndexArray:
        per_epoch = max(1, len(self._lengths) // size)
        epoch, index = divmod(iteration, per_epoch)
        key = (epoch, size, seed)
        if key not in self._epochs:
            self._epochs = {key: self._epoch(epoch, size, seed)}
        return self._epochs[key][index]

    def _epoch(self, epoch: int, size: int, seed: int) -> list[IndexArray]:
        draw = np.random.default_rng((seed, epoch))
        order = draw.permutation(len(self._lengths))
        if len(order) > size:  # whole batches; the rows left out are of any length
            order = order[: len(order) // size * size]
        batches: list[IndexArray] = []
        for start in range(0, len(order), size * POOL_BATCHES):
            pool = order[start : start + size * POOL_BATCHES]
            pool = pool[np.argsort(self._lengths[pool], kind="stable")]
            batches += [pool[i : i + size] for i in range(0, len(pool), size)]
        return [batches[i] for i in draw.permutation(len(batches))]


def divide(rows: int, held_out: float, seed: int) -> tuple[IndexArray, IndexArray]:
    """The rows to train on, and the share of them that is kept for validation."""
    order = np.random.default_rng(seed).permutation(rows)
    kept = max(1, int(rows * held_out))
    return order[kept:], order[:kept]


def digest_of(*parts: np.ndarray) -> str:
    """A name for the content of arrays of whole numbers."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.astype(np.int32).tobytes() + b";")
    return digest.hexdigest()
