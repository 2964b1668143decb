"""The engine when models throw, callers leave and servers end: everybody is told once."""

import random
from string import ascii_lowercase as LETTERS
from typing import Any

import numpy as np
import pytest

from serve.engine.job import Job, Limits
from serve.errors import Draining, NotReady
from tests.engine_bench import Bench, Caller, classified, generated, running
from tests.fake_model import FakeBatch, Mood
from tests.waiting import wait_until


def test_not_a_number_fails_one_request_only() -> None:
    with running() as bench:

        def spoil_first_row(logits: Any) -> Any:
            if len(logits) == 3:
                logits[0, 0] = np.nan
            return logits

        bench.mood.logits = spoil_first_row
        bench.mood.gate.clear()
        callers = [bench.generate(prompt, 6)[1] for prompt in ("a", "f", "k")]
        bench.mood.gate.set()
        assert callers[0].error().code == "model_failure"
        assert [generated(caller).text for caller in callers[1:]] == ["ghijkl", "lmnopq"]
        assert bench.idle()


def test_not_a_number_fails_one_classification_only() -> None:
    with running() as bench:

        def spoil_last_row(logits: Any) -> Any:
            if len(logits) == 3:
                logits[2, 0] = np.inf
            return logits

        bench.mood.logits = spoil_last_row
        bench.mood.gate.clear()
        first = bench.classify(5)[1]
        wait_until(lambda: bench.engine.running)
        good, bad = bench.classify(5, 5)[1], bench.classify(5)[1]
        bench.mood.gate.set()
        assert bad.error().status == 503
        assert classified(first) and classified(good)
        assert bench.idle()


def test_a_call_that_throws_fails_its_batch_and_no_more() -> None:
    with running() as bench:

        def fail(kind: str, tokens: Any) -> None:
            if kind == "decode" and len(tokens) == 2:
                raise RuntimeError("out of luck")

        bench.mood.fail = fail
        bench.mood.gate.clear()
        pair = [bench.generate(prompt, 6)[1] for prompt in ("a", "f")]
        other = bench.generate("a", 6, steps=4)[1]
        bench.mood.gate.set()
        for caller in pair:
            assert caller.error().code == "model_failure"
            assert "try again" in caller.error().message
        assert generated(other).text == "bcdefg"
        bench.mood.open_rows = 0  # the batch that threw was dropped with its rows in it
        assert generated(bench.generate("a", 6)[1]).text == "bcdefg"
        assert bench.idle()


def test_a_row_that_cannot_leave_costs_its_batch_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device a smaller block is made beside the old one: the memory may be full."""

    def remove(batch: FakeBatch, row: int) -> None:
        raise MemoryError

    with running() as bench:
        bench.mood.gate.clear()
        short, long = (bench.generate("a", tokens)[1] for tokens in (3, 9))
        with monkeypatch.context() as patched:
            patched.setattr(FakeBatch, "remove", remove)
            bench.mood.gate.set()
            assert generated(short).text == "bcd"
            assert long.error().code == "model_failure"
        bench.mood.open_rows = 0  # the batch was dropped with its rows in it
        assert generated(bench.generate("a", 6)[1]).text == "bcdefg"


def test_a_prompt_that_throws_leaves_the_rows_beside_it() -> None:
    with running() as bench:

        def fail(kind: str, tokens: Any) -> None:
            if kind == "prefill" and len(tokens) == 5:
                raise RuntimeError("out of luck")

        bench.mood.fail = fail
        bench.mood.gate.clear()
        good, bad = bench.generate("abc", 20)[1], bench.generate("abcde", 5)[1]
        bench.mood.gate.set()
        assert bad.error().code == "model_failure"
        assert generated(good).completion_tokens == 20
        assert bench.idle()


def test_a_classification_that_throws_leaves_the_engine_alive() -> None:
    with running() as bench:
        bench.mood.fail = lambda kind, tokens: (_ for _ in ()).throw(ValueError("no"))
        assert bench.classify(5)[1].error().code == "model_failure"
        bench.mood.fail = lambda kind, tokens: None
        assert classified(bench.classify(5)[1])
        assert not bench.engine.dead


def test_a_client_that_left_is_dropped_within_a_tick() -> None:
    with running() as bench:
        job, caller = bench.generate("a", 1000, stream=True)
        wait_until(lambda: len(caller.events) > 2)
        bench.engine.cancel(job)
        count = len(caller.events)
        assert bench.idle()
        assert not caller.over.is_set() and len(caller.events) <= count + 1


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_client_that_left_changes_no_answer_of_the_others(left: int) -> None:
    with running() as bench:

        def leave(kind: str, tokens: Any) -> None:
            if kind == "prefill" and len(tokens) == 2:
                assert bench.mood.calls[-2] == ("decode", 2, (4,))
                bench.engine.cancel(made[left][0])

        bench.mood.fail = leave
        bench.mood.gate.clear()
        made = [bench.generate(prompt, 12) for prompt in ("a", "c", "f", "k", "ab")]
        bench.mood.gate.set()
        texts = ["bcdefghijklm", "defghijklmno", "ghijklmnopqr", "lmnopqrstuvw", "cdefghijklmn"]
        for place, (_, caller) in enumerate(made):
            if place != left:
                assert generated(caller).text == texts[place]
        assert bench.idle()


@pytest.mark.parametrize("most_batches", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_clients_that_come_and_leave_at_random_change_no_answer_of_others(
    seed: int, most_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    mood = Mood(most_batches=most_batches, pieces=draw.choice([1, 3]))
    bench = Bench(mood, Limits(decode_rows=8))
    monkeypatch.setattr(bench.engine, "_check_works", lambda: None)  # its thread does not run
    made: list[tuple[Job, Caller, str]] = []
    left: set[Job] = set()

    def come() -> None:
        first, count = draw.randrange(14), draw.choice([1, 3, 12])
        job, caller = bench.generate(LETTERS[first], count, steps=draw.choice([2, 4]))
        made.append((job, caller, LETTERS[first + 1 : first + 1 + count]))

    def during(kind: str, tokens: Any) -> None:
        if len(made) < 40:
            come()
        job = draw.choice(made[-10:])[0]
        if draw.random() < 0.3 and bench.engine.cancel(job):
            left.add(job)

    mood.fail = during
    come()
    while bench.engine.step() is not None:
        pass
    assert bench.engine.queued == bench.engine.running == 0 and left
    for job, caller, text in made:
        assert caller.over.is_set() == (job not in left)
        if job not in left:
            assert generated(caller).text == text


def test_a_client_that_left_the_queue_never_runs() -> None:
    with running() as bench:
        bench.mood.gate.clear()
        first = bench.classify(5)[1]
        wait_until(lambda: bench.engine.running)
        jobs = [bench.classify(7)[0], bench.generate("a", 5)[0]]
        for job in jobs:
            assert bench.engine.cancel(job)
            assert not bench.engine.cancel(job)
        bench.mood.gate.set()
        classified(first)
        assert bench.idle()
        assert bench.mood.calls == [("classify", 2, (1, 5))]


def test_draining_finishes_what_runs_and_takes_no_more() -> None:
    with running() as bench:
        bench.mood.gate.clear()
        caller = bench.generate("a", 5)[1]
        bench.engine.drain()
        with pytest.raises(Draining):
            bench.engine.check_open()
        now_s = bench.engine.clock()
        assert bench.engine.takes(now_s - 60) and not bench.engine.takes(now_s)
        # Whoever asks came before that.
        late = bench.classify(5)[1]
        bench.mood.gate.set()
        assert generated(caller).text == "bcdef"
        assert classified(late)


def test_a_closed_engine_takes_nothing_and_ends_what_it_has() -> None:
    with running() as bench:
        bench.mood.gate.clear()
        caller = bench.generate("a", 500)[1]
        bench.engine.close(Draining("over"))
        assert caller.error().message == "over"
        with pytest.raises(Draining):
            bench.classify(5)
        bench.mood.gate.set()


def test_aborting_ends_everything_with_the_error() -> None:
    with running() as bench:
        bench.mood.gate.clear()
        callers = [bench.generate("a", 500, stream=True)[1], bench.classify(5)[1]]
        bench.engine.abort(Draining("over"))
        assert [caller.error().message for caller in callers] == ["over", "over"]
        bench.mood.gate.set()
        assert bench.idle()


def test_stopping_leaves_nobody_waiting() -> None:
    bench = Bench(Mood(), Limits())
    bench.engine.start()
    callers = [bench.generate("a", 100_000, stream=True)[1] for _ in range(3)]
    bench.engine.stop()
    assert {caller.error().code for caller in callers} == {"draining"}
    assert bench.engine._thread is not None and not bench.engine._thread.is_alive()


def test_the_death_of_the_thread_is_told_to_everybody() -> None:
    bench = Bench(Mood(), Limits())
    bench.mood.fail = lambda kind, tokens: (_ for _ in ()).throw(SystemExit("our bug"))
    bench.engine.start()
    assert bench.classify(5)[1].error().code == "not_ready"
    assert bench.engine.dead
    with pytest.raises(NotReady, match="restarted"):
        bench.classify(5)
    bench.engine.stop()


def test_before_the_start_nothing_is_taken() -> None:
    with pytest.raises(NotReady):
        Bench(Mood(), Limits()).classify(5)
