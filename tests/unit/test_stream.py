"""Streams: portions of documents as windows, the same whenever and wherever one comes in."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets", reason="the extra stream is not installed")

from train.data import text
from train.data.tables import DataError
from train.data.text import END_OF_TEXT, StreamDataset
from train.recipe import DataConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Thirty documents of one number each, and one in a file of its own."""
    lines = [
        json.dumps({"text": f"{number} {number + 1} and so on\n" * 12}) for number in range(30)
    ]
    (tmp_path / "numbers.jsonl").write_text("\n".join(lines))
    (tmp_path / "last.txt").write_text("the last document\n" * 12)
    (tmp_path / "other.csv").write_text("not read")
    return tmp_path


def opened(folder: Path, window: int = 8, **changes: Any) -> StreamDataset:
    settings = {"path": str(folder), "tokenizer": "bpe", "vocabulary": 300, **changes}
    return StreamDataset(DataConfig("stream", **settings), window, None)


@pytest.mark.parametrize("portion", [10_000_000, 900])
def test_a_batch_is_a_function_of_seed_and_iteration(
    folder: Path, monkeypatch: pytest.MonkeyPatch, portion: int
) -> None:
    monkeypatch.setattr(text, "PORTION_CHARACTERS", portion)
    data = opened(folder)
    batches = [data.batch(i, 4, seed=1) for i in range(300)]
    again = opened(folder)
    for iteration in (250, 17, 299, 0):
        found, expected = again.batch(iteration, 4, seed=1), batches[iteration]
        assert torch.equal(found.inputs[0], expected.inputs[0])
        assert torch.equal(found.targets, expected.targets)
    assert not torch.equal(again.batch(0, 4, seed=2).targets, batches[0].targets)
    row = batches[0]
    assert torch.equal(row.inputs[0][:, 1:], row.targets[:, :-1])
    assert row.inputs[0].shape == (4, 8)


def test_portions_come_in_the_order_of_the_stream_and_over_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PORTION_CHARACTERS", 900)
    data = opened(folder, tokenizer="chars")

    def middle(iteration: int) -> int:
        rows = torch.cat([data.batch(iteration + i, 4, 0).inputs[0] for i in range(10)])
        words = data.tokenizer.decode(rows.flatten().tolist()).split()
        return sorted(int(word) for word in words if len(word) == 2 and word.isdigit())[-5]

    assert middle(40) < middle(80) < middle(120) > middle(230)  # an epoch is about 190 batches


def test_the_first_documents_are_held_out_and_never_trained_on(folder: Path) -> None:
    data = opened(folder, held_out=0.1)
    mark = data.tokenizer.token_to_id(END_OF_TEXT)
    assert data.held_ids.tolist().count(mark) == 3
    held = data.tokenizer.decode(data.held_ids.tolist())
    assert "0 1 and so on" in held and "2 3 and" in held and "3 4 and" not in held
    trained = data.tokenizer.decode(
        torch.cat([data.batch(i, 16, 0).inputs[0] for i in range(40)]).flatten().tolist()
    )
    assert "0 1 and" not in trained.replace("10 11", "").replace("20 21", "")
    assert "last" in trained
    rows = sum(batch.rows for batch in data.held_out(5))
    assert rows == (len(data.held_ids) - 1) // 8
    assert data.digest == opened(folder).digest != opened(folder, held_out=0.2).digest


def test_a_tokenizer_can_be_given(folder: Path, tmp_path: Path) -> None:
    learned = opened(folder).tokenizer
    path = tmp_path / "given.json"
    path.write_text(learned.to_str())
    assert opened(folder, tokenizer_file=str(path)).tokenizer.get_vocab() == learned.get_vocab()
    with pytest.raises(DataError, match="tokenizer_file"):
        opened(folder, tokenizer_file="nowhere.json")


def test_errors_say_what_to_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="smaller window"):
        opened(folder, window=100_000)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"no \.jsonl or \.txt"):
        opened(empty)
    (empty / "a.jsonl").write_text('{"body": "no text"}\n' * 3)
    with pytest.raises(DataError, match="it has body"):
        opened(empty)

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("could not reach the Hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(DataError, match=r'Skylion007/openwebtext.*--data FOLDER.*kind "text"'):
        StreamDataset(DataConfig("stream", tokenizer="bpe"), 8, None)
