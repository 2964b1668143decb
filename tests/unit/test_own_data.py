"""Data of one's own that would teach the wrong thing: refused, with the row and what to change."""

from pathlib import Path

import numpy as np
import pytest

from train.data.arrays import ImageDataset, PointDataset
from train.data.labelled import LabelledDataset
from train.data.tables import LONGEST_CELL, DataError, read_table
from train.recipe import DataConfig


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"text": ["a", "b"], "label": 1}', "line 1: text is a list"),
        (r'{"text": "a \ud800", "label": 1}', "line 1: text has half a character"),
        ('[{"text": "a", "label": 1}]', "line 1: expected one object a line"),
        ("[", "line 1: not valid JSON: .* one object a line"),
    ],
)
def test_values_that_are_no_text_are_refused(tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "t.jsonl").write_text(line)
    with pytest.raises(DataError, match=sentence):
        read_table(DataConfig("table", str(tmp_path)), "t.jsonl")


def test_spaces_around_columns_and_labels_make_no_classes(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text , label\ngood, pos\nfine,pos \n")
    assert read_table(DataConfig("table", str(tmp_path)), "t.csv") == [
        ("good", "pos"),
        ("fine", "pos"),
    ]


def test_a_quote_that_is_never_closed_is_guessed(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('text,label\n"good' + "x" * LONGEST_CELL + ",pos\n")
    with pytest.raises(DataError, match=r"t\.csv cannot be read: .* is a quote .* never closed"):
        read_table(DataConfig("table", str(tmp_path)), "t.csv")


def test_a_label_that_only_the_held_out_rows_have_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for count, said in ((30, False), (1, True)):
        rows = [("good", "pos")] * 30 + [("bad", "neg")] * count
        # A seed that holds the only row of `neg` out.
        data = LabelledDataset(rows, None, DataConfig("table", held_out=0.5), 16, None, seed=1)
        data.warn_of_unseen()
        assert ("has the label neg: it will not be learnt" in caplog.text) == said


def test_a_column_of_other_things_than_labels_is_refused() -> None:
    rows = [(f"text {i}", f"text {i}") for i in range(50)]
    with pytest.raises(
        DataError, match=r"50 different labels in 50 rows: is --label label the right"
    ):
        LabelledDataset(rows, None, DataConfig("table"), 16, None, seed=0)


@pytest.mark.parametrize(
    ("classes", "sentence"),
    [
        ([1, 2, 1, 2], "no row of class 0: count classes from 0"),
        ([0, 0, 0, 0], "needs two classes or more"),
        ([0, 1_000_000, 0, 1], "no row of class 2"),
    ],
)
def test_classes_are_counted_from_0_without_gaps(
    tmp_path: Path, classes: list[int], sentence: str
) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3, 2)), y=np.array(classes))
    config = DataConfig("points", str(tmp_path), train="a.npz:x", train_labels="a.npz:y")
    with pytest.raises(DataError, match=sentence):
        PointDataset(config, points=3, seed=0)


def test_a_class_without_a_name_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3, 2)), y=np.array([0, 1, 2, 0]))
    config = DataConfig(
        "points", str(tmp_path), train="a.npz:x", train_labels="a.npz:y", labels=("a", "b")
    )
    with pytest.raises(DataError, match=r"classes from 0 to 2, but 2 data\.labels"):
        PointDataset(config, points=3, seed=0)


def test_pictures_of_several_sizes_are_named(tmp_path: Path) -> None:
    ragged = np.empty(2, object)
    ragged[:] = [np.zeros((8, 8), np.uint8), np.zeros((9, 9), np.uint8)]
    np.savez(tmp_path / "a.npz", x=ragged, y=np.array([0, 1]))
    config = DataConfig("images", str(tmp_path), train="a.npz:x", train_labels="a.npz:y")
    with pytest.raises(DataError, match="give every row the same shape, images one size"):
        ImageDataset(config, seed=0)
