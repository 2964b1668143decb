"""Data that would mislead in silence: refused, or told apart from what a model was trained on."""

import dataclasses
import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from export.quality import measure_bundle
from export.run import ExportRequest, export_run
from tests.fixtures.tiny_runs import (
    tiny_image_recipe,
    tiny_label_recipe,
    tiny_label_run,
    tiny_text_run,
    trained,
)
from tests.unit.test_training_data import pieces, rows, table
from train.__main__ import main
from train.checkpoint import RECIPE, read_facts
from train.data import check_same_meaning, open_dataset, open_measured
from train.data.labelled import LabelledDataset
from train.data.tables import DataError, read_table
from train.data.tags import read_tags
from train.data.text import train_tokenizer
from train.evaluate import evaluate_run
from train.metrics import read_metrics
from train.recipe import Columns, DataConfig, RecipeError, load_recipe


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"text,label\ngood, really,pos\n", "row 1: 3 cells, but the header has 2: .*quotes"),
        (b"text,label\ngood\n", "row 1: 1 cells, but the header has 2"),
        (b"text,label\ncaf\xe9,pos\n", "not UTF-8.*iconv -f cp1252 -t utf-8"),
        (b'text,label\n"   ",pos\n', "no rows"),
        (b"text,label\ngood, \nbad,\n", "no rows"),
        (b"\xff\xfet\x00", "iconv -f utf-16 -t utf-8"),
        (b"text,text,label\ngood,bad,pos\n", "two columns are called text"),
        (b'text,label\n"good,pos\nbad,neg\nfine,pos\n', "is a quote of a text never closed"),
        (b'text,label\na\n\n"good" one,pos\n', "row 1: 1 cells"),
        (b'text,label\na,pos\n\n"good" one,pos\n', "line 4: .*expected.*inside a text not doubled"),
    ],
)
def test_tables_that_would_mislead_are_refused(tmp_path: Path, data: bytes, sentence: str) -> None:
    (tmp_path / "t.csv").write_bytes(data)
    with pytest.raises(DataError, match=sentence):
        read_table(table(str(tmp_path)), "t.csv")


def test_null_and_broken_archives_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": null, "label": 1}')
    with pytest.raises(DataError, match="no rows"):
        read_table(table(str(tmp_path)), "t.jsonl")
    for name in ("t.jsonl.gz", "t.jsonl.xz"):
        (tmp_path / name).write_bytes(b"no archive")
        with pytest.raises(DataError, match="cannot be read"):
            read_table(table(str(tmp_path)), name)


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.jsonl.xz"])
@pytest.mark.parametrize("words", [False, True])
def test_archives_that_broke_are_named(tmp_path: Path, name: str, words: bool) -> None:
    row = '{{"text": ["{}"], "label": ["x"]}}\n' if words else '{{"text": "{}", "label": "x"}}\n'
    lines = "".join(row.format(number * 7919) for number in range(5000)).encode()
    whole = gzip.compress(lines) if name.endswith("gz") else lzma.compress(lines)
    altered = whole[:2000] + bytes(byte ^ 255 for byte in whole[2000:2100]) + whole[2100:]
    read: Callable[[DataConfig, str], object] = read_tags if words else read_table
    for data in (whole[:-500], altered, b"no archive"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=f"{name} cannot be read"):
            read(table(str(tmp_path)), name)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"good,pos\nso, so,pos\nbad,neg\n", "row 2: 3 cells, but the first row has 2"),
        (b"text,label\ngood,pos\nbad,neg\n", "no other row has the label .* 'label'.*a header"),
    ],
)
def test_columns_by_number_that_would_mislead(tmp_path: Path, data: bytes, sentence: str) -> None:
    (tmp_path / "t.csv").write_bytes(data)
    with pytest.raises(DataError, match=sentence):
        read_table(table(str(tmp_path), text=("0",), label="1"), "t.csv")


def test_a_header_that_was_taken_for_a_row_is_shown(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"id,text\n1,good\n")
    numbered = dataclasses.replace(table(str(tmp_path)), text=("1",), label="2")
    with pytest.raises(DataError, match=r"row 1: no column 2; there are 0 \(id\), 1 \(text\)"):
        read_table(numbered, "t.csv")


def test_empty_lines_above_the_header_are_no_header(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\n\ntext,label\n\ngood,pos\n")
    assert read_table(table(str(tmp_path)), "t.csv") == [("good", "pos")]


def test_a_missing_column_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"text,topic\ngood,pos\n")
    said = r"row 1: no column label; there are text, topic\. .* from 0 if .* no header"
    with pytest.raises(DataError, match=said):
        read_table(table(str(tmp_path)), "t.csv")


def test_a_validation_table_is_refused_not_ignored() -> None:
    with pytest.raises(RecipeError, match=r"data\.validation needs .* has data\.test"):
        load_recipe("classifier", ["data.validation=held.csv"])


def test_half_a_training_is_measured_and_exported_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = ("run.keep=best", "run.patience=1", "run.evaluate_every=2", "run.checkpoint_every=3")
    ended = trained(tiny_label_recipe("optim.iterations=9", *best), tmp_path / "best")
    assert evaluate_run(ended, [1], rows=2).rows and "trained to its end" not in caplog.text
    run = tiny_label_run(tmp_path, "optim.iterations=2")
    assert evaluate_run(run, [1], rows=2).rows and "trained to its end" not in caplog.text
    kept = json.loads((run / RECIPE).read_text())
    kept["recipe"]["optim"]["iterations"] = 5
    (run / RECIPE).write_text(json.dumps(kept))
    assert evaluate_run(run, [1], rows=2).rows
    assert "has not been trained to its end (2 of 5 iterations)" in caplog.text
    caplog.clear()
    monkeypatch.setattr("export.run.export_model", lambda *_: None)
    export_run(run, ExportRequest(tmp_path / "bundle", (1,)), say=lambda line: None)
    assert "has not been trained to its end (2 of 5 iterations)" in caplog.text


def test_another_table_is_measured_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [f"word {i % 7} {i},{'abc'[i % 3]}\n" for i in range(60)]
    own, other = tmp_path / "own.csv", tmp_path / "other.csv"
    own.write_text("text,label\n" + "".join(lines))
    other.write_text("text,label\nword 1,a\nword 2,c\nword 3,c\n")  # no row of a class
    named = tmp_path / "named.csv"
    named.write_text("id,title,kind\n1,word 1,a\n2,word 2,c\n")
    columns = Columns(("title",), "kind")
    small = ["model.width=16", "model.heads=2", "model.layers=1", "model.hidden=16"]
    short = ["optim.iterations=1", "steps.full=2", "steps.short=[1]", "optim.precision=fp32"]
    run = trained(load_recipe("classifier", [*small, *short], str(own)), tmp_path)
    assert evaluate_run(run, [1]).rows[0].quality.samples == 6
    assert "not the data" not in caplog.text
    assert evaluate_run(run, [1]).measured == "held-out data"
    elsewhere = evaluate_run(run, [1], data=str(other))
    assert elsewhere.rows[0].quality.samples == 3 and elsewhere.measured == f"on {other}"
    found = evaluate_run(run, [1], data=str(named), columns=columns)
    assert found.rows[0].quality.samples == 2
    with pytest.raises(RecipeError, match="name columns of --data FILE"):
        evaluate_run(run, [1], columns=columns)
    assert "not the data it was trained on: all its rows are measured" in caplog.text
    bundle = export_run(run, ExportRequest(tmp_path / "b", (1,), latency=False), say=lambda _: None)
    assert measure_bundle(bundle, [1], str(own), None)[1].quality.samples == 6
    assert measure_bundle(bundle, [1], str(other), None)[1].quality.samples == 3
    assert measure_bundle(bundle, [1], str(named), None, columns)[1].quality.samples == 2


def test_long_texts_are_said_to_be_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = tmp_path / "own.csv"
    lines = [f"{'word ' * (40 if i % 2 else 3)},{'ab'[i % 2]}\n" for i in range(40)]
    own.write_text("text,label\n" + "".join(lines))
    small = ["model.width=16", "model.heads=2", "model.layers=1", "model.hidden=16"]
    short = ["optim.iterations=1", "optim.precision=fp32", "data.head=9", "data.tail=1"]
    recipe = load_recipe("classifier", [*small, *short, "model.window=10"], str(own))
    trained(recipe, tmp_path)
    assert re.search(r"1\d of the 3\d texts to train on have more than 10 tokens", caplog.text)


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbftext,label\ngood,pos\n")
    assert read_table(table(str(tmp_path)), "t.csv") == [("good", "pos")]


def test_rows_without_text_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "t.csv").write_text('text,label\n"",pos\ngood,pos\n')
    assert read_table(table(str(tmp_path)), "t.csv") == [("good", "pos")]
    read_table(table(str(tmp_path)), "t.csv")
    assert caplog.text.count("left out 1 row without text") == 1


def test_rows_without_a_label_are_left_out_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A table is often labelled in part."""
    lines = ['{"text": "good", "label": "pos"}', '{"text": "new", "label": null}']
    lines += ['{"text": NaN, "label": "pos"}', '{"text": "newer", "label": " "}']
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    assert read_table(table(str(tmp_path)), "t.jsonl") == [("good", "pos")]
    assert "t.jsonl: left out 1 row without text" in caplog.text
    assert "t.jsonl: left out 2 rows without a label" in caplog.text


def test_one_class_and_repeated_labels_are_refused() -> None:
    same = [(text, "pos") for text, _ in rows(50)]
    with pytest.raises(DataError, match="every row has the label 'pos'"):
        LabelledDataset(same, None, pieces(), 16, None, seed=0)
    twice = DataConfig(
        kind="table", tokenizer="bpe", vocabulary=300, labels=("a", "a"), values=("0", "1")
    )
    with pytest.raises(DataError, match=r"data\.labels must differ"):
        LabelledDataset(rows(50), None, twice, 16, None, seed=0)


def test_unknown_labels_are_refused() -> None:
    config = DataConfig(
        kind="table", tokenizer="bpe", vocabulary=300, labels=("a", "b"), values=("0", "9")
    )
    with pytest.raises(DataError, match=r"'1' is not one of 0, 9: use a table with these labels"):
        LabelledDataset(rows(50), None, config, 16, None, seed=0)


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


@pytest.mark.parametrize("name", ["t.CSV", "t.Tsv", "t.JSONL", "t.jsonl.GZ"])
def test_the_case_of_a_suffix_means_nothing(tmp_path: Path, name: str) -> None:
    separator = "\t" if "sv" in name and "T" in name else ","
    text = f"text{separator}label\ngood{separator}pos\n"
    if "JSONL" in name.upper():
        text = json.dumps({"text": "good", "label": "pos"})
    data = gzip.compress(text.encode()) if name.endswith("GZ") else text.encode()
    (tmp_path / name).write_bytes(data)
    assert read_table(table(str(tmp_path)), name) == [("good", "pos")]


def test_a_text_in_the_column_of_labels_is_no_class() -> None:
    long = [(text, "x" * 1001 if label == "1" else "0") for text, label in rows(50)]
    with pytest.raises(DataError, match=r"a label of 1001 characters.*the right column\?"):
        LabelledDataset(long, None, pieces(), 16, None, seed=0)


def test_one_value_is_blamed_on_the_setting() -> None:
    with pytest.raises(DataError, match=r"data\.values is '0' alone: a classifier needs two"):
        LabelledDataset(rows(50), None, pieces(values=("0",)), 16, None, seed=0)


def test_a_column_and_a_class_may_be_numbers() -> None:
    recipe = load_recipe("sentiment", ["data.label=0", "data.text=[1, 2]", "data.values=[3, 4]"])
    assert (recipe.data.label, recipe.data.text) == ("0", ("1", "2"))
    assert recipe.data.values == ("3", "4")


def test_a_column_may_have_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.csv").write_text('😀 "text",𠀋\na,x\nb,x\n', encoding="utf-8")
    words = ["train", "classifier", "--data", str(tmp_path / "own.csv")]
    columns = ["--text", '😀 "text"', "--label", "𠀋"]
    assert main([*words, *columns, "--out", str(tmp_path / "run")]) == 2
    assert "every row has the label 'x'" in capsys.readouterr().err  # it was read


def test_a_training_that_is_refused_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("too short")
    run = tmp_path / "run"
    data = str(tmp_path / "short.txt")
    assert main(["train", "shakespeare", "--data", data, "--out", str(run)]) == 2
    assert "the corpus is too short" in capsys.readouterr().err
    assert not run.exists()


def test_rows_that_came_later_are_told_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_text_run(tmp_path)
    evaluate_run(run, [1], rows=2)
    assert "not the data it was trained on" not in caplog.text
    with (tmp_path / "corpus.txt").open("a") as corpus:
        corpus.write("jump over it. " * 10)
    evaluate_run(run, [1], rows=2)
    assert "not the data it was trained on" in caplog.text


def test_a_log_with_foreign_lines_is_read_without_them(tmp_path: Path) -> None:
    record = {"iteration": 1, "loss": 2.0}
    lines = [json.dumps(record).encode(), b"null", b"7", b"\xff\xfe", b'{"loss": 1}', b"[1]"]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert read_metrics(tmp_path / "metrics.jsonl") == [record]


def test_figures_are_kept_where_no_picture_can_be(tmp_path: Path) -> None:
    run = tiny_label_run(tmp_path)
    (run / "quality.png").mkdir()
    figures = tmp_path / "figures.json"
    assert main(["evaluate", str(run), "--steps", "1", "--json", str(figures)]) == 2
    assert json.loads(figures.read_text())["rows"]


def test_a_table_that_is_named_is_measured_and_not_the_test_table_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(path: Path, count: int) -> Path:
        path.parent.mkdir(exist_ok=True)
        rows = "".join(f"row {i} of {path.name},{'ab'[i % 2]}\n" for i in range(count))
        path.write_text(f"text,label\n{rows}")
        return path

    own, _ = write(tmp_path / "train.csv", 100), write(tmp_path / "test.csv", 60)
    recipe = load_recipe("classifier", ["data.test=test.csv"], str(own))
    trained_on = open_dataset(recipe)
    assert trained_on.labels is not None
    facts = {"labels": [*trained_on.labels], "data_sha256": trained_on.digest}

    def rows(path: Path) -> int:
        named = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, path=str(path)))
        measured = open_measured(named, trained_on.tokenizer, facts)
        return sum(len(batch.targets) for batch in measured.held_out(8))

    assert rows(own) == 60 and not caplog.text
    assert rows(write(tmp_path / "mine.csv", 30)) == 30
    assert "all its rows are measured" in caplog.text
    assert rows(write(tmp_path / "other/mine.csv", 20)) == 20
