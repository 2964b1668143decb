"""Data: tables, corpora, generators, tokenizers; batches are functions of (seed, iteration)."""

import csv
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_runs import tiny_image_recipe, tiny_text_run, trained
from train import generators
from train.checkpoint import read_facts
from train.config import DataConfig
from train.data import check_same_meaning, open_dataset
from train.evaluate import evaluate_run
from train.labelled import LabelledDataset
from train.recipe_file import load_recipe
from train.tables import DataError, read_table
from train.text import TextDataset
from train.tokens import cut, train_tokenizer

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


def test_bad_tables_name_file_and_row(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a", "label": 1}\nnot json\n')
    with pytest.raises(DataError, match=r"t\.jsonl, line 2: not valid JSON"):
        read_table(table(str(tmp_path)), "t.jsonl")
    (tmp_path / "t.jsonl").write_text('{"words": "a", "label": 1}\n')
    with pytest.raises(
        DataError, match=r"line 1: no columns text and label; there are words, label"
    ):
        read_table(table(str(tmp_path)), "t.jsonl")
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


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"text,label\ngood, really,pos\n", "row 1: 3 cells, but the header has 2: .*quotes"),
        (b"text,label\ngood\n", "row 1: 1 cells, but the header has 2"),
        (b"text,label\ncaf\xe9,pos\n", "not UTF-8"),
        (b'text,label\n"   ",pos\n', "no rows"),
        (b"text,label\ngood,pos\nbad, \n", "row 2: label is empty"),
        (b"text,text,label\ngood,bad,pos\n", "two columns are called text"),
        (b'text,label\n"good,pos\nbad,neg\nfine,pos\n', "is a quote of a text never closed"),
    ],
)
def test_tables_that_would_mislead_are_refused(tmp_path: Path, data: bytes, sentence: str) -> None:
    (tmp_path / "t.csv").write_bytes(data)
    with pytest.raises(DataError, match=sentence):
        read_table(table(str(tmp_path)), "t.csv")


def test_null_and_broken_archives_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": null, "label": 1}')
    with pytest.raises(DataError, match="line 1: text is null"):
        read_table(table(str(tmp_path)), "t.jsonl")
    for name in ("t.jsonl.gz", "t.jsonl.xz"):
        (tmp_path / name).write_bytes(b"no archive")
        with pytest.raises(DataError, match="cannot be read"):
            read_table(table(str(tmp_path)), name)


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbftext,label\ngood,pos\n")
    assert read_table(table(str(tmp_path)), "t.csv") == [("good", "pos")]


def test_rows_without_text_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "t.csv").write_text('text,label\n"",pos\ngood,pos\n')
    assert read_table(table(str(tmp_path)), "t.csv") == [("good", "pos")]
    assert "left out 1 rows without text" in caplog.text


def test_one_class_and_repeated_labels_are_refused() -> None:
    same = [(text, "pos") for text, _ in rows(50)]
    with pytest.raises(DataError, match="every row has the label 'pos'"):
        LabelledDataset(same, None, pieces(), 16, None, seed=0)
    twice = DataConfig(
        kind="table", tokenizer="bpe", vocabulary=300, labels=("a", "a"), values=("0", "1")
    )
    with pytest.raises(DataError, match=r"data\.labels must differ"):
        LabelledDataset(rows(50), None, twice, 16, None, seed=0)


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


def test_unknown_labels_are_refused() -> None:
    config = DataConfig(
        kind="table", tokenizer="bpe", vocabulary=300, labels=("a", "b"), values=("0", "9")
    )
    with pytest.raises(DataError, match=r"label '1' is not one of 0, 9.*data\.values"):
        LabelledDataset(rows(50), None, config, 16, None, seed=0)


def test_held_out_windows_cover_the_end_of_a_corpus_once() -> None:
    text = "".join(chr(97 + i % 26) for i in range(1000))
    data = TextDataset(text, DataConfig(kind="text", held_out=0.2), 16, None)
    batches = list(data.held_out(3))
    tokens = torch.cat([b.inputs[0] for b in batches])
    assert tokens.numel() == (200 - 1) // 16 * 16
    assert data.tokenizer.decode(tokens[0].tolist()) == text[800:816]
    assert torch.equal(batches[0].targets[0, :-1], batches[0].inputs[0][0, 1:])


def test_a_short_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text("too short")
    with pytest.raises(DataError, match=r"too short.*model\.window = 256"):
        open_dataset(load_recipe("shakespeare", data=str(tmp_path / "tiny.txt")))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        open_dataset(load_recipe("shakespeare", data=str(tmp_path / "bytes.txt")))


def test_a_run_is_not_measured_on_data_that_means_something_else(tmp_path: Path) -> None:
    recipe = tiny_image_recipe(tmp_path, "optim.iterations=2", "run.evaluate_every=2")
    run = trained(recipe, tmp_path)
    assert evaluate_run(run, [1], data=str(tmp_path)).rows
    other = tmp_path / "other"
    other.mkdir()
    with np.load(tmp_path / "data.npz") as arrays:
        np.savez(other / "data.npz", images=arrays["images"] // 4, classes=arrays["classes"])
    with pytest.raises(DataError, match="not the images it was trained on"):
        evaluate_run(run, [1], data=str(other))
    facts = read_facts(run)
    fixed = load_recipe(
        str(tmp_path / "recipe.toml"), ["data.mean=[0.4]", "data.std=[0.2]"], str(other)
    )
    check_same_meaning(open_dataset(fixed), fixed, facts)
    renamed = load_recipe(
        str(tmp_path / "recipe.toml"), ['data.labels=["right", "left", "both"]'], str(tmp_path)
    )
    with pytest.raises(DataError, match="trained on left, right, both"):
        check_same_meaning(open_dataset(renamed), renamed, facts)


def test_tokenizers_round_trip() -> None:
    text = "To be,\nor not — to be? 😀"
    for kind in ("chars", "bpe"):
        tokenizer = train_tokenizer([text * 3], kind, 300)
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
        assert 0 not in tokenizer.encode(text).ids
    low = train_tokenizer(["Good<br />Film"], "bpe", 300, lowercase=True)
    assert low.encode("GOOD FILM").ids == low.encode("good<br />film").ids


def test_marks_in_a_text_are_characters() -> None:
    texts = ["the <s>old</s> price", "<pad> and <unk> and the"] * 3
    for kind in ("bpe", "words", "chars"):
        tokenizer = train_tokenizer(texts, kind, 300, False)
        marks = {tokenizer.token_to_id(mark) for mark in ("<s>", "</s>", "<pad>", "<|endoftext|>")}
        assert not marks & set(tokenizer.encode(texts[0]).ids), kind
        assert tokenizer.token_to_id("<pad>") not in tokenizer.encode("<pad>").ids, kind


def test_a_text_of_unknown_characters_is_no_measure(tmp_path: Path) -> None:
    run = tiny_text_run(tmp_path)
    other = tmp_path / "other.txt"
    other.write_text((tmp_path / "corpus.txt").read_text().replace("j", "é"), encoding="utf-8")
    with pytest.raises(DataError, match="characters that the model was not trained on"):
        evaluate_run(run, [1], data=str(other))


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    recipe = tiny_image_recipe(tmp_path)
    dataset = open_dataset(recipe)
    sizes = {"channels": 1, "height": 99, "width": 8, "dimensions": 0}
    facts = {"labels": list(dataset.labels or []), "sizes": sizes}
    with pytest.raises(DataError, match="trained on channels 1, height 99, width 8"):
        check_same_meaning(dataset, recipe, facts)


def test_cutting_keeps_both_ends() -> None:
    assert cut([1, 2, 3], 5, 0, 0) == [1, 2, 3]
    assert cut([1, 2, 3, 4, 5], 3, 0, 0) == [1, 2, 3]
    assert cut([1, 2, 3, 4, 5], 3, 1, 2) == [1, 4, 5]
    assert cut([1, 2, 3, 4, 5], 3, 3, 0) == [1, 2, 3]


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
