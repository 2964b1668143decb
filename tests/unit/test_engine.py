"""The engine on a fake model: answers, batches, limits, memory, predictions."""

import numpy as np
import pytest

from serve.bundle import LatencyEntry
from serve.engine.job import LaneKey, Tags, TokenEvent
from serve.errors import QueueFull, Unprocessable
from tests.engine_bench import WINDOW, classified, generated, running
from tests.fake_model import ROW_BYTES_A_POSITION
from tests.waiting import wait_until


def test_scores_come_back_in_the_order_of_the_rows() -> None:
    with running(batch_rows=2) as bench:
        event = classified(bench.classify(10, 30, 20)[1])
        scores = [row.found for row in event.rows if not isinstance(row.found, Tags)]
        seconds = [round(row[1], 4) for row in scores]
        expected = [1 / (1 + np.exp(-0.1 * length)) for length in (10, 30, 20)]
        assert seconds == [round(float(value), 4) for value in expected]
        assert event.span.queue_ms >= 0 and event.span.compute_ms > 0
        assert bench.idle()


def test_requests_that_wait_share_a_call() -> None:
    with running(batch_rows=8) as bench:
        bench.mood.gate.clear()
        first = bench.classify(10)[1]
        wait_until(lambda: bench.engine.running)
        callers = [bench.classify(10)[1] for _ in range(6)]
        bench.mood.gate.set()
        for caller in (first, *callers):
            classified(caller)
        assert bench.mood.calls == [("classify", 2, (1, 10)), ("classify", 2, (6, 10))]


def test_a_generation_goes_on_from_its_prompt() -> None:
    with running() as bench:
        event = generated(bench.generate("abc", 4)[1])
        assert (event.text, event.finish_reason, event.completion_tokens) == ("defg", "length", 4)
        assert bench.idle()


def test_generations_share_their_decode_calls_and_keep_their_answers() -> None:
    with running() as bench:
        bench.mood.gate.clear()
        callers = [bench.generate(prompt, 6)[1] for prompt in ("a", "f", "k", "A")]
        bench.mood.gate.set()
        assert [generated(caller).text for caller in callers] == [
            "bcdefg",
            "ghijkl",
            "lmnopq",
            "BCDEFG",
        ]
        assert max(shape[0] for kind, _, shape in bench.mood.calls if kind == "decode") == 4
        assert bench.idle()


def test_a_stream_has_a_token_event_for_each_token() -> None:
    with running() as bench:
        _, caller = bench.generate("abc", 3, stream=True)
        assert generated(caller).text == "def"
        assert caller.events[:-1] == [TokenEvent(0, "d"), TokenEvent(1, "e"), TokenEvent(2, "f")]


def test_a_stop_string_ends_a_generation_and_is_not_shown() -> None:
    with running() as bench:
        _, caller = bench.generate("abc", 20, stops=("gh",), stream=True)
        event = generated(caller)
        assert (event.text, event.finish_reason, event.completion_tokens) == ("def", "stop", 5)
        assert [token.text for token in caller.events if isinstance(token, TokenEvent)] == [
            *("d", "e", "f", "", "")
        ]


def test_text_that_only_began_like_a_stop_comes_with_the_last_token() -> None:
    with running() as bench:
        _, caller = bench.generate("abc", 3, stops=("fz",), stream=True)
        assert generated(caller).text == "def"
        assert caller.events[2] == TokenEvent(2, "f")


def test_a_generation_outgrows_its_window() -> None:
    with running() as bench:
        alphabet = "abcdefghijklmnopqrstuvwxyz"
        event = generated(bench.generate("a" * (WINDOW - 2) + "ab", 20)[1])
        assert event.text == alphabet[2:22]
        # Read at once: the window is full after the first token of the answer, so one prompt of
        # the last half follows.
        prefills = [shape for kind, _, shape in bench.mood.calls if kind == "prefill"]
        assert prefills == [(WINDOW,), (WINDOW // 2,)]
        assert bench.idle()


def test_log_probabilities_come_with_the_tokens() -> None:
    with running() as bench:
        event = generated(bench.generate("abc", 2, logprobs=2)[1])
        first = event.logprobs[0]
        assert first.token == "d" and first.logprob == pytest.approx(0.0, abs=1e-4)
        assert next(token for token, _ in first.top) == "d" and len(first.top) == 2


def test_a_full_queue_says_when_to_come_back() -> None:
    with running(queue_requests=3) as bench:
        for _ in range(20):
            classified(bench.classify(5)[1])
        bench.mood.gate.clear()
        callers = [bench.classify(5)[1]]
        wait_until(lambda: bench.engine.running)
        callers += [bench.classify(5)[1] for _ in range(3)]
        with pytest.raises(QueueFull) as refused:
            bench.classify(5)
        assert 0 < refused.value.retry_after_s < 10
        headers = refused.value.headers()
        assert int(headers["retry-after"]) * 1000 >= int(headers["retry-after-ms"]) > 0
        bench.mood.gate.set()
        for caller in callers:
            classified(caller)


def test_what_can_never_fit_in_memory_is_refused() -> None:
    with running(cache_bytes=10 * ROW_BYTES_A_POSITION) as bench:
        with pytest.raises(Unprocessable, match="lower max_tokens or steps"):
            bench.generate("abc", 8)
        assert generated(bench.generate("abc", 7)[1]).completion_tokens == 7


def test_memory_is_waited_for_and_never_exceeded() -> None:
    limit = 30 * ROW_BYTES_A_POSITION
    with running(cache_bytes=limit) as bench:
        seen: list[int] = []
        bench.mood.fail = lambda kind, tokens: seen.append(bench.engine.cache_bytes)
        callers = [bench.generate("abc", 9, steps=steps)[1] for steps in (1, 2, 4) * 5]
        for caller in callers:
            assert generated(caller).completion_tokens == 9
        assert 0 < max(seen) <= limit
        assert bench.idle()


def test_predictions_grow_with_what_waits() -> None:
    with running(batch_rows=1) as bench:
        lane = LaneKey("tiny-classify", "classify", 2)
        assert bench.engine.predict_s(lane, None) is None
        assert bench.engine.predict_s(lane, LatencyEntry(2, "classify", 1, 8, 500.0, 600.0)) == 0.5
        classified(bench.classify(5)[1])
        alone_s = bench.engine.predict_s(lane, None)
        assert alone_s is not None
        bench.mood.gate.clear()
        callers = [bench.classify(5)[1]]
        wait_until(lambda: bench.engine.running)
        callers += [bench.classify(5)[1] for _ in range(9)]
        assert bench.engine.predict_s(lane, None) == pytest.approx(10 * alone_s)
        bench.mood.gate.set()
        for caller in callers:
            classified(caller)
