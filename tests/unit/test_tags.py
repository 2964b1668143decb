"""Data with one label a word: what is read, where a label stands, and what is refused."""

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from train.data import open_dataset, open_measured
from train.data.batch import IGNORED, Batch
from train.data.tables import DataError
from train.data.tags import TagDataset, read_tags
from train.recipe import Recipe, data_at, load_recipe

RECIPE = """
name = "names"
[data]
kind = "tags"
train = "train.jsonl"
text = ["words"]
label = "tags"
vocabulary = 300
[model]
family = "tagger"
width = 16
heads = 2
hidden = 32
window = 16
[optim]
iterations = 2
batch = 4
"""
ROWS = [(["Ada", "met", "Grace", "Hopper", "."], ["B", "O", "B", "I", "O"])] * 20


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    (folder / "names.toml").write_text(RECIPE)
    return load_recipe(str(folder / "names.toml"), list(overrides), str(folder))


def write_json(folder: Path, rows: Sequence[tuple[list[str], Sequence[str | None]]]) -> None:
    lines = [json.dumps({"words": words, "tags": tags}) for words, tags in rows]
    (folder / "train.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("tokenizer", ["bpe", "words", "chars"])
def test_a_label_stands_at_the_first_token_of_its_word(tmp_path: Path, tokenizer: str) -> None:
    write_json(tmp_path, ROWS)
    dataset = open_dataset(recipe_of(tmp_path, f"data.tokenizer={tokenizer}", "model.window=64"))
    assert dataset.tokenizer is not None and dataset.labels is not None
    batch = dataset.batch(0, 4, 0)
    counted = batch.targets != IGNORED
    assert counted.sum(1).tolist() == [5] * 4
    assert [dataset.labels[i] for i in batch.targets[0][counted[0]].tolist()] == list("BOBIO")
    ids = batch.inputs[0][0][counted[0]].tolist()
    first = [str(dataset.tokenizer.id_to_token(i)).strip("Ġ ")[:1] for i in ids]
    assert first[1:] == ["m", "G", "H", "."]


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    write_json(tmp_path, ROWS)
    lines = ["-DOCSTART- X O", ""]
    for words, tags in ROWS:
        lines += [f"{word} NN {tag}" for word, tag in zip(words, tags, strict=True)] + [""]
    (tmp_path / "train.conll").write_text("\n".join(lines))
    one = open_dataset(recipe_of(tmp_path)).batch(0, 4, 0)
    other = open_dataset(recipe_of(tmp_path, "data.train=train.conll")).batch(0, 4, 0)
    assert torch.equal(one.inputs[0], other.inputs[0]) and torch.equal(one.targets, other.targets)


def test_short_texts_are_padded_and_long_ones_cut_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_json(tmp_path, [(["a"], ["B"]), (["b"] * 40, ["O"] * 40)] * 10)
    dataset = open_dataset(recipe_of(tmp_path, "data.tokenizer=words"))
    assert isinstance(dataset, TagDataset)
    dataset.warn_of_unseen()
    assert re.search(r"\d of the 1\d texts to train on have more than 16 tokens", caplog.text)
    batch = dataset.batch(0, 18, 0)
    assert batch.inputs[0].shape[1] == 16
    assert ((batch.inputs[0] == 0) <= (batch.targets == IGNORED)).all()


def test_a_hash_is_a_comment_before_a_text_and_a_word_within(tmp_path: Path) -> None:
    lines = ["# sent_id = 1", "Pay O", "# B", "1.8 I", "", "# text", "end O"]
    (tmp_path / "train.conll").write_text("\n".join(lines))
    rows = read_tags(recipe_of(tmp_path, "data.label=1").data, "train.conll")
    assert [list(row.words) for row in rows] == [["Pay", "#", "1.8"], ["end"]]


def test_between_tabs_a_word_may_hold_spaces(tmp_path: Path) -> None:
    lines = ["# text =\tso", "1\t10 000\tNUM\tB", "2\teuros \t\tNOUN\tI", "", "1 5\u00a0000  NUM B"]
    (tmp_path / "train.conll").write_text("\n".join(lines), encoding="utf-8")
    columns = recipe_of(tmp_path, "data.text=1", "data.label=2").data
    rows = read_tags(columns, "train.conll")
    assert rows == [(["10 000", "euros"], ["NUM", "NOUN"]), (["5\u00a0000"], ["NUM"])]


def test_of_conll_u_the_words_are_read_once(tmp_path: Path) -> None:
    def line(number: str, word: str, kind: str) -> str:
        return "\t".join([number, word, "_", kind, *"______"])

    first = ["# sent_id = 1", line("1-2", "Can't", "_"), line("1", "Ca", "AUX")]
    rest = [line("2", "n't", "PART"), line("3", "1-2", "NUM"), line("3.1", "go", "VERB"), ""]
    lines = [*first, *rest, "# sent_id = 2", line("1", "Go", "VERB"), ""]
    (tmp_path / "train.conllu").write_text("\n".join(lines))
    rows = read_tags(recipe_of(tmp_path, "data.text=1", "data.label=3").data, "train.conllu")
    assert rows == [(["Ca", "n't", "1-2"], ["AUX", "PART", "NUM"]), (["Go"], ["VERB"])]


def test_a_word_may_have_no_label_but_a_label_has_its_word(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"words": ["a", "b", "c", 4], "tags": ["X", null, "Y", NaN]}')
    [row] = read_tags(recipe_of(tmp_path).data, "train.jsonl")
    assert row == (["a", "b", "c", "4"], ["X", None, "Y", None])
    path.write_text('{"words": ["a", "b", "c"], "tags": ["X", "", " X "]}')
    [row] = read_tags(recipe_of(tmp_path).data, "train.jsonl")
    assert row == (["a", "b", "c"], ["X", None, "X"])
    for words, tags, said in (
        ('["a", null]', '["X", "Y"]', "a word is null"),
        ('["a", ["b"]]', '["X", "Y"]', "a word is a list"),
        (r'["a", "\ud800"]', '["X", "Y"]', "a word has half a character"),
        ('["a", "b"]', '["X", ["Y", "Z"]]', "a label is a list"),
    ):
        path.write_text(f'{{"words": {words}, "tags": {tags}}}')
        with pytest.raises(DataError, match=f"line 1: {said}"):
            read_tags(recipe_of(tmp_path).data, "train.jsonl")


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([(["a", "b"], ["O"])] * 4, "expected as many labels as words"),
        ([(["a"], ["O"])] * 4, "every word has the label O"),
        ([([], [])] * 4, "expected as many labels as words"),
    ],
)
def test_what_cannot_be_learnt_is_refused(
    tmp_path: Path, rows: list[tuple[list[str], list[str]]], sentence: str
) -> None:
    write_json(tmp_path, rows)
    with pytest.raises(DataError, match=sentence):
        open_dataset(recipe_of(tmp_path))


def test_faults_of_files_name_the_line(tmp_path: Path) -> None:
    (tmp_path / "train.conll").write_text("a O\nb\n")
    with pytest.raises(DataError, match="line 2: 1 columns"):
        open_dataset(recipe_of(tmp_path, "data.train=train.conll", "data.label=1"))
    with pytest.raises(DataError, match="line 2: 1 columns"):  # the last column is its own
        open_dataset(recipe_of(tmp_path, "data.train=train.conll"))
    (tmp_path / "train.jsonl").write_text('{"text": "a"}')
    with pytest.raises(DataError, match='line 1: expected an object with the lists "words"'):
        open_dataset(recipe_of(tmp_path))
    (tmp_path / "train.csv").write_text("words,tags\na,B\n")
    with pytest.raises(DataError, match="a label for each word comes as"):
        open_dataset(recipe_of(tmp_path, "data.train=train.csv"))


def test_listops_is_asked_for_the_whole_and_learns_the_parts() -> None:
    overrides = ["data.rows=200", "data.nesting=4", "data.tokenizer=words", "model.family=tagger"]
    dataset = open_dataset(load_recipe("listops", overrides))
    batch, tested = dataset.batch(0, 16, 0), next(dataset.held_out(16))
    assert int((batch.targets != IGNORED).sum()) > 16
    assert (tested.targets[:, 0] != IGNORED).all() and int((tested.targets != IGNORED).sum()) == 16


def test_texts_held_out_are_not_trained_on_and_a_test_file_is_another(tmp_path: Path) -> None:
    rows = [([f"w{i}", "x"], ["A", "B"]) for i in range(40)]
    write_json(tmp_path, [([f"v{i}", "x"], ["B", "A"]) for i in range(6)])
    (tmp_path / "train.jsonl").rename(tmp_path / "test.jsonl")
    write_json(tmp_path, rows)
    names = 'data.labels=["first", "second"]', 'data.values=["A", "B"]'
    tested = recipe_of(tmp_path, "data.test=test.jsonl", "data.tokenizer=chars", *names)
    dataset = open_dataset(tested)
    assert dataset.labels == ("first", "second")

    def texts(batches: Iterable[Batch]) -> set[str]:
        assert dataset.tokenizer is not None
        ids = [row for batch in batches for row in batch.inputs[0].tolist()]
        return set(dataset.tokenizer.decode_batch(ids))

    used, held = texts(dataset.batch(i, 9, 0) for i in range(4)), texts(dataset.validation(9))
    assert (len(used), len(held)) == (36, 4) and not used & held
    assert len(texts(dataset.held_out(4))) == 6 and not texts(dataset.held_out(4)) & (used | held)
    write_json(tmp_path, [(words, ["A", "A"]) for words, _ in rows])
    assert open_dataset(tested).digest != dataset.digest  # other labels are other data


def test_texts_without_a_label_are_left_out(tmp_path: Path) -> None:
    unlabelled: list[tuple[list[str], Sequence[str | None]]] = [(["no", "label"], [None, None])]
    rows = [*ROWS, *(unlabelled * 30)]
    write_json(tmp_path, rows)
    dataset = open_dataset(recipe_of(tmp_path), None)
    for batch in [*dataset.held_out(2), *(dataset.batch(i, 2, 0) for i in range(9))]:
        assert (batch.targets != IGNORED).any(1).all()
    write_json(tmp_path, [(words, [None, *labels[1:]]) for words, labels in ROWS])
    with pytest.raises(DataError, match=r"none has a label within the first 1 tokens"):
        open_dataset(recipe_of(tmp_path, "model.window=1"), None)


def test_another_file_is_measured_whole_and_need_not_have_every_label(tmp_path: Path) -> None:
    write_json(tmp_path, ROWS)
    recipe = recipe_of(tmp_path)
    dataset = open_dataset(recipe, None)
    facts = {"labels": ["B", "I", "O"], "sizes": dataclasses.asdict(dataset.sizes)}
    facts["data_sha256"] = dataset.digest
    other = tmp_path / "other.jsonl"
    lines = [{"words": ["Ada", "met"], "tags": ["B", "O"]}] * 30
    other.write_text("\n".join(map(json.dumps, lines)))
    measured = open_measured(data_at(recipe, str(other)), dataset.tokenizer, facts)
    assert sum(batch.rows for batch in measured.held_out(4)) == 30
    assert measured.labels == ("B", "I", "O")
