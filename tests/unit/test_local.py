"""Bundles used without HTTP: from Python, and by `stepdial predict` and `stepdial sample`."""

import base64
import csv
import gzip
import io
import json
import lzma
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import serve
from serve.api.body import TokenLabel
from serve.errors import ImpossibleBudget, InvalidField, ServeError, Unprocessable
from serve.local import LocalModel
from serve.predict import LONGEST_CELL, _label_of_each, _Text, _words
from serve.runtime import open_model
from stepdial import main
from tests.fixtures.tiny_families import build_tag
from tests.fixtures.tiny_folders import classify_bundle, news_bundle

ZOO = Path(__file__).parents[2] / "zoo"
TEXTS = ["Stocks fell on Monday", "The team scored twice", "A new phone", "x " * 500]


def news() -> Path:
    """The folder of a tiny bundle that answers about these texts as the one of the zoo."""
    return news_bundle().folder


def test_labels_are_those_of_the_graphs_in_their_order() -> None:
    with serve.load(ZOO / "topics", threads=1) as model:
        found = model.classify(TEXTS, steps=2)
        assert [one.truncated for one in found] == [False, False, False, True]
        assert {one.steps for one in found} == {2} and model.steps == (1, 2, 3)
        served = model._served
        run = open_model(served.bundle, 1).classifier(2)
        for text, one in zip(TEXTS, found, strict=True):
            tokens = np.array([served.codec.encode_input(text, True).tokens])
            logits = run.run(tokens)[0]
            assert one.label == model.labels[int(logits.argmax())]
            scores = np.exp(logits - logits.max())
            assert one.score == pytest.approx(scores.max() / scores.sum(), abs=1e-5)
            assert sum(one.scores.values()) == pytest.approx(1, abs=1e-5)
        assert [one.label for one in found[:2]] == ["Business", "Sports"]


def test_the_settings_of_a_server_are_for_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPDIAL_PORT", "the usual one")
    with serve.load(news(), threads=1) as model:
        assert model.classify(TEXTS[:1])[0].label == "Business"


def test_more_rows_than_one_job_takes() -> None:
    with serve.load(news(), threads=1) as model:
        texts = [" ".join(["a"] * (1 + i % 30)) for i in range(150)]
        found = model.classify(texts, effort="low")
        assert len(found) == 150
        alone = [model.classify([texts[i]], effort="low")[0] for i in (0, 77, 149)]
        for one, other in zip(alone, (found[i] for i in (0, 77, 149)), strict=True):
            assert one.label == other.label and one.score == pytest.approx(other.score, abs=1e-5)
        assert model.classify([]) == []
        of_a_grid: Any = np.int64(2)
        assert model.classify(texts[:1], steps=of_a_grid)[0].steps == 2


def test_a_generator_writes_and_other_tasks_are_refused() -> None:
    with serve.load(ZOO / "shakespeare", threads=1) as model:
        one = model.generate("ROMEO:", max_tokens=20, steps=2, seed=3)
        assert one == model.generate("ROMEO:", max_tokens=20, steps=2, seed=3)
        assert 0 < len(one) <= 20
        assert "\n" not in model.generate("ROMEO:", max_tokens=60, seed=3, stop=["\n"])
        word = one[4:8]  # of a text alone, which is one stop and not its characters
        assert model.generate("ROMEO:", max_tokens=20, steps=2, seed=3, stop=word) == one[:4]
        of_a_grid: Any = {"max_tokens": np.int64(20), "steps": np.int64(2), "seed": np.int32(3)}
        assert model.generate("ROMEO:", **of_a_grid) == one
        with pytest.raises(ValueError, match="is for the task generate"):
            model.classify(["a"])
        with pytest.raises(ImpossibleBudget, match="does not offer 3 steps"):
            model.generate("ROMEO:", steps=3)
        with pytest.raises(Unprocessable, match="outside the vocabulary"):
            model.generate("ROMEO: \N{SNOWMAN}")


@pytest.mark.parametrize(
    ("inputs", "options", "said"),
    [
        ("Stocks fell", {}, "must be a list: for one text"),
        (["a", 5], {}, r"inputs\[1\] must be a text, not int"),
        ([["a"]], {}, r"inputs\[0\] must be a text, not list"),
        (["a"], {"effort": "most"}, "effort must be 'low'"),
        (["a"], {"steps": "2"}, "steps must be an integer"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(
    inputs: Any, options: dict[str, Any], said: str
) -> None:
    with (
        serve.load(news(), threads=1) as model,
        pytest.raises(InvalidField, match=said),
    ):
        model.classify(inputs, **options)
    with pytest.raises(ValueError, match="tiny-news is closed"):
        model.classify(["a"])


def write_rows(path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "title", "body"])
        writer.writerow(["7", "Stocks fell", "Wall street dropped, on Monday"])
        writer.writerow(
            ["8", "Team wins", 'The "keeper" saved twice in the cup final, his coach said']
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


def test_a_table_with_a_byte_order_mark_gets_one_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out = tmp_path / "in.csv", tmp_path / "out.csv"
    table.write_text("text\nStocks fell à Paris\n", encoding="utf-8-sig")
    for written in (out, table, table):  # also over itself, and then not twice
        assert predicted(table, "--text", "text", "--output", str(written), capsys=capsys)
        assert written.read_text(encoding="utf-8").startswith("\ufefftext,predicted_label,")
    assert not predicted(table, "--text", "text", capsys=capsys)[0].startswith("\ufeff")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "has id, title, body: name those of the texts with --text. The model was trained"),
        (("--text", "text"), "name those of the texts with --text"),
        (("--text", "body", "--steps", "4"), "does not offer 4 steps"),
        (("--text", "body", "--output", "out.xml"), "expected .csv, .tsv or .jsonl"),
        (("--text", "body", "--output", "nowhere/out.csv"), "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_predicted_is_said(
    flags: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_rows(tmp_path / "in.csv")
    assert main(["predict", str(news()), "--input", str(table), *flags]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.out == ""


def test_without_a_name_of_a_column_a_table_with_a_header_is_read_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The columns of the training were numbers.
    table = tmp_path / "in.csv"
    table.write_text("id,text\n1,Stocks fell\n")
    assert "1,Stocks fell,Business," in predicted(table, capsys=capsys)[1]
    table.write_text("id,body\n1,Stocks fell\n")
    assert main(["predict", str(news()), "--input", str(table)]) == 2
    said = capsys.readouterr()
    assert "has id, body: name those of the texts with --text" in said.err and not said.out
    table.write_text('1,2,"Stocks fell"\n')
    assert "Business" in predicted(table, "--text", "2", capsys=capsys)[0]


def test_texts_that_are_cut_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "in.csv"
    table.write_text(f"text\nStocks fell\n{'Shares slide. ' * 99}\n")
    words = ["predict", str(news()), "--input", str(table), "--steps", "1"]
    assert main(words) == 0
    assert "1 text was longer than the model reads, and cut" in capsys.readouterr().err


def test_half_a_character_in_another_column_is_handed_on() -> None:
    data = b'{"text": "Stocks fell", "x": "\\ud800", "y": "\xc3\xa4"}\n{"x": 1}\n'
    command = [sys.executable, "-m", "stepdial", "predict", str(news()), *PIPED]
    done = subprocess.run(command, input=data, capture_output=True, cwd=ZOO.parent, timeout=60)
    assert done.returncode == 0 and b"1 row without a text has no label" in done.stderr
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert (first["x"], first["y"], first["predicted_label"]) == ("\ud800", "ä", "Business")
    assert second["predicted_label"] is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_its_process_leaves_no_half_of_a_table(
    tmp_path: Path, number: signal.Signals
) -> None:
    table = tmp_path / "in.csv"
    table.write_text("text\n" + "Shares of a bank fell on Wall Street\n" * 200_000)
    words = ["predict", str(ZOO / "topics"), "--input", str(table), "--text", "text"]
    command = [sys.executable, "-m", "stepdial", *words, "--output", str(tmp_path / "out.csv")]
    with subprocess.Popen(command, cwd=ZOO.parent, stderr=subprocess.PIPE) as running:
        deadline = time.monotonic() + 60
        while not any(path.name.startswith(".out.csv") for path in tmp_path.iterdir()):
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.05)
        running.send_signal(number)
        assert running.wait(30) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_a_table_that_nobody_reads_on_ends_as_other_commands_do(tmp_path: Path) -> None:
    table = tmp_path / "in.csv"
    table.write_text("text\nShares of a bank fell on Wall Street\n")
    words = ["predict", str(ZOO / "topics"), "--input", str(table), "--text", "text"]
    command = shlex.join([sys.executable, "-m", "stepdial", *words])
    piped = f"{command} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], cwd=ZOO.parent, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_process_that_gets_no_time_waits_for_its_answers(tmp_path: Path) -> None:
    with LocalModel(news(), threads=1) as model:
        patience = model._engine._patience
        assert patience.stall_s == patience.stall_unknown_s == math.inf


def test_embeddings_are_those_of_the_server() -> None:
    texts = ["Stocks fell sharply.", "The coach signs a pitcher.", "A new telescope."]
    with serve.load(ZOO / "topics", threads=1) as model:
        vectors = model.embed(texts, steps=2)
        assert vectors.shape == (3, 384)
        np.testing.assert_allclose((vectors**2).sum(axis=1), 1, rtol=1e-5)
        np.testing.assert_allclose(model.embed(texts[1:2], steps=2)[0], vectors[1], atol=1e-5)
        assert abs(model.embed(texts, steps=1) - vectors).max() > 0.01
        assert model.embed([]).shape == (0, 384)
    with (
        serve.load(ZOO / "digits", threads=1) as model,
        pytest.raises(ServeError, match="gives no embeddings"),
    ):
        model.embed(["a"])


def test_images_may_be_arrays_and_more_than_a_request_may_hold() -> None:
    draw = np.random.default_rng(0)
    large = Image.fromarray(draw.integers(0, 255, (2000, 2000), dtype=np.uint8))
    file = io.BytesIO()
    large.save(file, "PNG", compress_level=1)
    text = base64.b64encode(file.getvalue()).decode()
    with serve.load(ZOO / "digits", threads=1) as model:
        assert len(model.classify([text] * 9)) == 9  # of 2 ** 25 pixels together at most, in HTTP
        array = draw.integers(0, 255, (28, 28))
        assert model.classify([array]) == model.classify([array.tolist()])


def test_each_word_of_a_list_has_a_label_or_none() -> None:
    tokens = [
        TokenLabel(text=one.lower(), start=start, end=start + 1, label=one, score=0.9)
        for start, one in ((0, "A"), (3, "B"))
    ]
    assert _label_of_each(_Text(["a", "", "b"], listed=True), tokens) == ["A", None, "B"]
    for spaces in ("  ", "\n ", " \n", "\n\n", " \t"):
        assert _label_of_each(_Text(f"a{spaces}b".split(" "), listed=False), tokens) == ["A", "B"]


TABLES = {
    "csv": "text,id\nStocks fell,1\nThe team scored twice,2\n",
    "tsv": "text\tid\nStocks fell\t1\nThe team scored twice\t2\n",
    "jsonl": '{"text": "Stocks fell"}\n{"text": "The team scored twice"}\n',
}


PIPED = ("--input", "-", "--text", "text", "--steps", "1")
Piped = Callable[..., tuple[int, str, str]]


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Piped:
    """What the command does with bytes as standard input: its status, output and errors."""

    def run(data: bytes, *flags: str) -> tuple[int, str, str]:
        given = io.TextIOWrapper(io.BufferedReader(io.BytesIO(data)))
        monkeypatch.setattr(sys, "stdin", given)
        return main(["predict", str(news()), *PIPED, *flags]), *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("kind", "flags", "mark"),
    [
        ("csv", (), b""),
        ("csv", ("--output", "-"), b"\xef\xbb\xbf"),
        ("jsonl", (), b"\xef\xbb\xbf"),
        ("jsonl", ("--format", "jsonl"), b"\n"),
        ("tsv", ("--format", "tsv"), b""),
    ],
)
def test_predict_reads_standard_input(
    kind: str, flags: tuple[str, ...], mark: bytes, piped: Piped
) -> None:
    status, out, err = piped(mark + TABLES[kind].encode(), *flags)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    if kind == "jsonl":
        assert [json.loads(line)["predicted_label"] for line in lines] == ["Business", "Sports"]
        return
    rows = list(csv.DictReader(lines, delimiter="," if kind == "csv" else "\t"))
    assert [row["predicted_label"] for row in rows] == ["Business", "Sports"]
    assert [row["id"] for row in rows] == ["1", "2"]


def test_what_is_missing_is_an_empty_text_in_every_kind_of_table() -> None:
    columns = ["title", "body"]
    read = [_words(row, columns, "row 1") for row in ({"title": "a"}, {"title": "a", "body": ""})]
    read += [_words({"title": "a", "body": None}, columns, "row 1")]
    assert [one.words for one in read] == [["a", ""]] * 3  # "a ", as in training


@pytest.mark.parametrize("pack", [gzip, lzma], ids=["gz", "xz"])
def test_compressed_standard_input_is_unpacked(pack: Any, piped: Piped) -> None:
    for kind in ("csv", "jsonl"):
        status, out, err = piped(pack.compress(TABLES[kind].encode()))
        assert (status, err) == (0, "") and "Business" in out
        assert out == piped(TABLES[kind].encode())[1]


@pytest.mark.parametrize(
    ("data", "flags", "said"),
    [
        (b"", (), "standard input has no rows"),
        (gzip.compress(b"text\na\n", mtime=0)[:-4], (), "standard input cannot be read: "),
        (b"\x1f\x8btext\na\n", (), "standard input cannot be read: "),
        (lzma.compress(b"text\na\n" * 99)[:-20], (), "standard input cannot be read: "),
        (b'{"text": "a"}\n{"text": }\n', (), "standard input, line 2: not valid JSON"),
        (b'[{"text": "a"}]\n', (), "standard input, line 1: expected one object a line"),
        (b"text\na\nb,c\n", (), "standard input, row 2: 2 cells"),
        (b"text\n\xff\n", (), "(invalid start byte); convert it first, as in: iconv -f cp1252"),
        (b"\xff\xfet\0", ("--format", "csv"), "as in: iconv -f utf-16 -t utf-8"),
        (b"text\na\n", ("--output", "out.jsonl"), "end it like --input, .csv"),
        (b"text\na\n", ("--format", "tsv", "--output", "out.csv"), "end it like --input, .tsv"),
    ],
    ids=[
        "empty",
        "gzip-cut-off",
        "gzip-damaged",
        "xz-cut-off",
        "json-damaged",
        "json-list",
        "cells-too-many",
        "not-utf-8",
        "utf-16",
        "output-of-another-format",
        "output-of-another-table",
    ],
)
def test_what_is_wrong_with_standard_input_is_said(
    data: bytes, flags: tuple[str, ...], said: str, piped: Piped
) -> None:
    status, _, err = piped(data, *flags)
    assert status == 2
    assert err.startswith("stepdial predict: ") and said in err


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_file_without_line_ends_is_not_read_whole(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("serve.predict.LONGEST_LINE", 1000)
    table = tmp_path / f"in.{kind}.gz"
    table.write_bytes(gzip.compress((TABLES[kind].strip() + "\n" + "a" * 5000).encode()))
    assert main(["predict", str(news()), "--input", str(table), "--text", "text"]) == 2
    assert "longer than 1,000 characters: is this a table?" in capsys.readouterr().err


@pytest.mark.parametrize("pack", [gzip, lzma], ids=["gz", "xz"])
@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_predict_reads_and_writes_compressed_tables(
    kind: str, pack: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / f"in.{kind}.{'gz' if pack is gzip else 'xz'}"
    table.write_bytes(pack.compress(TABLES[kind].encode()))
    shown = predicted(table, "--text", "text", capsys=capsys)
    assert predicted(table, "--text", "text", "--output", str(table), capsys=capsys)
    assert pack.decompress(table.read_bytes()).decode().split("\n") == shown
    plain = tmp_path / f"out.{kind}"
    table.write_bytes(pack.compress(TABLES[kind].encode()))
    assert predicted(table, "--text", "text", "--output", str(plain), capsys=capsys)
    assert plain.read_text().split("\n") == shown and "Sports" in plain.read_text()


def test_what_another_process_writes_into_the_folder_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers that share a folder have the same process ids."""
    table, out = tmp_path / "in.csv", tmp_path / "out.csv"
    table.write_text(TABLES["csv"])
    other = tmp_path / f".{out.name}.{os.getpid()}"
    other.write_text("of another container")
    predicted(table, "--text", "text", "--output", str(out), capsys=capsys)
    assert out.stat().st_size and other.read_text() == "of another container"


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_a_closed_standard_stream_is_named(
    stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "in.csv"
    table.write_text(TABLES["csv"])
    monkeypatch.setattr(sys, stream, None)  # as Python sets it where the descriptor is closed
    source = "-" if stream == "stdin" else str(table)
    assert main(["predict", str(news()), "--input", source, "--text", "text"]) == 2
    assert f"standard {stream[3:]}put is closed" in capfd.readouterr().err


def test_an_archive_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(classify_bundle().folder)
    rows = "".join(f"{n * 7919}\n" for n in range(8000))
    for pack, name in ((gzip, "in.csv.gz"), (lzma, "in.csv.xz")):
        whole = pack.compress(f"text\n{rows}".encode())
        altered = whole[:9000] + bytes(byte ^ 255 for byte in whole[9000:9100]) + whole[9100:]
        for data in (whole[:-500], altered, b"text\na\n"):
            table = tmp_path / name
            table.write_bytes(data)
            words = ["predict", model, "--input", str(table), "--text", "text"]
            assert main([*words, "--steps", "1", "--output", str(tmp_path / "out.csv")]) == 2
            assert f"{name} cannot be read: " in capsys.readouterr().err
            assert not (tmp_path / "out.csv").exists()


def test_a_table_of_another_name_is_read_by_its_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "export.txt"
    table.write_text(TABLES["csv"])
    lines = predicted(table, "--text", "text", "--format", "csv", capsys=capsys)
    assert lines[0].startswith("text,id,predicted_label") and ",Business," in lines[1]


def test_predict_gives_each_word_a_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_tag(tmp_path / "names", name="names", words=True, max_tokens=8)
    words = ["the", "film", "was", "very", "good"]
    given = [words, " ".join(words), "the film  was", [*words, *words]]
    table = tmp_path / "in.jsonl"
    table.write_text("".join(json.dumps({"text": text}) + "\n" for text in given))
    flags = ["predict", str(tmp_path / "names"), "--input", str(table), "--steps", "2"]
    assert main(flags) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [row["predicted_labels"] for row in rows]
    with serve.load(tmp_path / "names") as model:
        tagged = model.tag([" ".join(words)], steps=2)[0]
    expected = [
        next(
            token["label"]
            for token in tagged.tokens
            if token["start"] == " ".join(words).find(word)
        )
        for word in words
    ]
    assert found[0] == found[1] == expected and set(expected) <= {"other", "person", "place"}
    assert len(found[2]) == 3 and None not in found[2]
    assert len(found[3]) == 10 and found[3].count(None) >= 2  # cut: it has more than 8 tokens
    assert {row["predicted_steps"] for row in rows} == {2}
    sheet, out = tmp_path / "in.csv", tmp_path / "out.csv"
    sheet.write_text("text\nthe film was\n")
    assert main([*flags[:3], str(sheet), "--output", str(out)]) == 0
    with out.open(newline="", encoding="utf-8") as file:
        assert len(next(csv.DictReader(file))["predicted_labels"].split()) == 3


def test_predict_fills_a_puzzle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "in.csv"
    table.write_text("text\n..3.6..5...4..2.5......3.6..1....4..\n")
    assert main(["predict", str(ZOO / "logic"), "--input", str(table)]) == 0
    _, row = capsys.readouterr().out.splitlines()
    puzzle, grid, steps = row.split(",")
    assert steps == "16"
    assert all(cell in (".", found) for cell, found in zip(puzzle, grid, strict=True))
    assert [sorted(grid[i : i + 6]) for i in range(0, 36, 6)] == [list("123456")] * 6


def test_a_table_may_be_labelled_in_place(tmp_path: Path) -> None:
    table = tmp_path / "in.csv"
    # More than is read at once.
    texts = [f"Shares of bank {i} fell on Wall Street" for i in range(5000)]
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])
    table.chmod(0o640)
    words = ["predict", str(news()), "--input", str(table), "--output", str(table)]
    assert main([*words, "--text", "text", "--steps", "1"]) == 0
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == texts
    assert {row["predicted_label"] for row in rows} == {"Business"}
    assert table.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_ends_of_lines_within_a_cell_stay_there(tmp_path: Path, end: str) -> None:
    rows = [["text", f"a{end}b"], [f"Shares fell{end}on Monday", '"1"']]
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    with source.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    words = ["predict", str(news()), "--input", str(source), "--output", str(out)]
    assert main([*words, "--steps", "1"]) == 0
    with out.open(newline="", encoding="utf-8") as file:
        assert [row[:2] for row in csv.reader(file)] == rows


def test_a_table_with_semicolons_is_labelled_with_semicolons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.csv"
    source.write_text('id;text\n1;"Shares slide; oil, too."\n')
    lines = predicted(source, "--text", "text", capsys=capsys)
    assert lines[0] == "id;text;predicted_label;predicted_score;predicted_steps"
    assert lines[1].startswith('1;"Shares slide; oil, too.";')
    source.write_text("id;text, raw\n1;Shares slide, oil too.\n")
    lines = predicted(source, "--text", "text, raw", capsys=capsys)
    assert lines[1].startswith("1;Shares slide, oil too.;")
    source.write_text("text;note, raw\nShares slide, oil too.;1\n")  # the column of the training
    lines = predicted(source, capsys=capsys)
    assert lines[1].startswith("Shares slide, oil too.;1;")
    source.write_text("Shares slide; oil too.\n")  # a table of texts alone
    line, _ = predicted(source, "--text", "0", capsys=capsys)
    assert line.startswith("Shares slide; oil too.,")


@pytest.mark.parametrize(
    ("kind", "table", "flags", "said"),
    [
        ("csv", "text\na\n", ("--steps", "16"), "does not offer 16 steps"),
        ("csv", "text\na\nb,c\n", (), "in.csv, row 2: 2 cells, but the first line has 1"),
        ("csv", "text,id,id\na,1,2\n", (), "two columns are called 'id': rename one"),
        ("csv", "text;id\na;1;2\n", (), "in.csv, row 1: 3 cells, but the first line has 2"),
        ("csv", "text\tid\na, b\t1\n", (), "no column text; it has text\tid: name those of the"),
        ("csv", 'text\na\n"b" c\n', (), "line 3: "),
        ("csv", 'text\na\n"b\n', (), "is a quote of a text never closed?"),
        ("csv", "text\na\n\xe4\n", (), "not UTF-8"),
        ("jsonl", '{"text": "a"}\n{"text": }\n', (), "in.jsonl, line 2: not valid JSON"),
        ("jsonl", '{"text": "a"}\n{"text": {"a": 1}}\n', (), 'line 2: text is no text: {"a": 1}'),
        ("jsonl", '{"text": ""}\n{"text": "\\ud83d"}\n', (), "line 2 has half a character"),
    ],
)
def test_an_older_output_is_kept_if_prediction_fails(
    kind: str,
    table: str,
    flags: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, out = tmp_path / f"in.{kind}", tmp_path / f"out.{kind}"
    source.write_text(table, encoding="latin-1")
    out.write_text("dear\n")
    words = ["predict", str(news()), "--input", str(source), "--output", str(out)]
    assert main([*words, "--text", "text", *flags]) == 2
    assert said in capsys.readouterr().err
    assert out.read_text() == "dear\n"
    assert {path.name for path in tmp_path.iterdir()} == {source.name, out.name}


def test_a_cell_or_a_number_that_is_too_long_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content, said in (
        ("in.csv", "a" * LONGEST_CELL + ";b\n", "line 1: field larger than field limit"),
        ("in.jsonl", '{"text": 1' + "0" * 5000 + "}\n", "line 1: not valid JSON: "),
    ):
        (tmp_path / name).write_text(content)
        words = ["predict", str(news()), "--input", str(tmp_path / name)]
        assert main([*words, "--text", "text"]) == 2
        assert said in capsys.readouterr().err


def predicted(table: Path, *flags: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    words = ["predict", str(news()), "--input", str(table), "--steps", "1", *flags]
    assert main(words) == 0
    return capsys.readouterr().out.split("\n")


def test_a_table_is_read_as_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "in.csv"
    table.write_text("\n text ,id\r\n\nStocks fell,1\r\n")  # spaces and empty lines
    lines = predicted(table, "--text", "text", capsys=capsys)
    assert lines[0] == "text,id,predicted_label,predicted_score,predicted_steps"
    assert lines[1].startswith("Stocks fell,1,Business,") and lines[1].endswith(",1")
    assert lines[2:] == [""]


def test_a_table_without_a_header_gets_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "in.csv"
    table.write_text("1,Stocks fell\n2,The team scored twice\n")
    lines = predicted(table, "--text", "1", capsys=capsys)
    assert [line.split(",")[:3] for line in lines[:2]] == [
        ["1", "Stocks fell", "Business"],
        ["2", "The team scored twice", "Sports"],
    ]
    assert lines[2:] == [""]


def test_a_file_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(news()), "--input", str(tmp_path / "no.csv")]) == 2
    assert capsys.readouterr().err == f"stepdial predict: there is no file {tmp_path / 'no.csv'}\n"


def test_a_row_without_a_text_has_no_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "in.jsonl"
    table.write_text('{"text": "Stocks fell"}\n{"text": " "}\n{"text": null}\n{"id": 3}\n')
    words = ["predict", str(news()), "--input", str(table), "--text", "text"]
    assert main(words) == 0
    printed = capsys.readouterr()
    labels = [json.loads(line)["predicted_label"] for line in printed.out.splitlines()]
    assert labels == ["Business", None, None, None]
    assert printed.err == "3 rows without a text have no label\n"


def test_sample_continues_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", str(ZOO / "shakespeare"), "--prompt", "ROMEO:", "--max-tokens", "12"]
    assert main([*words, "--seed", "3", "--threads", "1"]) == 0
    assert 0 < len(capsys.readouterr().out) <= 13
    assert main(["sample", str(news()), "--prompt", "a"]) == 2
    assert "is for the task classify" in capsys.readouterr().err


def test_nothing_of_it_loads_torch() -> None:
    code = "import serve, sys; serve.load('zoo/topics').close(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ZOO.parent, check=True, timeout=60)
