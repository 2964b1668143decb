"""What `stepdial train` says of a classifier at its end: classes, confusion, a bag of words."""

import dataclasses
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score

from export.inspect import describe
from serve.bundle import read_bundle
from stepdial import main
from tests.pretrained_folders import write_folder, write_table
from train.checkpoint import Run, load_run
from train.classifier_report import (
    Baseline,
    ClassifierReport,
    Scores,
    _confusion,
    _rows_of,
    at_chance,
    bag_of_words,
    confusion_lines,
    print_report,
    report_run,
    scores_of,
)
from train.data import open_dataset
from train.loop import ending
from train.model import Output
from train.recipe import load_recipe

TINY = [
    "model.width=16",
    "model.hidden=16",
    "model.heads=2",
    "model.layers=1",
    "model.window=20",
    "steps.full=2",
    "steps.short=[1]",
    "optim.precision=fp32",
    "optim.batch=8",
    "optim.token_dropout=0",
    "run.threads=1",
    "data.vocabulary=300",
    "data.held_out=0.25",
]


def trained(tmp_path: Path, *overrides: str) -> int:
    table = write_table(tmp_path / "table.csv", 240)
    words = ["train", "classifier", "--data", str(table), "--text", "body", "--label", "topic"]
    flags = [part for one in (*TINY, *overrides) for part in ("--set", one)]
    return main([*words, "--out", str(tmp_path / "run"), *flags])


def test_a_training_ends_with_classes_and_a_bag_of_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(tmp_path, "optim.iterations=80", "optim.lr=0.01", "optim.warmup=5") == 0
    said = capsys.readouterr().out
    assert "60 held-out rows" in said and "WARNING: this is not shown" not in said
    first = said.splitlines()[0]  # before the training
    assert first.startswith("A bag of words (TF-IDF and logistic regression) labels 9")
    assert "% of the 60 held-out rows right" in first
    (baseline,) = (line for line in said.splitlines() if line.startswith(" bag of words"))
    assert float(baseline.split()[3]) > 0.9  # one word of each text says it all
    for label in ("bad", "good"):
        cells = next(line for line in said.splitlines() if line.startswith(label)).split()
        assert int(cells[4]) == sum(map(int, cells[5:]))


def test_a_run_goes_on_with_a_table_that_has_moved_and_reports_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(tmp_path, "optim.iterations=1") == 0
    moved = tmp_path / "moved.csv"
    (tmp_path / "table.csv").rename(moved)
    (tmp_path / "table.csv").write_text("body,topic\nother words,else\nmore words,other\n" * 9)
    words = ["train", "classifier", "--data", str(moved), "--text", "body", "--label", "topic"]
    flags = [part for one in (*TINY, "optim.iterations=1") for part in ("--set", one)]
    capsys.readouterr()
    assert main([*words, "--out", str(tmp_path / "run"), *flags]) == 0
    assert "60 held-out rows" in capsys.readouterr().out
    assert load_run(tmp_path / "run").recipe.data.path == str(moved)


def test_a_run_does_not_go_on_with_other_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(tmp_path, "optim.iterations=1") == 0
    table = tmp_path / "table.csv"
    text = table.read_text()
    assert text.count(",good") and text.count(",bad")
    table.write_text(text.replace(",good", ",1").replace(",bad", ",0"))
    words = ["train", "classifier", "--data", str(table), "--text", "body", "--label", "topic"]
    flags = [part for one in (*TINY, "optim.iterations=1") for part in ("--set", one)]
    assert main([*words, "--out", str(tmp_path / "run"), *flags]) == 2
    assert "has the classes 0, 1, but the model was trained on bad, good" in capsys.readouterr().err


def test_columns_are_refused_where_no_table_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some words " * 500)
    words = ["train", "text", "--data", str(text), "--label", "topic", "--out", str(tmp_path / "x")]
    assert main(words) == 2
    assert "--text and --label name columns of a table, and text reads none" in (
        capsys.readouterr().err
    )


def test_an_unknown_option_is_named_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", "run", "--jsn", "x"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: stepdial evaluate") and said.endswith(
        "stepdial evaluate: error: unrecognized arguments: --jsn x; did you mean --json?\n"
    )


def test_a_model_that_learnt_nothing_is_warned_of_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(tmp_path, "optim.iterations=1", "optim.lr=1e-6") == 0
    assert "WARNING: this is not shown to be better" in capsys.readouterr().out
    run, bundle = str(tmp_path / "run"), tmp_path / "bundle"
    assert main(["evaluate", run, "--steps", "1,2"]) == 0
    assert "WARNING: at chance" in capsys.readouterr().out
    assert main(["export", run, "--out", str(bundle), "--no-calibrate"]) == 0
    assert "WARNING: at chance" in capsys.readouterr().out
    assert "WARNING: at chance" in describe(read_bundle(bundle))


def test_without_scikit_learn_it_says_so_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("train.classifier_report.find_spec", lambda name: None)
    assert trained(tmp_path, "optim.iterations=1") == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "There is no bag of words to compare with: that needs scikit-learn (pip install"
    )
    assert said.count("bag of words") == 1


def test_where_no_word_is_in_two_texts_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "t.csv"
    table.write_text("text,label\n" + "".join(f"w{i},{'ab'[i % 2]}\n" for i in range(40)))
    baseline = Baseline()
    baseline.say(load_recipe("classifier", data=str(table)))
    assert baseline.scores is None
    assert "no word is in two texts" in capsys.readouterr().out
    table.write_text("text,label\n" + "a word,a\n" * 10 + "another word,b\n")
    recipes = (load_recipe("classifier", [f"run.seed={n}"], data=str(table)) for n in range(200))
    alone = next(one for one in recipes if {label for _, label in _rows_of(one)[0]} == {"a"})
    baseline.say(alone)
    assert "all rows to train on have one label" in capsys.readouterr().out


def test_held_out_texts_that_are_trained_on_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "t.csv"
    table.write_text("text,label\n" + "".join(f"text {i % 4},{'ab'[i % 2]}\n" for i in range(40)))
    Baseline().say(load_recipe("classifier", data=str(table)))
    assert "WARNING: 4 of the 4 held-out rows have a text that is also" in capsys.readouterr().out
    table.write_text("text,label\n" + "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(40)))
    Baseline().say(load_recipe("classifier", data=str(table)))
    assert "WARNING" not in capsys.readouterr().out


def test_a_class_without_a_held_out_row_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "t.csv"
    rows = "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(40))
    table.write_text(f"text,label\n{rows}a rare one,rare\n")
    recipes = (load_recipe("classifier", [f"run.seed={n}"], data=str(table)) for n in range(200))
    recipe = next(one for one in recipes if "rare" in {label for _, label in _rows_of(one)[0]})
    Baseline().say(recipe)
    assert "WARNING: no held-out row has the label rare: " in capsys.readouterr().out


def test_figures_of_a_confusion_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    full = ((45, 15), (10, 30))
    report = ClassifierReport(
        ("no", "yes"), {1: ((60, 0), (40, 0)), 2: full}, 0.6, Scores(0.8, 0.79)
    )
    assert report.rows == 100 and report.confusion == full
    lines = [line.split() for line in confusion_lines(report)]
    assert lines[1] == ["no", "0.8182", "0.7500", "0.7826", "60", "45", "15"]
    assert lines[2] == ["yes", "0.6667", "0.7500", "0.7059", "40", "10", "30"]
    print_report(report)
    printed = capsys.readouterr().out
    assert "a bag of words is more accurate" in printed
    shown = [line.split() for line in printed.splitlines()[2:5]]
    assert shown[0] == ["1", "0.6000", "0.5020", "to", "0.6906", "0.3750"]
    assert shown[1] == ["2", "0.7500", "0.6570", "to", "0.8245", "0.7442"]
    assert shown[2][:5] == ["bag", "of", "words", "0.8000", "0.7900"]
    assert at_chance(52, 100, 0.5) and not at_chance(75, 100, 0.5)


@pytest.mark.parametrize("seed", range(20))
def test_scores_are_those_of_scikit_learn(seed: int) -> None:
    draw, classes = Random(seed), range(4)
    rows = [(draw.choice(classes[:3]), draw.choice(classes[seed % 2 :])) for _ in range(5 + seed)]
    targets, answers = zip(*rows, strict=True)
    scores = scores_of(_confusion(targets, answers, classes))
    assert scores.accuracy == pytest.approx(accuracy_score(targets, answers))
    expected = f1_score(targets, answers, average="macro", zero_division=0)
    assert scores.macro_f1 == pytest.approx(expected)


class Stubborn:
    """Says the first class at one step, and the second at more."""

    discrete = False

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, tokens: torch.Tensor, steps: int, method: str) -> Output:
        self.lengths.append(tokens.shape[1])
        logits = torch.zeros(len(tokens), 3)
        logits[:, int(steps > 1)] = 1.0
        return Output(logits, torch.zeros(()), steps, ())


def test_a_report_counts_rows_by_their_class_and_the_answers_of_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(f"{'word ' * (1 + i % 40)}{i}", "aaabbc"[i % 6]) for i in range(600)]
    lines = ["text,label", *(",".join(row) for row in rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    few = ["data.held_out=0.5", "steps.full=2", "steps.short=[1]", "data.tokenizer=words"]
    recipe = load_recipe("classifier", few, str(tmp_path / "t.csv"))
    held = Counter(label for _, label in _rows_of(recipe)[1])
    model: Any = Stubborn()
    run = Run(model, recipe, open_dataset(recipe).tokenizer, {})
    monkeypatch.setattr("train.classifier_report.load_run", lambda _: run)
    report = report_run(tmp_path, Scores(0.5, 0.5))
    assert report is not None and report.labels == ("a", "b", "c")
    assert report.confusion == tuple((0, held[label], 0) for label in "abc")
    right = {steps: sum(m[i][i] for i in range(3)) for steps, m in report.confusions.items()}
    assert right == {1: held["a"], 2: held["b"]}
    assert report.chance == max(held.values()) / 300 > min(held.values()) / 300
    model.lengths.clear()
    some = report_run(tmp_path, None, most_rows=96)
    assert some is not None and some.rows == 96
    assert min(model.lengths) < 12 and max(model.lengths) > 25  # short and long texts


def test_the_bag_of_words_is_scored_on_the_test_table_if_there_is_one(tmp_path: Path) -> None:
    own, test = (tmp_path / name for name in ("own.csv", "test.csv"))
    own.write_text("text,label\n" + "some text,a\nother text,b\n" * 20)
    test.write_text("text,label\nsome text,b\n")
    recipe = load_recipe("classifier", ["data.test=test.csv"], str(own))
    used, scored = _rows_of(recipe)
    assert len(used) == 36 and scored == [("some text", "b")]


def test_from_a_pretrained_model_by_one_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "tiny-bert", "bert")
    table = write_table(tmp_path / "table.csv", 60)
    words = ["train", "classifier", "--data", str(table), "--text", "body", "--label", "topic"]
    flags = ["--set", "model.window=16", "--set", "run.threads=1", "--set", "optim.batch=16"]
    assert (
        main(
            [*words, "--from", str(tmp_path / "tiny-bert"), "--out", str(tmp_path / "run"), *flags]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "fine-tuning tiny-bert, the teacher" in said
    assert said.count("A bag of words (TF-IDF") == said.count("\n bag of words") == 1
    assert said.index("A bag of words (TF-IDF") < said.index("training a dial of")
    assert "--steps 1,2,3" in said


def test_balanced_weights_give_a_rare_class_as_much_as_a_common_one(tmp_path: Path) -> None:
    rows = [["body", "topic"], *([["the film", "common"]] * 9 + [["the film", "rare"]]) * 24]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(map(",".join, rows)))
    shares = {}
    for weights in ("equal", "balanced"):
        out = tmp_path / weights
        words = ["train", "classifier", "--data", str(table), "--text", "body", "--label", "topic"]
        learning = ("optim.iterations=150", "optim.lr=0.01", "optim.warmup=5")
        flags = [part for one in (*TINY, *learning) for part in ("--set", one)]
        assert main([*words, "--class-weights", weights, "--out", str(out), *flags]) == 0
        run = load_run(out)
        assert run.tokenizer is not None and run.facts["labels"] == ["common", "rare"]
        tokens = torch.tensor([run.tokenizer.encode("the film").ids])
        with torch.no_grad():
            shares[weights] = float(run.model(tokens, steps=2).logits.softmax(-1)[0, 1])
    assert shares["equal"] == pytest.approx(0.1, abs=0.07)
    assert shares["balanced"] == pytest.approx(0.5, abs=0.17)


def test_weights_of_classes_are_for_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "mnist", "--class-weights", "balanced", "--data", "x"]) == 2
    assert 'needs data.kind "table"' in capsys.readouterr().err


@pytest.mark.long
def test_a_conversion_names_its_bars_and_its_bundle_after_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "bert", "bert")
    table = write_table(tmp_path / "table.csv", 64)
    few = ("optim.batch=16", "optim.precision=fp32", "run.threads=1")
    command = ["convert", str(tmp_path / "bert"), "--data", str(table), "--text", "body"]
    command += ["--label", "topic", "--max-tokens", "12", "--epochs", "1", "--teacher-epochs", "1"]
    command += [part for one in few for part in ("--set", one)]
    assert main([*command, "--out", str(tmp_path / "News-1")]) == 0
    said = capsys.readouterr()
    assert "teacher:" in said.err and "News-1:" in said.err and "classifier:" not in said.err
    assert "--steps 1,2,3 --precision int8 --out" in said.out
    bundle = tmp_path / "bundle"
    exported = ["export", str(tmp_path / "News-1"), "--out", str(bundle), "--steps", "1,2,3"]
    assert main([*exported, "--no-calibrate"]) == 0
    assert read_bundle(bundle).manifest.name == "news-1"


def test_few_rows_are_passed_over_a_few_times_and_many_not_all(tmp_path: Path) -> None:
    table = write_table(tmp_path / "table.csv", 1000)
    settings = ["data.text=body", "data.label=topic", "data.vocabulary=300", "optim.batch=8"]
    recipe = load_recipe("classifier", settings, str(table))
    dataset = open_dataset(recipe, None)  # 900 rows to train on, 113 batches

    def iterations(**changes: Any) -> int:
        optim = dataclasses.replace(recipe.optim, **changes)
        return ending(dataclasses.replace(recipe, optim=optim), dataset).optim.iterations

    assert iterations(epochs=4) == 450
    assert iterations(epochs=8, accumulate=2) == 450
    assert iterations(epochs=0.5) == 300  # below that nothing is learnt
    assert iterations(epochs=100) == recipe.optim.iterations == 2000
    assert iterations(epochs=4, iterations=200) == 200
    assert iterations(epochs=0) == 2000


def test_the_progress_line_counts_what_iterations_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(tmp_path, "optim.iterations=12") == 0
    shown = capsys.readouterr().err
    assert "run: 100%|" in shown and "00:00 left, loss=" in shown and "accuracy@2=" in shown


def test_a_bag_of_words_of_one_letter_and_one_of_too_few_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    letters = [(f"{'x y' if one else 'z'} q", "ab"[one]) for one in (0, 1) * 20]
    assert bag_of_words(letters, letters) == Scores(1.0, 1.0)
    table = tmp_path / "table.csv"
    table.write_text("text,label\n" + "one a,a\n" * 40 + "two b,b\n")
    flags = [part for one in TINY for part in ("--set", one)]
    words = ["train", "classifier", "--data", str(table), "--out", str(tmp_path / "run")]
    assert main([*words, *flags, "--set", "optim.iterations=1"]) == 0
    said = capsys.readouterr().out
    assert "too few rows to tell it from always giving the same answer" in said
    assert "the model is not needed" not in said
