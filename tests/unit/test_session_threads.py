"""A warm-up finds whether one row is done sooner by one thread or by all."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from serve.bundle import Bundle
from serve.runtime.classifier import OrtClassifier
from serve.runtime.decoder import OrtDecoder
from serve.runtime.model import OrtModel, interleaved, tune_threads
from serve.runtime.protocol import Model, RowArray
from serve.runtime.session import InterruptibleSession
from tests.fixtures.tiny_bundles import build_classify, build_generate

MOST = 4


@dataclass
class Timed:
    """A classifier that takes so long with so many threads."""

    bundle: Bundle
    seconds: dict[int, float]
    counts: list[int] = field(default_factory=list)

    def opening(self, count: int) -> Model:
        self.counts.append(count)
        return cast(Model, self)

    def classifier(self, steps: int) -> "Timed":
        return self

    def run(self, rows: RowArray) -> None:
        time.sleep(self.seconds[self.counts[-1]])


@pytest.mark.parametrize(
    ("one_s", "all_s", "counts"),
    [(0.001, 0.0001, [1]), (0.2, 0.1, [1, MOST]), (0.2, 0.19, [1, MOST, 1])],
    ids=["small", "large", "large, but no sooner"],
)
def test_all_threads_only_where_they_are_worth_it(
    tmp_path: Path, one_s: float, all_s: float, counts: list[int]
) -> None:
    timed = Timed(build_classify(tmp_path / "c"), {1: one_s, MOST: all_s})
    tune_threads(timed.opening, MOST)
    assert timed.counts == counts


def threads_of(session: InterruptibleSession) -> int:
    threads: int = session.get_session_options().intra_op_num_threads
    return threads


def classifier_of(model: OrtModel) -> InterruptibleSession:
    classifier = model.classifier(1)._classifier
    assert isinstance(classifier, OrtClassifier)
    return cast(InterruptibleSession, classifier._session)


@pytest.mark.parametrize("large", [False, True])
def test_a_warm_classifier_has_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    if large:  # so that all is worth it, however long it takes
        monkeypatch.setattr("serve.runtime.model._ALWAYS_ONE_S", 0.0)
        monkeypatch.setattr("serve.runtime.model._WORTH", 1000.0)
    model = OrtModel(build_classify(tmp_path / "c"), MOST)
    assert threads_of(classifier_of(model)) == MOST
    model.close()
    model.warm_up()
    assert threads_of(classifier_of(model)) == (MOST if large else 1)
    assert model.open_steps == model.bundle.manifest.steps
    model.close()


def test_what_was_asked_for_already_keeps_its_sessions(tmp_path: Path) -> None:
    model = OrtModel(build_classify(tmp_path / "c"), MOST)
    classifier = model.classifier(2)
    model.warm_up()
    assert model.classifier(2) is classifier and threads_of(classifier_of(model)) == MOST


@pytest.mark.parametrize("large", [False, True])
def test_a_generation_has_all_threads_which_wait_awake_for_its_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Its ends have one where they are small: none is woken for so little between two steps."""
    if large:
        monkeypatch.setattr("serve.runtime.session._SMALL_END_BYTES", 0)
    ends = MOST if large else 1
    model = OrtModel(build_generate(tmp_path / "g"), MOST)
    model.warm_up()
    decoder = model.decoder(1)
    assert isinstance(decoder, OrtDecoder)
    sessions = decoder._passes.sessions
    found = [threads_of(one) for one in (sessions.embed, sessions.step, sessions.head)]
    assert found == [ends, MOST, ends]
    assert [spins(one) for one in (sessions.embed, sessions.step, sessions.head)] == [0, 1, 0]
    model.close()


@pytest.mark.parametrize(
    ("alone_s", "small", "threads"), [(1.0, True, 1), (1.1, True, MOST), (0.1, False, MOST)]
)
def test_a_row_that_is_alone_has_one_thread_where_that_is_no_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone_s: float, small: bool, threads: int
) -> None:
    def found(runs: Sequence[Callable[[], object]], rounds: int) -> list[float]:
        assert rounds > 2
        for run in runs:
            run()
        return [1.0, alone_s]

    monkeypatch.setattr("serve.runtime.model.interleaved", found)
    if not small:
        monkeypatch.setattr("serve.runtime.model._SMALL_BYTES", 0)
    bundle = build_generate(tmp_path / "g")
    model, plain = OrtModel(bundle, MOST), OrtModel(bundle, MOST)
    model.warm_up()
    sessions = model._step_sessions()
    assert threads_of(sessions.single) == threads and threads_of(sessions.step) == MOST
    prompt = np.arange(1, 9)
    for rows in (1, 2):
        mine, other = (one.decoder(4).open_batch() for one in (model, plain))
        for _ in range(rows):
            np.testing.assert_array_equal(mine.add(prompt), other.add(prompt))
        for token in range(70):
            tokens = np.full(rows, 1 + token % 9)
            np.testing.assert_array_equal(mine.step(tokens), other.step(tokens))
    model.close()
    plain.close()


def test_runs_are_timed_in_turn_once_they_are_awake() -> None:
    order: list[str] = []

    def run(name: str, first_s: float, seconds: float) -> None:
        time.sleep(seconds if name in order[-1:] else first_s)
        order.append(name)

    quick, slow = interleaved([partial(run, "a", 0.02, 0.0), partial(run, "b", 0.0, 0.02)], 3)
    assert quick < 0.01 and slow >= 0.02
    assert order == ["a", "a", "b", "b"] * 3


def spins(session: InterruptibleSession) -> int:
    entry = session.get_session_options().get_session_config_entry
    assert int(entry("session.intra_op.spin_duration_us")) <= 1000  # not as long as it likes
    return int(entry("session.intra_op.allow_spinning"))
