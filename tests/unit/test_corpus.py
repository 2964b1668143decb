"""Plain text: files of the official parts, and windows that stay within them."""

import gzip
from pathlib import Path

import pytest
import torch

from train.data.tables import DataError
from train.data.text import TextDataset, read_corpus
from train.recipe import DataConfig


def lines(word: str, count: int) -> str:
    return "".join(f"{word}{i} is line {i}\n" for i in range(count))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(lines("train", 9000).encode()))
    (tmp_path / "b.txt").write_text(lines("valid", 50), encoding="utf-8")
    (tmp_path / "c.txt").write_text(lines("test", 60), encoding="utf-8")
    return tmp_path


def config(folder: Path, **changes: object) -> DataConfig:
    files = {"train": "a.txt.gz", "validation": "b.txt", "test": "c.txt"}
    settings = {"path": str(folder), "tokenizer": "words", "vocabulary": 20000, **files, **changes}
    return DataConfig("text", **settings)  # type: ignore[arg-type]  # settings of several types


def test_each_part_has_a_file_of_its_own(folder: Path) -> None:
    data = TextDataset(read_corpus(config(folder)), config(folder), 8, None)
    assert len(data.train_ids) == 9000 * 5  # four words and the end of the line: none cut in two
    assert data.sizes.vocabulary == 2 + 9000 + 9000 + 3  # numbers, train words, is, line, <eos>
    assert [len(data.validation_ids), len(data.held_ids)] == [50 * 5, 60 * 5]
    (first,) = next(data.held_out(1)).inputs
    assert data.tokenizer.decode(first[0].tolist()) == "<unk> is line 0\n<unk> is line"
    (watched,) = next(data.validation(1)).inputs
    assert torch.equal(watched, first)  # valid0 and test0 are unknown alike


def test_a_part_without_a_file_is_taken_from_another(folder: Path) -> None:
    some = read_corpus(config(folder, test=""))
    assert some.test == some.validation == lines("valid", 50)
    cut = read_corpus(config(folder, validation="", held_out=0.25))
    assert cut.train + cut.validation == lines("train", 9000)
    assert cut.test == lines("test", 60)
    every = read_corpus(config(folder, train="", validation="", test=""))
    assert every.train.startswith("train0") and every.test.endswith("test59 is line 59\n")


def test_beside_a_file_to_train_on_lie_those_that_are_held_out(folder: Path) -> None:
    plain = lines("train", 70)
    (folder / "book.txt").write_text(plain, encoding="utf-8")
    book = config(folder, path=str(folder / "book.txt"), train="", test="")
    assert read_corpus(book) == (plain, lines("valid", 50), lines("valid", 50))
    with pytest.raises(DataError, match=r"nope\.txt does not exist"):
        read_corpus(config(folder, path=str(folder / "book.txt"), train="", validation="nope.txt"))
    with pytest.raises(DataError, match=r"b\.txt is held out, so name .* data\.train"):
        read_corpus(config(folder, train="", test=""))


def test_an_empty_text_is_too_short(folder: Path) -> None:
    (folder / "empty.txt").write_text("")
    empty = config(folder, path=str(folder / "empty.txt"), train="", validation="", test="")
    with pytest.raises(DataError, match="short"):
        TextDataset(read_corpus(empty), empty, 8, None)


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match=r"d\.txt does not exist: set data\.train"):
        read_corpus(config(folder, test="d.txt"))
    (folder / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"b\.txt: not UTF-8 .*: iconv -f utf-16"):
        read_corpus(config(folder))
    whole = (folder / "a.txt.gz").read_bytes()
    (folder / "a.txt.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"a\.txt\.gz cannot be read.*whole"):
        read_corpus(config(folder))
