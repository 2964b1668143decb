"""Tokens follow from logits, seed and number alone, with the right frequencies."""

import numpy as np
import pytest

from serve.engine.classify import softmax
from serve.engine.writing import Sampler, Sampling, choose_tokens, likelihood
from serve.runtime.protocol import FloatArray


def logits(*values: float) -> FloatArray:
    return np.array(values, np.float32)


PLAIN = logits(2.0, 1.0, 0.0, -1.0, -2.0)


def chosen(sampler: Sampler, given: FloatArray, number: int) -> int:
    """The token for logits (V,), as token of this number of the answer."""
    return choose_tokens([sampler], given[None], [number])[0]


def tokens(sampling: Sampling, count: int = 4000, given: FloatArray = PLAIN) -> list[int]:
    sampler = Sampler(sampling)
    return [chosen(sampler, given, number) for number in range(count)]


def test_temperature_zero_takes_the_likeliest_and_of_equals_the_first() -> None:
    sampler = Sampler(Sampling(temperature=0.0, seed=3))
    assert chosen(sampler, logits(0.0, 2.0, 2.0), 0) == 1


def test_frequencies_are_the_probabilities() -> None:
    found = np.bincount(tokens(Sampling(seed=1), 20_000), minlength=5) / 20_000
    expected = softmax(PLAIN)
    # Five standard deviations of a frequency: a right sampler fails once in a million runs.
    assert np.all(np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / 20_000))


def test_temperature_sharpens() -> None:
    cold = np.bincount(tokens(Sampling(temperature=0.5, seed=1)), minlength=5) / 4000
    expected = softmax(PLAIN * 2)
    assert np.all(np.abs(cold - expected) < 5 * np.sqrt(expected * (1 - expected) / 4000))


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-6])
def test_a_tiny_temperature_is_greedy_and_no_nan(temperature: float) -> None:
    assert set(tokens(Sampling(temperature=temperature, seed=1), 50)) == {0}


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(tokens(Sampling(top_k=2, seed=1))) == {0, 1}
    assert set(tokens(Sampling(top_k=1, seed=1), 100)) == {0}
    assert set(tokens(Sampling(top_k=99, seed=1))) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_likeliest_that_reach_p() -> None:
    # The probabilities are 0.64, 0.23, 0.09, 0.03, 0.01.
    assert set(tokens(Sampling(top_p=0.64, seed=1))) == {0, 1}
    assert set(tokens(Sampling(top_p=0.63, seed=1))) == {0}
    assert set(tokens(Sampling(top_p=1e-9, seed=1), 100)) == {0}


def test_top_p_counts_what_top_k_left() -> None:
    # Of two tokens with 0.73 and 0.27, the first alone reaches 0.7.
    assert set(tokens(Sampling(top_k=2, top_p=0.7, seed=1))) == {0}


def test_ties_at_the_border_keep_k() -> None:
    assert set(tokens(Sampling(top_k=2, seed=1), given=logits(1.0, 1.0, 1.0, 1.0))) == {0, 1}


def test_the_same_seed_gives_the_same_tokens_in_any_order() -> None:
    ahead = tokens(Sampling(seed=7), 50)
    sampler = Sampler(Sampling(seed=7))
    assert [chosen(sampler, PLAIN, number) for number in reversed(range(50))] == ahead[::-1]
    assert tokens(Sampling(seed=8), 50) != ahead


def test_tokens_of_a_seed_never_change() -> None:
    # Written down: a seed that somebody kept must go on giving the same answer.
    assert tokens(Sampling(seed=7), 12) == [1, 2, 1, 1, 0, 0, 2, 0, 0, 0, 0, 1]


def test_the_greatest_seed_works() -> None:
    assert set(tokens(Sampling(seed=2**63 - 1), 100)) <= {0, 1, 2, 3, 4}


def test_banned_tokens_never_come() -> None:
    sampler = Sampler(Sampling(seed=1), banned_tokens=(0,))
    assert 0 not in {chosen(sampler, PLAIN, number) for number in range(2000)}
    assert chosen(Sampler(Sampling(temperature=0.0), (0,)), PLAIN, 0) == 1


def test_the_logits_are_left_as_they_are() -> None:
    given = PLAIN.copy()
    chosen(Sampler(Sampling(top_k=2, top_p=0.5, seed=1), (1,)), given, 0)
    assert np.array_equal(given, PLAIN)


@pytest.mark.parametrize("vocabulary", [2, 7, 65, 1000])
def test_a_row_gets_the_token_that_it_gets_alone(vocabulary: int) -> None:
    chance = np.random.default_rng(vocabulary)
    ways = [
        Sampling(temperature=0.0),
        Sampling(seed=5),
        Sampling(temperature=1e-300, seed=6),
        Sampling(temperature=3.0, top_k=2, seed=7),
        Sampling(temperature=0.7, top_p=0.6, seed=8),
        Sampling(temperature=1.3, top_k=5, top_p=0.9, seed=9),
    ]
    for number in range(40):
        banned = (vocabulary // 2,) if number % 2 else ()
        samplers = [Sampler(way, banned) for way in ways * 2]
        many = chance.normal(0, 3, (len(samplers), vocabulary)).astype(np.float32)
        numbers = [int(one) for one in chance.integers(0, 5000, len(samplers))]
        together = choose_tokens(samplers, many, numbers)
        alone = [chosen(one, row, at) for one, row, at in zip(samplers, many, numbers, strict=True)]
        assert together == alone, number


def test_likelihood_is_the_models_own() -> None:
    own, top = likelihood(PLAIN, token=3, alternatives=2)
    log_probabilities = np.log(softmax(PLAIN))
    assert own == pytest.approx(log_probabilities[3])
    assert [token for token, _ in top] == [0, 1]
    assert [value for _, value in top] == pytest.approx(log_probabilities[:2])
    assert likelihood(PLAIN, 3, 0)[1] == []


def test_softmax_of_large_logits_is_finite() -> None:
    assert softmax(logits(1e4, 0.0)).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, seed=9),
        Sampling(seed=9),
        Sampling(temperature=0.7, top_k=5, seed=9),
        Sampling(temperature=1.3, top_p=0.8, seed=9),
    ],
)
def test_following_tokens_are_those_of_each_number_however_they_are_asked_for(
    sampling: Sampling,
) -> None:
    draw = np.random.default_rng(0)
    banned = (3,)
    sampler = Sampler(sampling, banned)
    first = 0
    for _ in range(200):
        # On, again, one back, far ahead, far back: a row that runs ahead does only the first three.
        first = max(0, first + int(draw.choice([0, 1, 1, -1, 20, -20])))
        given = draw.normal(size=(draw.integers(1, 9), 17)).astype(np.float32)
        alone = [
            chosen(Sampler(sampling, banned), row, number)
            for number, row in enumerate(given, first)
        ]
        assert sampler.choose_following(given, first) == alone
        assert 3 not in alone


def test_what_is_kept_of_following_tokens_does_not_grow() -> None:
    sampler = Sampler(Sampling(seed=2))
    for first in range(50):
        sampler.choose_following(np.zeros((8, 5), np.float32), first)
        assert sampler._noise[1].shape[0] <= 9


def test_without_rows_there_are_no_tokens() -> None:
    assert choose_tokens([], np.empty((0, 5), np.float32), []) == []


@pytest.mark.filterwarnings("error")
def test_the_largest_logits_at_the_lowest_temperature_are_still_numbers() -> None:
    largest = float(np.finfo(np.float32).max)
    sampler = Sampler(Sampling(temperature=5e-324, seed=3), banned_tokens=(4,))
    assert chosen(sampler, logits(-largest, 0.0, largest, 1.0, largest), 0) == 2
