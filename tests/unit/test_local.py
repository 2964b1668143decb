"""Bundles used without HTTP: from Python, and by `stepdial predict` and `stepdial sample`."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

import serve
from serve.errors import ImpossibleBudget, Unprocessable
from serve.runtime import open_model
from stepdial import main

ZOO = Path(__file__).parents[2] / "zoo"
TEXTS = ["Stocks fell on Monday", "The striker scored twice", "A new phone", "x " * 500]


def test_labels_are_those_of_the_graphs_in_their_order() -> None:
    with serve.load(ZOO / "topics", threads=1) as model:
        found = model.classify(TEXTS, steps=2)
        assert [one.truncated for one in found] == [False, False, False, True]
        assert {one.steps for one in found} == {2} and model.steps == (1, 2, 4, 8)
        served = model._served
        run = open_model(served.bundle, 1).classifier(2)
        import numpy as np

        for text, one in zip(TEXTS, found, strict=True):
            tokens = np.array([served.codec.encode_input(text, True).tokens])
            logits = run.run(tokens)[0]
            assert one.label == model.labels[int(logits.argmax())]
            scores = np.exp(logits - logits.max())
            assert one.score == pytest.approx(scores.max() / scores.sum(), abs=1e-5)
            assert sum(one.scores.values()) == pytest.approx(1, abs=1e-5)
        assert [one.label for one in found[:2]] == ["Business", "Sports"]


def test_more_rows_than_one_job_takes() -> None:
    with serve.load(ZOO / "topics", threads=1) as model:
        texts = [" ".join(["word"] * (1 + i % 30)) for i in range(150)]
        found = model.classify(texts, effort="low")
        assert len(found) == 150
        alone = [model.classify([texts[i]], effort="low")[0] for i in (0, 77, 149)]
        for one, other in zip(alone, (found[i] for i in (0, 77, 149)), strict=True):
            assert one.label == other.label and one.score == pytest.approx(other.score, abs=1e-5)
        assert model.classify([]) == []


def test_a_generator_writes_and_other_tasks_are_refused() -> None:
    with serve.load(ZOO / "shakespeare", threads=1) as model:
        one = model.generate("ROMEO:", max_tokens=20, steps=2, seed=3)
        assert one == model.generate("ROMEO:", max_tokens=20, steps=2, seed=3)
        assert 0 < len(one) <= 20
        assert "\n" not in model.generate("ROMEO:", max_tokens=60, seed=3, stop=["\n"])
        with pytest.raises(ValueError, match="is for the task generate"):
            model.classify(["a"])
        with pytest.raises(ImpossibleBudget, match="does not offer 3 steps"):
            model.generate("ROMEO:", steps=3)
        with pytest.raises(Unprocessable, match="outside the vocabulary"):
            model.generate("ROMEO: \N{SNOWMAN}")


def write_rows(path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "title", "body"])
        writer.writerow(["7", "Stocks fell", "Wall street dropped, on Monday"])
        writer.writerow(
            ["8", "Team wins", 'The "striker" scored twice in the cup final, his coach said']
        )
    return path


def test_predict_labels_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = write_rows(tmp_path / "in.csv"), tmp_path / "out.csv"
    words = ["predict", str(ZOO / "topics"), "--input", str(table), "--threads", "1"]
    flags = ["--text", "title", "--text", "body", "--steps", "2"]
    assert main([*words, *flags, "--output", str(out)]) == 0
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["predicted_label"] for row in rows] == ["Business", "Sports"]
    assert [row["id"] for row in rows] == ["7", "8"] and rows[1]["body"].count('"') == 2
    assert {row["predicted_steps"] for row in rows} == {"2"}
    assert "2 rows" in capsys.readouterr().out
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"body": row["body"]}) + "\n" for row in rows))
    words[3] = str(lines)
    assert main([*words, "--text", "body"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["predicted_label"] for row in printed] == ["Business", "Sports"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "has no column 1, 2; it has id, title, body"),  # its own training had no header
        (("--text", "text"), "name those of the texts with --text"),
        (("--text", "body", "--steps", "3"), "does not offer 3 steps"),
        (("--text", "body", "--output", "out.json"), "expected .csv, .tsv or .jsonl"),
    ],
)
def test_what_cannot_be_predicted_is_said(
    flags: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_rows(tmp_path / "in.csv")
    assert main(["predict", str(ZOO / "topics"), "--input", str(table), *flags]) == 2
    assert said in capsys.readouterr().err


def test_sample_continues_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", str(ZOO / "shakespeare"), "--prompt", "ROMEO:", "--max-tokens", "12"]
    assert main([*words, "--seed", "3", "--threads", "1"]) == 0
    assert 0 < len(capsys.readouterr().out) <= 13
    assert main(["sample", str(ZOO / "topics"), "--prompt", "a"]) == 2
    assert "is for the task classify" in capsys.readouterr().err


def test_nothing_of_it_loads_torch() -> None:
    code = "import serve, sys; serve.load('zoo/topics').close(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ZOO.parent, check=True, timeout=60)
