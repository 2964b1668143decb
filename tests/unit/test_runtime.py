"""The runtime on tiny bundles: caches are exact, rows do not see each other, errors say what."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from serve.bundle import BundleError
from serve.runtime import Decoder, OpenedModel, WindowFullError, open_model
from serve.runtime.cache import BUCKET_POSITIONS
from serve.runtime.decoder import OrtPasses
from serve.runtime.protocol import FloatArray, IntArray
from tests.fixtures.tiny_bundles import STEPS, build_classify, build_generate

MAX_TOKENS = 160
# Of logits of size 1: float32 sums in another order.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    folder = tmp_path_factory.mktemp("bundles") / "g"
    return open_model(build_generate(folder, max_tokens=MAX_TOKENS), threads=1)


@pytest.fixture(scope="module")
def labeller(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return open_model(build_classify(tmp_path_factory.mktemp("bundles") / "c"), threads=1)


def random_tokens(model: OpenedModel, *shape: int, seed: int = 0) -> IntArray:
    vocab_size = model.bundle.manifest.text_tokenizer.vocab_size
    return np.random.default_rng(seed).integers(1, vocab_size, shape)


def decode_alone(decoder: Decoder, tokens: IntArray, prompt_tokens: int) -> FloatArray:
    """Logits of every position from the prompt's last one on, one row, one token at a time."""
    batch = decoder.open_batch()
    logits = [batch.add(tokens[:prompt_tokens])]
    logits += [batch.step(tokens[at : at + 1])[0] for at in range(prompt_tokens, len(tokens))]
    return np.stack(logits)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("prompt_tokens", [1, 2, 63, 64, 65, 128, 159, 160])
def test_cached_decode_equals_forward(
    generator: OpenedModel, steps: int, prompt_tokens: int
) -> None:
    decoder = generator.decoder(steps)
    tokens = random_tokens(generator, MAX_TOKENS)
    whole = decoder.forward(tokens[None])[0]
    cached = decode_alone(decoder, tokens, prompt_tokens)
    np.testing.assert_allclose(cached, whole[prompt_tokens - 1 :], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("steps", STEPS)
def test_forward_is_causal_and_its_rows_are_independent(generator: OpenedModel, steps: int) -> None:
    decoder = generator.decoder(steps)
    tokens = random_tokens(generator, 3, 70)
    whole = decoder.forward(tokens)
    assert whole.shape == (3, 70, generator.bundle.manifest.text_tokenizer.vocab_size)
    for row in range(3):
        alone = decoder.forward(tokens[row : row + 1])[0]
        np.testing.assert_allclose(whole[row], alone, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(whole[:, :40], decoder.forward(tokens[:, :40]), atol=TOLERANCE)
    np.testing.assert_allclose(whole[:, :1], decoder.forward(tokens[:, :1]), atol=TOLERANCE)


def test_forward_of_many_rows_is_the_same_in_parts(generator: OpenedModel) -> None:
    decoder = generator.decoder(1)
    tokens = random_tokens(generator, 120, 150)
    whole = decoder.forward(tokens)
    np.testing.assert_allclose(whole[-2:], decoder.forward(tokens[-2:]), rtol=0, atol=TOLERANCE)


def test_rungs_differ(generator: OpenedModel) -> None:
    tokens = random_tokens(generator, 1, 20)
    one, two, four = (generator.decoder(steps).forward(tokens) for steps in STEPS)
    assert np.abs(one - two).max() > 0.01
    assert np.abs(two - four).max() > 0.01


@pytest.mark.parametrize("steps", STEPS)
def test_ragged_rows_together_equal_rows_alone_bit_for_bit(
    generator: OpenedModel, steps: int
) -> None:
    decoder = generator.decoder(steps)
    prompts = (3, 60, 1, 100, 64)
    tokens = random_tokens(generator, len(prompts), MAX_TOKENS)
    batch = decoder.open_batch()
    for row, prompt in enumerate(prompts):
        together = batch.add(tokens[row, :prompt])
        alone = decoder.open_batch().add(tokens[row, :prompt])
        np.testing.assert_array_equal(together, alone)
    together_steps = []
    for tick in range(30):
        at = [prompt + tick for prompt in prompts]
        together_steps.append(batch.step(tokens[range(len(prompts)), at]))
    assert batch.lengths == [prompt + 30 for prompt in prompts]
    for row, prompt in enumerate(prompts):
        alone_steps = decode_alone(decoder, tokens[row, : prompt + 30], prompt)[1:]
        np.testing.assert_array_equal(np.stack(together_steps)[:, row], alone_steps)


@pytest.mark.parametrize("removed", [0, 1, 3])
def test_removing_a_row_leaves_the_others_as_they_were(
    generator: OpenedModel, removed: int
) -> None:
    decoder = generator.decoder(2)
    tokens = random_tokens(generator, 4, MAX_TOKENS)
    prompts = [5, 70, 20, 90]
    batch = decoder.open_batch()
    for row, prompt in enumerate(prompts):
        batch.add(tokens[row, :prompt])
    batch.step(tokens[range(4), prompts])
    batch.remove(removed)
    order = [0, 1, 2, 3]
    order[removed] = order[-1]
    order.pop()
    assert batch.lengths == [prompts[row] + 1 for row in order]
    for tick in range(1, 20):
        logits = batch.step(tokens[order, [prompts[row] + tick for row in order]])
    for place, row in enumerate(order):
        alone = decode_alone(decoder, tokens[row, : prompts[row] + 20], prompts[row])
        np.testing.assert_array_equal(logits[place], alone[-1])


def test_returned_logits_belong_to_the_caller(generator: OpenedModel) -> None:
    batch = generator.decoder(1).open_batch()
    batch.add(np.array([1, 2, 3]))
    first = batch.step(np.array([4]))
    kept = first.copy()
    batch.step(np.array([5]))
    np.testing.assert_array_equal(first, kept)


def test_caches_grow_in_buckets_and_are_freed(generator: OpenedModel) -> None:
    decoder = generator.decoder(4)
    shape = generator.bundle.manifest.shape
    position = 2 * 4 * shape.layers * shape.heads * shape.head_width * 4
    assert decoder.bytes_for(1) == decoder.bytes_for(64) == BUCKET_POSITIONS * position
    assert decoder.bytes_for(65) == 2 * BUCKET_POSITIONS * position
    assert MAX_TOKENS == 2.5 * BUCKET_POSITIONS  # each of which is a page of one head
    assert decoder.bytes_for(MAX_TOKENS) == 3 * BUCKET_POSITIONS * position
    batch = decoder.open_batch()
    assert batch.nbytes == 0
    batch.add(random_tokens(generator, 63))
    assert batch.nbytes == decoder.bytes_for(64)
    batch.step(np.array([1]))
    assert batch.nbytes == decoder.bytes_for(64)
    batch.step(np.array([1]))
    assert batch.nbytes == decoder.bytes_for(65)
    for _ in range(7):
        batch.add(np.array([1]))
    assert batch.nbytes == decoder.bytes_for(65, 8) == 8 * decoder.bytes_for(65)
    assert decoder.bytes_for(65, 7) == decoder.bytes_for(65, 8)
    assert decoder.bytes_for(65, 3) == 3 * decoder.bytes_for(65)
    while len(batch.lengths) > 1:
        batch.remove(0)
    assert batch.nbytes <= 2 * decoder.bytes_for(2)
    batch.remove(0)
    assert batch.nbytes == 0 and batch.lengths == []


def test_a_full_window_is_refused_and_changes_nothing(generator: OpenedModel) -> None:
    decoder = generator.decoder(1)
    tokens = random_tokens(generator, MAX_TOKENS)
    batch = decoder.open_batch()
    batch.add(tokens[:10])
    batch.add(tokens)
    with pytest.raises(WindowFullError, match=r"row 1 has max_tokens \(160\) cached"):
        batch.step(np.array([1, 1]))
    with pytest.raises(WindowFullError, match="a prompt of 161 tokens is longer than max_tokens"):
        batch.add(np.append(tokens, 1))
    assert batch.lengths == [10, MAX_TOKENS]
    batch.remove(1)
    batch.add(tokens[-80:])
    logits = batch.step(tokens[[10, 0]])
    np.testing.assert_array_equal(logits[0], decode_alone(decoder, tokens[:11], 10)[-1])


def test_wrong_tokens_are_refused_and_change_nothing(generator: OpenedModel) -> None:
    decoder = generator.decoder(1)
    batch = decoder.open_batch()
    batch.add(np.array([1, 2]))
    held = batch.nbytes
    for tokens, message in (
        (np.array([], dtype=np.int64), "non-empty int64 array"),
        (np.array([[1]]), "of 1 dimensions"),
        (np.array([1.0]), "non-empty int64 array"),
        (np.array([-1]), "token -1 is outside the vocabulary"),
        (np.array([10**6]), "token 1000000 is outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            batch.add(tokens)
    with pytest.raises(ValueError, match="one token for each of 1 rows"):
        batch.step(np.array([1, 2]))
    with pytest.raises(ValueError, match="one token for each of 0 rows"):
        decoder.open_batch().step(np.array([], dtype=np.int64))
    with pytest.raises(IndexError, match="no row 1 among 1"):
        batch.remove(1)
    with pytest.raises(ValueError, match="161 tokens a row are more than max_tokens"):
        decoder.forward(np.ones((1, 161), dtype=np.int64))
    assert batch.lengths == [2] and batch.nbytes == held


def test_a_failing_prefill_changes_nothing(
    generator: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> FloatArray:
        raise MemoryError

    batch = generator.decoder(1).open_batch()
    batch.add(np.array([1, 2]))
    held = batch.nbytes
    with monkeypatch.context() as patch:
        patch.setattr(OrtPasses, "open", fail)
        with pytest.raises(MemoryError):
            batch.add(random_tokens(generator, 150))
    assert batch.lengths == [2] and batch.nbytes <= 2 * held  # one row may stay spare
    expected = decode_alone(generator.decoder(1), np.array([1, 2, 3]), 2)[-1]
    np.testing.assert_array_equal(batch.step(np.array([3]))[0], expected)


@pytest.mark.parametrize("steps", STEPS)
def test_padded_rows_equal_rows_alone(labeller: OpenedModel, steps: int) -> None:
    classifier = labeller.classifier(steps)
    lengths = (48, 1, 17, 30)
    tokens = np.zeros((4, 48), dtype=np.int64)
    for row, length in enumerate(lengths):
        tokens[row, :length] = random_tokens(labeller, length, seed=row)
    together = classifier.run(tokens)
    assert together.shape == (4, 2) and together.dtype == np.float32
    for row, length in enumerate(lengths):
        alone = classifier.run(tokens[row : row + 1, :length])[0]
        np.testing.assert_allclose(together[row], alone, rtol=0, atol=TOLERANCE)
    assert np.abs(together[0] - together[2]).max() > 0.01


def test_wrong_rows_are_refused(labeller: OpenedModel) -> None:
    classifier = labeller.classifier(1)
    cases: tuple[tuple[npt.NDArray[Any], str], ...] = (
        (np.ones((1, 49), dtype=np.int64), "49 tokens a row are more than max_tokens"),
        (np.array([[1, 0], [0, 1]]), "a row begins with padding"),
        (np.ones((0, 4), dtype=np.int64), "non-empty int64 array"),
        (np.ones((1, 4), dtype=np.int32), "non-empty int64 array"),
        (np.array([[1, 10**7]]), "outside the vocabulary"),
    )
    for tokens, message in cases:
        with pytest.raises(ValueError, match=message):
            classifier.run(tokens)


def test_a_rung_or_task_that_is_not_there_is_refused(
    generator: OpenedModel, labeller: OpenedModel
) -> None:
    with pytest.raises(BundleError, match="does not offer 3 steps; it has 1, 2, 4"):
        generator.decoder(3)
    with pytest.raises(BundleError, match="task generate, which cannot classify"):
        generator.classifier(1)
    with pytest.raises(BundleError, match="task classify, which cannot generate"):
        labeller.decoder(1)


@pytest.mark.parametrize("steps", STEPS)
def test_single_steps_of_a_classifier_make_its_rung(labeller: OpenedModel, steps: int) -> None:
    tokens = random_tokens(labeller, 60).reshape(3, 20)
    whole = labeller.classifier(steps).run(tokens)
    one_by_one = labeller.step_classifier(steps)
    np.testing.assert_allclose(one_by_one.run(tokens), whole, rtol=0, atol=TOLERANCE)
    jumps = one_by_one.jumps(tokens)
    assert jumps.shape == (steps, 3, 2)
    np.testing.assert_array_equal(jumps[-1], one_by_one.run(tokens))
    # One evaluation at any grid, then straight to the end, is the rung of one step.
    np.testing.assert_allclose(jumps[0], labeller.classifier(1).run(tokens), rtol=0, atol=TOLERANCE)


def test_rows_that_are_sure_answer_early_and_the_others_go_on(labeller: OpenedModel) -> None:
    classifier = labeller.step_classifier(4)
    tokens = random_tokens(labeller, 12 * 20).reshape(12, 20)
    jumps = classifier.jumps(tokens)  # (4, 12, 2)
    margins = np.abs(jumps[..., 0] - jumps[..., 1])  # (4, 12)
    threshold = float(np.median(margins[0]))
    logits, steps, evaluations, _ = classifier.early(tokens, threshold)
    np.testing.assert_array_equal(steps, evaluations)
    sure = margins >= threshold
    sure[-1] = True
    np.testing.assert_array_equal(evaluations, sure.argmax(0) + 1)
    assert 1 < evaluations.max() <= 4 and evaluations.min() == 1
    expected = jumps[evaluations - 1, np.arange(12)]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
    alone = [classifier.early(tokens[row : row + 1], threshold) for row in range(12)]
    np.testing.assert_array_equal([int(one.evaluations[0]) for one in alone], evaluations)
    assert set(classifier.early(tokens, 0.0).evaluations) == {1}
    never = classifier.early(tokens, 1e9)
    assert set(never.evaluations) == {4}
    np.testing.assert_array_equal(never.logits, classifier.run(tokens))


def test_the_graph_for_other_runtimes_computes_the_rung(generator: OpenedModel) -> None:
    tokens = random_tokens(generator, 60).reshape(2, 30)
    for steps in STEPS:
        np.testing.assert_allclose(
            generator.unrolled(steps).forward(tokens),
            generator.decoder(steps).forward(tokens),
            rtol=0,
            atol=TOLERANCE,
        )
