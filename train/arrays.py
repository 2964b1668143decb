"""Labelled arrays from files: idx files, plain or as .gz, and the arrays of .npz files.

Knows formats, splits and classes, not whether a row is an image or a cloud of points.
"""

import gzip
import hashlib
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from train.config import DataConfig
from train.shuffle import divide
from train.tables import DataError

IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
UNREADABLE = (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, slots=True)
class Examples:
    """Rows of values and the class of each."""

    values: np.ndarray  # (rows, ...)
    classes: np.ndarray  # (rows,) int64

    def __len__(self) -> int:
        return len(self.classes)

    def at(self, rows: np.ndarray) -> "Examples":
        return Examples(self.values[rows], self.classes[rows])


@dataclass(frozen=True, slots=True)
class LabelledArrays:
    """The three splits of a data set of arrays."""

    used: Examples  # to train on
    held: Examples  # for validation
    test: Examples  # the official test rows; `held` where there are none
    names: tuple[str, ...]  # of the classes
    digest: str


def open_arrays(
    config: DataConfig, seed: int, check: Callable[[np.ndarray, str], np.ndarray]
) -> LabelledArrays:
    """All splits that a recipe names; `check` refuses or rearranges the values of a file."""
    if bool(config.test) != bool(config.test_labels):
        raise DataError("data.test and data.test_labels belong together: give both or neither")
    whole = _examples(config, "train", check)
    used, held = divide(len(whole), config.held_out, seed)
    if len(used) == 0:
        raise DataError(f"{config.train}: no rows are left to train on: lower data.held_out")
    test = None
    if config.test:
        test = _examples(config, "test", check)
        if test.values.shape[1:] != whole.values.shape[1:]:
            raise DataError(
                f"{config.test}: rows of shape {test.values.shape[1:]}, but those of "
                f"{config.train} have {whole.values.shape[1:]}: give them one shape"
            )
    names = _names(config, [whole] if test is None else [whole, test])
    digest = hashlib.sha256()
    for piece in (whole.values, whole.classes, held):
        digest.update(np.ascontiguousarray(piece).data)
    held_rows = whole.at(held)
    return LabelledArrays(
        whole.at(used), held_rows, held_rows if test is None else test, names, digest.hexdigest()
    )


def _examples(
    config: DataConfig, split: str, check: Callable[[np.ndarray, str], np.ndarray]
) -> Examples:
    name, labels = getattr(config, split), getattr(config, f"{split}_labels")
    values = check(read_array(config, name, f"data.{split}"), name)
    classes = read_array(config, labels, f"data.{split}_labels")
    if classes.ndim != 1 or classes.dtype.kind not in "ui":
        raise DataError(
            f"{labels}: {classes.dtype} of shape {classes.shape}; expected one whole number a row, "
            "the class counted from 0"
        )
    if len(classes) != len(values):
        raise DataError(
            f"{labels} has {len(classes)} classes, but {name} {len(values)} rows: they must match"
        )
    if len(values) == 0:
        raise DataError(f"{name}: no rows")
    return Examples(values, classes.astype(np.int64))


def _names(config: DataConfig, parts: list[Examples]) -> tuple[str, ...]:
    low = min(int(p.classes.min()) for p in parts)
    high = max(int(p.classes.max()) for p in parts)
    names = config.labels or tuple(str(number) for number in range(high + 1))
    if low < 0 or high >= len(names):
        raise DataError(
            f"{config.train_labels}: classes from {low} to {high}, but {len(names)} data.labels: "
            "count classes from 0 and name each"
        )
    absent = set(range(len(names))).difference(*(p.classes.tolist() for p in parts))
    if absent and not config.labels:
        raise DataError(
            f"{config.train_labels}: classes up to {high}, but no row of class {min(absent)}: "
            "count classes from 0 without gaps, or name them all in data.labels"
        )
    if len(names) < 2 or len(set(names)) != len(names):
        raise DataError(
            f"{config.train_labels}: a classifier needs two classes or more, and data.labels that "
            "differ"
        )
    return names


def read_array(config: DataConfig, name: str, key: str) -> np.ndarray:
    """The array that a recipe names: an idx file, or FILE.npz:KEY."""
    if not name:
        raise DataError(f"{key} is empty: name an idx file, or an array as FILE.npz:KEY")
    file, colon, array = name.partition(".npz:")
    path = _path(config, file + ".npz" if colon else name)
    try:
        return _read_npz(path, array) if colon else _read_idx(path)
    except DataError:
        raise
    except UNREADABLE as error:
        if "Object arrays" in str(error):
            raise DataError(
                f"{path}: {array} is an array of Python objects: give every row the same shape, "
                "images one size, and store plain numbers"
            ) from None
        raise DataError(f"{path} cannot be read: {error}. Is the file whole?") from None


def _path(config: DataConfig, file: str) -> Path:
    if not config.path:
        raise DataError(f"this recipe needs a data set: pass --data FOLDER, where {file} is")
    base = Path(config.path)
    if base.is_file():  # one .npz file holds all arrays
        return base
    packed = file.removesuffix(".gz") if file.endswith(".gz") else file + ".gz"
    for path in (base / file, base / packed):
        if path.is_file():
            return path
    raise DataError(f"{base / file} does not exist: pass --data FOLDER, where {file} is")


def _read_npz(path: Path, key: str) -> np.ndarray:
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not a whole .npz file: copy or write it again")
    with np.load(path, allow_pickle=False) as arrays:
        if key not in arrays:
            raise DataError(f"{path}: no array {key!r}; there are {', '.join(arrays)}")
        found: np.ndarray = arrays[key]
        return found


def _read_idx(path: Path) -> np.ndarray:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in IDX_TYPES:
        raise DataError(f"{path} is not an idx file; an array of a .npz is FILE.npz:KEY")
    kind, head = np.dtype(IDX_TYPES[data[2]]), 4 + 4 * data[3]
    shape = np.frombuffer(data[4:head], ">i4").tolist()
    expected = head + prod(shape) * kind.itemsize
    if len(shape) != data[3] or len(data) != expected:
        raise DataError(
            f"{path}: {len(data)} bytes, but its head promises {expected}: copy the file again"
        )
    return np.frombuffer(data, kind, offset=head).reshape(shape)
