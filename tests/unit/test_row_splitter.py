"""Rows of one call in parts that run at the same time: the same answers, in their order."""

import threading
import time

import numpy as np
import pytest

from serve.bundle import Bundle
from serve.parts import cut_rows
from serve.runtime import open_model
from serve.runtime.classifier import RowSplitter
from serve.runtime.protocol import FloatArray, RowArray
from tests.fixtures.tiny_bundles import build_classify


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return build_classify(tmp_path_factory.mktemp("bundles") / "c")


def numbered(rows: int) -> FloatArray:
    return np.arange(rows, dtype=np.float32)[:, None]


@pytest.mark.parametrize(
    ("most", "rows", "sizes"),
    [
        *[(1, 5, [5]), (2, 1, [1]), (2, 5, [2, 3]), (4, 16, [4] * 4), (4, 3, [3]), (3, 0, [0])],
        *[(2, 15, [7, 6, 2]), (2, 16, [6, 6, 2, 2]), (2, 40, [15, 15, 5, 5])],
    ],
)
def test_every_row_is_in_one_part_in_its_place(most: int, rows: int, sizes: list[int]) -> None:
    splitter = RowSplitter(most)
    found = splitter.each(np.copy, numbered(rows))
    splitter.close()
    assert [len(one) for one in found] == sizes
    assert (np.concatenate(found) == numbered(rows)).all()


@pytest.mark.parametrize("most", range(1, 9))
def test_no_part_has_one_row_of_several(most: int) -> None:
    for rows in range(2, 70):
        sizes = cut_rows(rows, most)
        assert sum(sizes) == rows and min(sizes) >= 2


def test_a_thread_that_is_held_up_leaves_what_is_left_to_the_others() -> None:
    ran: list[tuple[int, int]] = []
    others_ran = threading.Event()

    def hold_up(rows: RowArray) -> None:
        if rows[0, 0] == 0:
            others_ran.wait(timeout=10)
        ran.append((threading.get_ident(), len(rows)))
        if len(ran) == 3:
            others_ran.set()

    splitter = RowSplitter(2)
    splitter.each(hold_up, numbered(16))
    splitter.close()
    slow = ran[-1][0]
    assert [size for thread, size in ran if thread == slow] == [6]
    assert [size for thread, size in ran if thread != slow] == [6, 2, 2]


def test_parts_run_at_the_same_time() -> None:
    meeting = threading.Barrier(3)

    def meet(rows: RowArray) -> int:
        return meeting.wait(timeout=10)

    splitter = RowSplitter(3)
    assert sorted(splitter.each(meet, numbered(6))) == [0, 1, 2]
    splitter.close()


@pytest.mark.parametrize("kind", [ArithmeticError, IndexError])
@pytest.mark.parametrize("failing", [0, 3])
def test_a_failure_is_told_when_nothing_runs_any_more(failing: int, kind: type[Exception]) -> None:
    ended = []
    both = threading.Barrier(2)

    def fail(rows: RowArray) -> None:
        both.wait(timeout=10)
        if rows[0, 0] == failing:
            raise kind("of this part")
        time.sleep(0.1)
        ended.append(rows)

    splitter = RowSplitter(2)
    with pytest.raises(kind, match="of this part"):
        splitter.each(fail, numbered(6))
    assert len(ended) == 1
    splitter.close()


def test_answers_are_those_of_the_whole_batch(
    labels: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    high, most = labels.manifest.text_tokenizer.vocab_size, labels.manifest.text_input.max_tokens
    tokens = np.random.default_rng(0).integers(1, high, (7, most))
    shared = open_model(labels, 2)
    monkeypatch.setattr("serve.runtime.model.RowSplitter", lambda most: RowSplitter(1))
    whole = open_model(labels, 2)
    for steps in labels.manifest.steps:
        wanted = whole.classifier(steps).run(tokens)
        assert (shared.classifier(steps).run(tokens) == wanted).all()
    steps = labels.manifest.full_steps
    one, many = whole.step_classifier(steps), shared.step_classifier(steps)
    threshold = float(np.median(np.ptp(one.jumps(tokens)[0], axis=-1)))
    alone, beside = one.early(tokens, threshold), many.early(tokens, threshold)
    assert (beside.evaluations == alone.evaluations).all()
    assert len(set(alone.evaluations)) > 1, "some stop early, some do not"
    # Of one row that is left alone the last bits differ, in any batch.
    np.testing.assert_allclose(beside.logits, alone.logits, rtol=0, atol=1e-6)
    assert (many.jumps(tokens) == one.jumps(tokens)).all()
    shared.close()
