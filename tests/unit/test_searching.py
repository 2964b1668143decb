"""Beam search: what it answers, and how the engine runs, fails and drops it."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from serve.engine.cost import CostKey
from serve.engine.job import TokenEvent
from serve.engine.search import Beams
from serve.errors import Unprocessable
from tests.engine_bench import generated, running
from tests.fake_model import ROW_BYTES_A_POSITION
from tests.waiting import wait_until

VOCABULARY, BOS, EOS = 6, 1, 2


def table(seed: int) -> Any:
    """A model of made-up logits: what comes next depends on the last two tokens."""
    logits = np.random.default_rng(seed).normal(0, 2, (VOCABULARY,) * 3).astype(np.float32)

    def after(prefix: tuple[int, ...]) -> Any:
        return logits[prefix[-2] if len(prefix) > 1 else 0, prefix[-1]]

    return after


def search(after: Any, width: int, max_tokens: int) -> tuple[tuple[int, ...], float]:
    beams = Beams(width, max_tokens, BOS, EOS, banned=(0, BOS))
    while not beams.over:
        beams.grow(np.stack([after(tuple(prefix)) for prefix in beams.prefixes.tolist()]))
    return beams.best.tokens, beams.best.score


@pytest.mark.parametrize("seed", range(8))
def test_a_beam_that_is_wide_enough_finds_the_best_of_all(seed: int) -> None:
    after, longest = table(seed), 3

    def total(tokens: tuple[int, ...]) -> float:
        score = 0.0
        for at, token in enumerate(tokens):
            logits = after((BOS, *tokens[:at])).astype(np.float64)
            logits[[0, BOS]] = -np.inf
            score += logits[token] - np.log(np.exp(logits).sum())
        return score

    words = [token for token in range(2, VOCABULARY) if token != EOS]
    whole = [
        (*word, EOS)
        for length in range(longest)
        for word in itertools.product(words, repeat=length)
    ]
    whole += itertools.product(words, repeat=longest)  # cut before their end
    best = max(whole, key=lambda tokens: total(tokens) / len(tokens))
    tokens, score = search(after, 200, longest)
    assert tokens == best and math.isclose(score, total(best) / len(best))
    narrow = search(after, 3, longest)
    assert narrow[1] <= score + 1e-9


def test_a_search_that_is_cut_does_not_take_a_poor_early_end() -> None:
    likely = np.log(np.array([1e-9, 1e-9, 0.005, 0.985, 0.005, 0.005], np.float32))
    assert search(lambda prefix: likely, 4, 1)[0] == (3,)
    assert search(lambda prefix: likely, 4, 3)[0] == (3, 3, 3)


def test_one_beam_is_greedy_and_an_answer_without_end_is_cut() -> None:
    after = table(3)
    greedy: tuple[int, ...] = ()
    while len(greedy) < 5 and greedy[-1:] != (EOS,):
        logits = after((BOS, *greedy)).copy()
        logits[[0, BOS]] = -np.inf
        greedy += (int(logits.argmax()),)
    assert search(after, 1, 5)[0] == greedy
    never = np.zeros(VOCABULARY, np.float32)
    never[EOS] = -1e9
    assert search(lambda prefix: never, 2, 4)[0] == (3, 3, 3, 3)


def test_a_search_answers_in_one_piece() -> None:
    with running() as bench:
        job, caller = bench.search("abc", 4)
        event = generated(caller)
        assert (event.text, event.finish_reason, event.completion_tokens) == ("defg", "length", 4)
        _, caller = bench.search("abc", 4, stream=True, stops=("f",))
        assert (generated(caller).text, generated(caller).finish_reason) == ("de", "stop")
        assert caller.events[:-1] == [TokenEvent(0, "de")]
        shapes = [shape for kind, _, shape in bench.mood.calls if kind == "search"]
        assert shapes == 2 * [(1, 1), (3, 2), (3, 3), (3, 4)]
        assert (job.most_tokens, job.tokens_left) == (4, 0)
        cost = bench.engine.cost(bench.catalog.find("tiny-translate"))
        assert cost.knows(CostKey("search", job.lane.steps))
        assert cost.knows(CostKey("prefill", job.lane.steps))
        assert bench.idle()
        text = bench.metrics.exposition().decode()
        assert 'stepdial_tokens_total{model="tiny-translate"} 8.0' in text


def test_searches_and_generations_share_the_engine() -> None:
    with running() as bench:
        bench.mood.gate.clear()
        callers = [bench.search(prompt, 12)[1] for prompt in ("a", "f")]
        callers.append(bench.generate("a", 12)[1])
        bench.mood.gate.set()
        texts = [generated(caller).text for caller in callers]
        assert texts == ["bcdefghijklm", "ghijklmnopqr", "bcdefghijklm"]
        kinds = [kind for kind, _, _ in bench.mood.calls]
        assert max(len(list(run)) for _, run in itertools.groupby(kinds[4:16])) <= 2
        assert bench.idle()


def test_a_search_whose_caller_leaves_is_dropped() -> None:
    with running() as bench:
        bench.mood.gate.clear()
        job, caller = bench.search("abc", 20)
        waiting, _ = bench.search("abc", 20)
        wait_until(lambda: bench.engine.running)
        bench.engine.cancel(waiting)
        bench.engine.cancel(job)
        bench.mood.gate.set()
        assert bench.idle() and not caller.events
        assert len([kind for kind, _, _ in bench.mood.calls if kind == "search"]) <= 1


def test_a_search_that_fails_fails_alone() -> None:
    with running() as bench:

        def fail(kind: str, tokens: Any) -> None:
            if kind == "search" and tokens.shape == (2, 3):
                raise RuntimeError("out of luck")

        bench.mood.fail = fail
        bench.mood.gate.clear()
        bad, good = bench.search("a", 6, num_beams=2)[1], bench.search("a", 6)[1]
        bench.mood.gate.set()
        assert bad.error().code == "model_failure"
        assert generated(good).text == "bcdefg"
        bench.mood.logits = lambda logits: logits * np.nan
        assert bench.search("a", 6)[1].error().code == "model_failure"
        assert bench.idle()


def test_searches_keep_to_the_memory_there_is() -> None:
    with running(cache_bytes=12 * 48 * ROW_BYTES_A_POSITION) as bench:
        held = []
        bench.mood.fail = lambda kind, tokens: held.append(bench.engine.cache_bytes)
        callers = [bench.search("a" * 40, 6)[1] for _ in range(40)]
        assert {generated(caller).text for caller in callers} == {"bcdefg"}
        assert 0 < max(held) <= 12 * 48 * ROW_BYTES_A_POSITION
        assert bench.idle()
    with running(cache_bytes=1000) as bench, pytest.raises(Unprocessable):
        bench.search("abc")
