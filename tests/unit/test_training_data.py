"""Data: tables, corpora, generators, tokenizers; batches are functions of (seed, iteration)."""

import csv
import dataclasses
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from train.data import generators, open_dataset
from train.data import text as tokens
from train.data.labelled import LabelledDataset
from train.data.tables import LONGEST_CELL, DataError, Shuffle, read_table
from train.data.text import TextDataset, cut, ids_of, train_tokenizer, windows_in_order
from train.recipe import DataConfig, load_recipe

ROWS = [("good film", "1"), ("bad film", "0"), ("fine, really", "1"), ("dull", "0")]


def table(path: str, **changes: Any) -> DataConfig:
    return DataConfig(kind="table", path=path, **changes)


@pytest.mark.parametrize(
    "name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.xz", "t.csv", "t.csv.gz", "t.tsv"]
)
def test_tables_read_alike_in_every_format(tmp_path: Path, name: str) -> None:
    if "jsonl" in name:
        text = "".join(json.dumps({"text": t, "label": int(y)}) + "\n" for t, y in ROWS)
    else:
        plain = tmp_path / "plain"
        with plain.open("w", newline="") as file:
            separator = "\t" if ".tsv" in name else ","
            csv.writer(file, delimiter=separator).writerows([("text", "label"), *ROWS])
        text = plain.read_text()
    data = text.encode()
    if name.endswith(".gz"):
        data = gzip.compress(data)
    if name.endswith(".xz"):
        data = lzma.compress(data)
    (tmp_path / name).write_bytes(data)
    assert read_table(table(str(tmp_path)), name) == ROWS


def test_a_file_is_the_training_table_and_its_test_table_stands_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("text,label\na,x\nb,y\n")
    (tmp_path / "test.csv").write_text("text,label\nc,x\n")
    config = table(str(tmp_path / "mine.csv"), test="test.csv")
    assert read_table(config, "train.csv") == [("a", "x"), ("b", "y")]
    assert read_table(config, "test.csv") == [("c", "x")]
    absent = dataclasses.replace(config, test="no.csv")
    with pytest.raises(DataError, match=r"no\.csv does not exist: data\.test is a path .*mine"):
        read_table(absent, "no.csv")


def test_columns_by_number_where_there_is_no_header(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('"3","Title","Words"\n')
    config = table(str(tmp_path), text=("1", "2"), label="0")
    assert read_table(config, "t.csv") == [("Title Words", "3")]


def test_missing_data_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pass --data FOLDER, where t\.csv is"):
        read_table(table(""), "t.csv")
    with pytest.raises(DataError, match=r"pass --data FOLDER, the folder that holds t\.csv"):
        read_table(table(str(tmp_path)), "t.csv")
    with pytest.raises(DataError, match=r"pass --data FILE\.txt"):
        open_dataset(load_recipe("shakespeare"))


def test_a_spreadsheet_may_separate_columns_by_semicolons(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('\ufeff"text";label\n"good; really, good";yes\n"1,5 stars";no\n')
    assert read_table(table(str(tmp_path)), "t.csv") == [
        ("good; really, good", "yes"),
        ("1,5 stars", "no"),
    ]
    path.write_text("text,label;note\na;b,1\n")  # commas do
    with pytest.raises(DataError, match=r"no column label; there are text, label;note"):
        read_table(table(str(tmp_path)), "t.csv")
    path.write_text("id;text, raw;label\n1;a, b;yes\n")  # the header tells which has the columns
    named = dataclasses.replace(table(str(tmp_path)), text=("text, raw",))
    assert read_table(named, "t.csv") == [("a, b", "yes")]
    path.write_text("text,label,a;b\nx,1,2\n")
    assert read_table(table(str(tmp_path)), "t.csv") == [("x", "1")]
    path.write_text("text;label\na;b;c\n")
    with pytest.raises(DataError, match=r"row 1: 3 cells, but the header has 2: .* semicolons"):
        read_table(table(str(tmp_path)), "t.csv")
    path.write_text("text\tlabel\na, b\t1\n")  # what separates columns is said
    with pytest.raises(DataError, match=r"no column text and label; .* tabs in \.tsv"):
        read_table(table(str(tmp_path)), "t.csv")


def test_bad_tables_name_file_and_row(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a", "label": 1}\nnot json\n')
    with pytest.raises(DataError, match=r"t\.jsonl, line 2: not valid JSON"):
        read_table(table(str(tmp_path)), "t.jsonl")
    (tmp_path / "t.jsonl").write_text('{"text": 1%s, "label": 1}' % ("0" * 5000))
    with pytest.raises(DataError, match=r"t\.jsonl, line 1: not valid JSON"):
        read_table(table(str(tmp_path)), "t.jsonl")
    (tmp_path / "t.csv").write_text("a" * LONGEST_CELL + ";b\n")
    with pytest.raises(DataError, match="line 1: field larger than field limit"):
        read_table(table(str(tmp_path)), "t.csv")
    (tmp_path / "t.jsonl").write_text('{"words": "a", "label": 1}\n')
    with pytest.raises(DataError, match=r"line 1: no column text; there are words, label"):
        read_table(table(str(tmp_path)), "t.jsonl")
    with pytest.raises(
        DataError, match=r"/own\.csv does not exist: pass --data FILE, where the table is$"
    ):
        read_table(table(str(tmp_path / "own.csv")), "t.csv")
    (tmp_path / "t.csv").write_text("")
    with pytest.raises(DataError, match="no rows"):
        read_table(table(str(tmp_path)), "t.csv")
    (tmp_path / "t.parquet").write_text("x")
    with pytest.raises(DataError, match=r"expected \.csv, \.tsv or \.jsonl"):
        read_table(table(str(tmp_path)), "t.parquet")


def pieces(**changes: object) -> DataConfig:
    return table("", tokenizer="bpe", vocabulary=300, **changes)


def rows(count: int) -> list[tuple[str, str]]:
    return [(" ".join(["word"] * (i % 7 + 1)) + f" {i}", str(i % 2)) for i in range(count)]


def labelled(count: int = 200) -> LabelledDataset:
    config = pieces()
    return LabelledDataset(rows(count), None, config, 16, None, seed=0)


def test_strings_longer_than_the_window_are_refused() -> None:
    with pytest.raises(DataError, match=r"model\.window 16 is too small for data\.longest 15"):
        open_dataset(load_recipe("parity", ["data.longest=15"]))


def test_an_epoch_shows_every_row_once() -> None:
    data = labelled()
    per_epoch = 180 // 10
    seen = [data.batch(i, 10, seed=1) for i in range(per_epoch)]
    texts = {tuple(row[row != 0].tolist()) for batch in seen for row in batch.inputs[0]}
    assert len(texts) == 180  # of 200 rows, 20 are held out
    again = data.batch(per_epoch, 10, seed=1)
    assert not torch.equal(again.inputs[0], seen[0].inputs[0])  # the next epoch has its own order


def test_batches_depend_on_seed_and_iteration_alone() -> None:
    one, other = labelled(), labelled()
    for iteration in (0, 7, 31):
        a, b = one.batch(iteration, 8, seed=3), other.batch(iteration, 8, seed=3)
        assert torch.equal(a.inputs[0], b.inputs[0]) and torch.equal(a.targets, b.targets)
    text = TextDataset("to be or not to be " * 50, DataConfig(kind="text"), 16, None)
    assert torch.equal(text.batch(5, 4, 0).inputs[0], text.batch(5, 4, 0).inputs[0])
    assert not torch.equal(text.batch(5, 4, 0).inputs[0], text.batch(5, 4, 1).inputs[0])


def test_held_out_windows_cover_the_end_of_a_corpus_once() -> None:
    text = "".join(chr(97 + i % 26) for i in range(1000))
    data = TextDataset(text, DataConfig(kind="text", held_out=0.2), 16, None)
    batches = list(data.held_out(3))
    tokens = torch.cat([b.inputs[0] for b in batches])
    assert tokens.numel() == (200 - 1) // 16 * 16
    assert data.tokenizer.decode(tokens[0].tolist()) == text[800:816]
    assert torch.equal(batches[0].targets[0, :-1], batches[0].inputs[0][0, 1:])


@pytest.mark.parametrize("begin", [0, 1, 2])
def test_held_out_windows_predict_every_id_once(begin: int) -> None:
    ids, marks = np.arange(10, 41), np.array([1, 2][:begin], np.int64)
    batches = windows_in_order(ids, 6, 4, marks)
    seen = [each for batch in batches for each in batch.targets.flatten().tolist() if each > 2]
    first = 10 if begin else 11  # which nothing stands before
    assert seen == list(range(first, first + len(seen)))
    assert 41 - first - len(seen) < 7 - max(1, begin)  # too few for a window


def test_a_short_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text("too short")
    with pytest.raises(DataError, match=r"too short.*model\.window = 256"):
        open_dataset(load_recipe("shakespeare", data=str(tmp_path / "tiny.txt")))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        open_dataset(load_recipe("shakespeare", data=str(tmp_path / "bytes.txt")))


def test_tokenizers_round_trip() -> None:
    text = "To be,\nor not — to be? 😀"
    for kind in ("chars", "bpe"):
        tokenizer = train_tokenizer([text * 3], kind, 300)
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
        assert 0 not in tokenizer.encode(text).ids
    low = train_tokenizer(["Good<br />Film"], "bpe", 300, lowercase=True)
    assert low.encode("GOOD FILM").ids == low.encode("good<br />film").ids


@pytest.mark.parametrize(
    ("ids", "window", "head", "tail", "kept"),
    [
        ([1, 2, 3], 5, 0, 0, [1, 2, 3]),
        ([1, 2, 3, 4, 5], 3, 0, 0, [1, 2, 3]),
        ([1, 2, 3, 4, 5], 3, 1, 2, [1, 4, 5]),
        ([1, 2, 3, 4, 5], 3, 3, 0, [1, 2, 3]),
    ],
)
def test_cutting_keeps_both_ends(
    ids: list[int], window: int, head: int, tail: int, kept: list[int]
) -> None:
    assert cut(np.array(ids, np.int32), window, head, tail).tolist() == kept


def test_the_name_of_padding_in_a_text_is_an_unknown_word() -> None:
    tokenizer = train_tokenizer(["a <pad> b <pad> <unk> c"], "words", 100)
    assert sorted(tokenizer.get_vocab().values()) == [*range(5)]
    assert tokenizer.token_to_id("<pad>") == 0
    assert tokenizer.encode("<pad> a").ids == [1, tokenizer.token_to_id("a")]


def test_texts_are_encoded_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["to be", "", "or not to be", "that"] * 3
    tokenizer = train_tokenizer(texts, "chars")
    whole = [each.tolist() for each in ids_of(tokenizer, texts)]
    assert whole == [tokenizer.encode(text).ids for text in texts]
    monkeypatch.setattr(tokens, "AT_ONCE", 10)
    assert [each.tolist() for each in ids_of(tokenizer, texts)] == whole


def test_parity_is_parity() -> None:
    train, test = generators.parity(8, 200, seed=1)
    assert len(train) == 200 and test == generators.all_parity(8)
    for text, label in train + test:
        assert label == ("odd" if text.count("1") % 2 else "even")
    assert len(generators.all_parity(4)) == len(set(generators.all_parity(4))) == 2 + 4 + 8 + 16


def test_listops_answers_are_recomputed_from_the_text() -> None:
    for longest, shortest, rows in ((40, 0, 200), (300, 100, 20)):
        train, test = generators.listops(longest, rows, 1, shortest)
        assert len({text for text, _ in train + test}) == rows
        for text, label in train + test:
            assert shortest <= len(text.split()) <= longest
            value, rest = _parse(text.split())
            assert rest == [] and value == int(label)


def _parse(tokens: list[str]) -> tuple[int, list[str]]:
    if tokens[0].isdigit():
        return int(tokens[0]), tokens[1:]
    operator, rest, values = tokens[0], tokens[1:], []
    while rest[0] != "]":
        value, rest = _parse(rest)
        values.append(value)
    return generators.apply_operator(operator, values), rest[1:]


def test_listops_operators_by_hand() -> None:
    assert generators.apply_operator("[MED", [9, 1, 5]) == 5
    assert generators.apply_operator("[MED", [9, 1, 5, 4]) == 4
    assert generators.apply_operator("[SM", [9, 8]) == 7
    assert generators.apply_operator("[MIN", [3, 2]) == 2
    assert generators.apply_operator("[MAX", [3, 2]) == 3


def test_the_stdlib_corpus_is_plain_python() -> None:
    text = generators.stdlib_text(50_000)
    assert len(text) == 50_000 and text.isascii() and "import" in text


def test_no_row_waits_for_ever_because_it_is_long() -> None:
    for rows, size in ((100, 64), (127, 64), (63, 32), (1631, 32)):
        shuffle = Shuffle(list(range(rows)))
        epochs = 12
        drawn = [shuffle.rows(i, size, 0) for i in range(epochs * (rows // size))]
        assert all(len(batch) == size for batch in drawn)
        assert len({int(row) for batch in drawn for row in batch}) == rows


def test_each_window_of_a_text_begins_as_a_text_does() -> None:
    tokenizer = train_tokenizer(["abcdefgh" * 20], "chars", 100, False)
    tokenizer.add_special_tokens(["<s>"])
    begin = tokenizer.token_to_id("<s>")
    plain = TextDataset("abcdefgh" * 40, DataConfig("text", held_out=0.25), 8, tokenizer)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    marked = TextDataset("abcdefgh" * 40, DataConfig("text", held_out=0.25), 8, tokenizer)
    assert begin not in marked.train_ids and len(marked.train_ids) == len(plain.train_ids)
    for batch in (marked.batch(0, 4, 0), next(marked.held_out(4))):
        assert batch.inputs[0].shape == (4, 8) == batch.targets.shape
        tokens, targets = batch.inputs[0].tolist(), batch.targets.tolist()
        assert all(row[0] == begin for row in tokens) and not any(begin in row for row in targets)
        assert [row[1:] for row in tokens] == [row[:-1] for row in targets]
    rows = [row for batch in marked.held_out(4) for row in batch.targets.tolist()]
    joined = [token for row in rows for token in row]
    assert joined == marked.held_ids[: len(joined)].tolist()  # each is predicted once
    assert not any(begin in row for row in plain.batch(0, 4, 0).inputs[0].tolist())
