"""Images and point clouds, from idx files (plain or .gz) and .npz files."""

import gzip
import hashlib
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from train.data.batch import Batch, Sizes, as_tensor
from train.data.tables import DataError, Shuffle, divide
from train.recipe import DataConfig

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


# Labelled images: idx and .npz files of bytes, normalised, moved and mirrored in training. A
# batch is a function of (seed, iteration), its random moves included.


MEASURED_TOGETHER = 4096  # images: bounds the memory that measuring mean and std takes


class ImageDataset:
    """Images (channels, height, width) of one size, with a class each."""

    tokenizer: Tokenizer | None = None

    def __init__(self, config: DataConfig, seed: int) -> None:
        self._data = open_arrays(config, seed, _pixels)
        self.labels: tuple[str, ...] = self._data.names
        self.digest = self._data.digest
        channels, height, width = self._data.used.values.shape[1:]
        self.sizes = Sizes(classes=len(self.labels), channels=channels, height=height, width=width)
        # Of each channel, for pixels from 0 to 1: what a bundle must know to prepare an image.
        self.mean, self.std = _mean_and_std(config, self._data.used.values)
        self._shift, self._flip = config.shift, config.flip
        self._shuffle = Shuffle(len(self._data.used))

    def batch(self, iteration: int, size: int, seed: int) -> Batch:
        rows = self._data.used.at(self._shuffle.rows(iteration, size, seed))
        draw = np.random.default_rng((seed, iteration, 1))
        pixels = rows.values  # (B, C, H, W) bytes
        if self._shift:
            pixels = shifted(pixels, self._shift, draw)
        if self._flip:
            mirrored = draw.random(len(pixels)) < 0.5
            pixels = np.where(mirrored[:, None, None, None], pixels[..., ::-1], pixels)
        return self._normalised(Examples(pixels, rows.classes))

    def held_out(self, size: int) -> Iterator[Batch]:
        return self._in_order(self._data.test, size)

    def validation(self, size: int) -> Iterator[Batch]:
        return self._in_order(self._data.held, size)

    def _in_order(self, examples: Examples, size: int) -> Iterator[Batch]:
        for start in range(0, len(examples), size):
            yield self._normalised(examples.at(np.arange(start, min(start + size, len(examples)))))

    def _normalised(self, examples: Examples) -> Batch:
        mean, std = (
            np.array(values, np.float32).reshape(1, -1, 1, 1)  # (1, C, 1, 1)
            for values in (self.mean, self.std)
        )
        pixels = examples.values.astype(np.float32, order="C")
        pixels /= np.float32(255)
        pixels -= mean
        pixels /= std  # (B, C, H, W)
        return Batch((as_tensor(pixels),), as_tensor(examples.classes))


def shifted(pixels: np.ndarray, most: int, draw: np.random.Generator) -> np.ndarray:
    """Each image moved by up to `most` pixels either way, with zeros where nothing was."""
    H, W = pixels.shape[2:]
    room = np.pad(pixels, ((0, 0), (0, 0), (most, most), (most, most)))
    moved = np.empty_like(pixels)
    for i, (down, right) in enumerate(draw.integers(0, 2 * most + 1, (len(pixels), 2))):
        moved[i] = room[i, :, down : down + H, right : right + W]
    return moved


def _pixels(values: np.ndarray, name: str) -> np.ndarray:
    """Bytes as (N, C, H, W), from (N, H, W) or (N, H, W, C)."""
    if values.dtype != np.uint8:
        raise DataError(f"{name}: {values.dtype}; give pixels from 0 to 255, of type uint8")
    if values.ndim == 3:
        return values[:, None]
    if values.ndim == 4 and values.shape[3] in (1, 3, 4):
        return np.ascontiguousarray(values.transpose(0, 3, 1, 2))
    raise DataError(
        f"{name}: shape {values.shape}; expected (images, height, width) or (images, height, "
        "width, channels) with 1, 3 or 4 channels"
    )


def _mean_and_std(
    config: DataConfig, pixels: np.ndarray
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    channels = pixels.shape[1]
    if config.mean or config.std:
        if not len(config.mean) == len(config.std) == channels or min(config.std) <= 0:
            raise DataError(
                f"data.mean and data.std need {channels} numbers each, one a channel, and std "
                "above 0; leave both empty to measure them"
            )
        return config.mean, config.std
    counts = np.zeros((channels, 256))
    for start in range(0, len(pixels), MEASURED_TOGETHER):
        some = pixels[start : start + MEASURED_TOGETHER]
        for c in range(channels):
            counts[c] += np.bincount(some[:, c].ravel(), minlength=256)
    shares, values = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
    mean = shares @ values
    std = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1))
    std[std == 0] = 1.0  # a channel of one value carries nothing; any scale will do
    return tuple(mean.tolist()), tuple(std.tolist())


# Labelled point clouds from .npz files, each centred and scaled into the unit sphere. A batch is
# a function of (seed, iteration).


class PointDataset:
    """Clouds of `points` points, drawn from those of the file where it has more."""

    tokenizer: Tokenizer | None = None

    def __init__(self, config: DataConfig, points: int, seed: int) -> None:
        self._data = open_arrays(config, seed, _clouds)
        self.labels: tuple[str, ...] = self._data.names
        self.digest = self._data.digest
        self.sizes = Sizes(classes=len(self.labels), dimensions=self._data.used.values.shape[2])
        self.points = points
        self._shuffle = Shuffle(len(self._data.used))

    def batch(self, iteration: int, size: int, seed: int) -> Batch:
        rows = self._data.used.at(self._shuffle.rows(iteration, size, seed))
        clouds = rows.values  # (B, P, 3)
        if clouds.shape[1] > self.points:
            draw = np.random.default_rng((seed, iteration, 1))
            order = np.argsort(draw.random(clouds.shape[:2]), axis=1)[:, : self.points]
            clouds = np.take_along_axis(clouds, order[:, :, None], axis=1)
        return _batch(clouds, rows.classes)

    def held_out(self, size: int) -> Iterator[Batch]:
        return self._in_order(self._data.test, size)

    def validation(self, size: int) -> Iterator[Batch]:
        return self._in_order(self._data.held, size)

    def _in_order(self, examples: Examples, size: int) -> Iterator[Batch]:
        count = examples.values.shape[1]
        chosen = np.arange(count)
        if count > self.points:  # the same points of every cloud, whatever order the file has
            chosen = np.random.default_rng(0).permutation(count)[: self.points]
        for start in range(0, len(examples), size):
            rows = examples.at(np.arange(start, min(start + size, len(examples))))
            yield _batch(rows.values[:, chosen], rows.classes)


def unit_sphere(clouds: np.ndarray) -> np.ndarray:
    """Each cloud (B, P, dimensions) centred on its mean, its farthest point at distance 1."""
    # In float64, if the file has it: coordinates of a map are large, and differ by little.
    clouds = clouds.astype(np.promote_types(clouds.dtype, np.float32))
    one_place = (clouds == clouds[:, :1]).all((1, 2))
    clouds = clouds - clouds.mean(1, keepdims=True)
    clouds[one_place] = 0  # rounding can make the mean of equal numbers differ from them
    farthest = np.linalg.norm(clouds, axis=2).max(1)  # (B,)
    farthest[farthest == 0] = 1.0
    scaled: np.ndarray = (clouds / farthest[:, None, None]).astype(np.float32)
    return scaled


def _batch(clouds: np.ndarray, classes: np.ndarray) -> Batch:
    return Batch((as_tensor(unit_sphere(clouds)),), as_tensor(classes))


def _clouds(values: np.ndarray, name: str) -> np.ndarray:
    if values.ndim != 3 or values.dtype.kind not in "uif" or 0 in values.shape[1:]:
        raise DataError(
            f"{name}: {values.dtype} of shape {values.shape}; expected numbers of shape (clouds, "
            "points, dimensions)"
        )
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(f"{name}: a coordinate is not finite; remove that cloud")
    return values
