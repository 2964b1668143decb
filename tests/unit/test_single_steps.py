"""Rungs made of single steps: the same answers as whole graphs, early ones, and jumps."""

import numpy as np
import pytest

from serve.runtime import Decoder, OpenedModel, open_model
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
    logits, evaluations, _ = classifier.early(tokens, threshold)
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
