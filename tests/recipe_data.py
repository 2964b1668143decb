"""Tiny data sets under the names that the shipped recipes look for, learnable in a few batches.

Knows file formats; neither recipes nor models.
"""

import gzip
import json
import lzma
from pathlib import Path

import numpy as np

SENTENCE = "the quick brown fox jumps over the lazy dog ; pack my box with five dozen jugs .\n"
GOOD, POOR = ("good", "fine", "warm", "bright"), ("bad", "dull", "cold", "weak")
NUMBERS = (("one", "eins"), ("two", "zwei"), ("three", "drei"), ("four", "vier"))
ROWS = 96


def write_all(folder: Path) -> Path:
    """A folder with the data of every recipe that reads any; its corpus is corpus.txt."""
    draw = np.random.default_rng(0)
    classes = draw.integers(0, 2, ROWS).astype(np.uint8)
    _write_images(folder, classes, draw)
    _write_points(folder, classes, draw)
    _write_tables(folder, classes, draw)
    _write_pairs(folder, draw)
    (folder / "corpus.txt").write_text(SENTENCE * 40, encoding="utf-8")
    words = SENTENCE.split()
    tagged = {"words": words, "labels": ["long" if len(word) > 4 else "short" for word in words]}
    (folder / "words.jsonl").write_text(f"{json.dumps(tagged)}\n" * ROWS, encoding="utf-8")
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt.gz").write_bytes(gzip.compress(SENTENCE.encode() * 40))
    return folder


def _write_images(folder: Path, classes: np.ndarray, draw: np.random.Generator) -> None:
    """Bright above or below: grey ones as idx files, coloured ones as .npz."""
    pixels = draw.integers(0, 60, (ROWS, 16, 16)).astype(np.uint8)
    pixels[classes == 0, :8] += 150
    pixels[classes == 1, 8:] += 150
    colours = np.repeat(pixels[..., None], 3, axis=3)
    np.savez(
        folder / "cats_dogs_64.npz",
        X_train=colours,
        y_train=classes,
        X_test=colours,
        y_test=classes,
    )
    for split in ("train", "t10k"):
        _write_idx(folder / f"{split}-images-idx3-ubyte.gz", pixels)
        _write_idx(folder / f"{split}-labels-idx1-ubyte.gz", classes)


def _write_idx(path: Path, values: np.ndarray) -> None:
    head = bytes([0, 0, 0x08, values.ndim]) + np.array(values.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(head + values.tobytes()))


def _write_points(folder: Path, classes: np.ndarray, draw: np.random.Generator) -> None:
    """Round or flat."""
    clouds = draw.standard_normal((ROWS, 24, 3)).astype(np.float32)
    clouds[classes == 1, :, 2] *= 0.05
    np.savez(
        folder / "modelnet10_points512.npz",
        points_train=clouds,
        y_train=classes,
        points_test=clouds,
        y_test=classes,
    )


def _write_tables(folder: Path, classes: np.ndarray, draw: np.random.Generator) -> None:
    """Praise or blame: as lines of JSON, and as columns without and with a header."""
    texts = [" ".join(draw.choice(GOOD if label else POOR, 5)) for label in classes]
    rows = list(zip(texts, map(int, classes), strict=True))
    lines = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
    news = "".join(f'"{1 + label}","{text}","{text}"\n' for text, label in rows)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    for name in ("train_subset", "test"):
        (folder / f"{name}.csv.gz").write_bytes(gzip.compress(news.encode()))
    table = "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows)
    (folder / "labels.csv").write_text(table, encoding="utf-8")


def _write_pairs(folder: Path, draw: np.random.Generator) -> None:
    """Number words, word by word."""
    rows = [[NUMBERS[i] for i in draw.integers(0, 4, draw.integers(2, 5))] for _ in range(ROWS)]
    for side, language in enumerate(("en", "de")):
        lines = "".join(" ".join(pair[side] for pair in row) + "\n" for row in rows).encode()
        for split in ("train", "val", "valid", "test", "test_2016_flickr"):
            (folder / f"{split}.{language}.gz").write_bytes(gzip.compress(lines))
