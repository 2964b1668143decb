"""Parallel text: batches for a translator, splits, references, and errors that name the file."""

import gzip
from pathlib import Path

import pytest
import torch

from train.data.batch import IGNORED
from train.data.labelled import PairDataset, read_pairs
from train.data.tables import DataError
from train.recipe import DataConfig

WORDS = ("one two three four five six seven", "eins zwei drei vier fünf sechs sieben")


def lines(count: int, side: int) -> list[str]:
    words = WORDS[side].split()
    return [" ".join(words[(i + j) % 7] for j in range(1 + i % 5)) + f" {i}." for i in range(count)]


def write(folder: Path, name: str, count: int, packed: bool = False) -> None:
    for side, language in enumerate(("en", "de")):
        text = "".join(line + "\n" for line in lines(count, side))
        file = folder / f"{name}.{language}"
        if packed:
            file.with_name(file.name + ".gz").write_bytes(gzip.compress(text.encode()))
        else:
            file.write_text(text, encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "train", 60, packed=True)
    write(tmp_path, "val", 10)
    write(tmp_path, "test", 12)
    return tmp_path


def config(folder: Path, **changes: object) -> DataConfig:
    given = {"path": str(folder), "validation": "val", "test": "test", "vocabulary": 300}
    return DataConfig(kind="pairs", **(given | changes))  # type: ignore[arg-type]  # settings of several types


def test_a_batch_is_what_a_translator_learns_from(folder: Path) -> None:
    data = PairDataset(config(folder), 64, 64, None, seed=0)
    batch = data.batch(0, 8, seed=0)
    source, target = batch.inputs
    assert data.tokenizer.token_to_id("<pad>") == 0 and data.labels is None
    assert data.sizes.vocabulary == data.tokenizer.get_vocab_size()
    pairs = dict(zip(lines(60, 0), lines(60, 1), strict=True))
    for s, t, y in zip(source, target, batch.targets, strict=True):
        length = int((y != IGNORED).sum())
        assert t[0] == data.begin and y[length - 1] == data.end
        assert torch.equal(t[1:length], y[: length - 1])
        assert (t[length:] == 0).all() and (y[length:] == IGNORED).all()
        read = data.tokenizer.decode(s.tolist())  # leaves out padding and marks
        assert pairs[read] == data.tokenizer.decode(t.tolist())


def test_splits_and_references(folder: Path) -> None:
    data = PairDataset(config(folder), 64, 64, None, seed=0)
    assert data.references == list(zip(lines(12, 0), lines(12, 1), strict=True))
    assert sum(b.rows for b in data.held_out(5)) == 12
    assert sum(b.rows for b in data.validation(4)) == 10
    shared = PairDataset(config(folder, validation="", test=""), 64, 64, data.tokenizer, seed=0)
    assert sum(b.rows for b in shared.validation(4)) == 6 == len(shared.references)
    assert not {s for s, _ in shared.references} - set(lines(60, 0))


def test_batches_repeat_and_each_epoch_is_whole(folder: Path) -> None:
    one = PairDataset(config(folder), 64, 64, None, seed=0)
    two = PairDataset(config(folder), 64, 64, one.tokenizer, seed=0)
    assert one.digest == two.digest
    assert torch.equal(one.batch(11, 10, 4).targets, two.batch(11, 10, 4).targets)
    rows = [row.tolist() for i in range(6) for row in one.batch(i, 10, 4).inputs[0]]
    assert {one.tokenizer.decode(row) for row in rows} == set(lines(60, 0))


def test_long_pairs_are_left_out_and_say_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = PairDataset(config(folder), 64, 64, None, seed=0)
    longest = max(x.shape[1] for b in full.held_out(1) for x in b.inputs)
    short = PairDataset(config(folder), 64, longest - 1, full.tokenizer, seed=0)
    assert "pairs to test on: longer than model.window" in caplog.text
    assert sum(b.rows for b in short.held_out(5)) < 12 == len(short.references)
    with pytest.raises(DataError, match=r"no pair to train on fits into model\.window 1 "):
        PairDataset(config(folder), 1, 64, full.tokenizer, seed=0)


def test_files_that_cannot_be_used_are_named(folder: Path) -> None:
    with pytest.raises(DataError, match=r"pass --data FOLDER, where train\.en or train\.en\.gz is"):
        read_pairs(config(folder, path=""), "train")
    with pytest.raises(DataError, match=r"train\.fr does not exist, nor with \.gz"):
        read_pairs(config(folder, languages=("en", "fr")), "train")
    (folder / "val.de").write_text("eins\n")
    with pytest.raises(DataError, match=r"val\.en has 10 lines, but .*val\.de 1"):
        read_pairs(config(folder), "val")
    (folder / "val.de").write_bytes(b"caf\xe9\n")
    with pytest.raises(DataError, match=r"val\.de: not UTF-8"):
        read_pairs(config(folder), "val")
    packed = folder / "train.de.gz"
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"train\.de\.gz cannot be read: .*Is the file whole"):
        read_pairs(config(folder), "train")


def test_pairs_with_an_empty_side_are_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "gap.en").write_text("one\n\ntwo\r\nthree")
    (folder / "gap.de").write_text("eins\nleer\nzwei\n \n")
    assert read_pairs(config(folder), "gap") == [("one", "eins"), ("two", "zwei")]
    assert "left out 2 pairs" in caplog.text
