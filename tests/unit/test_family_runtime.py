"""The runtime on images, points, whole prefixes and translations: answers, limits and memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve.bundle import Bundle, BundleError, TextInput, open_staging, seal_bundle
from serve.runtime import Batches, Model, WindowFullError, open_model
from serve.runtime.protocol import FloatArray, IntArray
from tests.fixtures.tiny_bundles import build_generate, restage
from tests.fixtures.tiny_families import build_prefix
from tests.fixtures.tiny_folders import image_bundle, points_bundle, prefix_bundle, translate_bundle


@pytest.fixture(scope="module")
def prefix() -> Model:
    return open_model(prefix_bundle(), threads=2)


@pytest.fixture(scope="module")
def translator() -> Model:
    return open_model(translate_bundle(), threads=2)


def tokens(seed: int, *shape: int) -> IntArray:
    vocabulary = prefix_bundle().manifest.text_tokenizer.vocab_size
    return np.random.default_rng(seed).integers(3, vocabulary, shape)


def test_every_family_warms_up() -> None:
    for bundle in (image_bundle(), points_bundle(), prefix_bundle(), translate_bundle()):
        model = open_model(bundle, threads=1)
        model.warm_up()
        assert model.open_steps == bundle.manifest.steps  # type: ignore[attr-defined]  # OrtModel alone has it


def test_images_and_points_get_a_row_of_logits_each() -> None:
    chance = np.random.default_rng(0)
    for bundle, shape in ((image_bundle(), (1, 6, 5)), (points_bundle(), (7, 3))):
        classifier = open_model(bundle, threads=1).classifier(2)
        rows = chance.standard_normal((3, *shape)).astype(np.float32)
        logits = classifier.run(rows)
        assert logits.shape == (3, 4)
        alone = np.concatenate([classifier.run(rows[row : row + 1]) for row in range(3)])
        np.testing.assert_allclose(alone, logits, atol=1e-6)
        wrongs: list[Any] = [rows[..., :-1], rows.astype(np.float64), rows[:0], rows * np.nan]
        for wrong in wrongs:
            with pytest.raises(ValueError, match="rows"):
                classifier.run(wrong)
    with pytest.raises(ValueError, match="33 points are more than 32"):
        classifier.run(np.zeros((1, 33, 3), np.float32))


def test_a_decoder_without_caches_answers_as_the_one_with_them(tmp_path: Path) -> None:
    cached = build_generate(tmp_path / "cached", steps=(1,), max_tokens=40)
    plain = build_prefix(tmp_path / "plain", max_tokens=40)
    batches = [open_model(one, threads=1).decoder(1).open_batch() for one in (cached, plain)]
    for length in (1, 15, 16, 17, 30):
        first, second = (batch.add(tokens(length, length)) for batch in batches)
        np.testing.assert_allclose(first, second, atol=1e-5)
    for step in range(8):
        first, second = (batch.step(tokens(100 + step, 5)) for batch in batches)
        np.testing.assert_allclose(first, second, atol=1e-5)
        if step == 3:
            for batch in batches:
                batch.remove(1)
                batch.add(tokens(7, 3))
    assert batches[0].lengths == batches[1].lengths
    assert batches[1].nbytes == 0 and open_model(plain, threads=1).decoder(1).bytes_for(40, 9) == 0
    whole = tokens(9, 3, 20)
    first, second = (
        open_model(one, threads=1).decoder(1).forward(whole) for one in (cached, plain)
    )
    np.testing.assert_allclose(first, second, atol=1e-5)


def answers(batches: Batches, prompts: list[IntArray], steps: int) -> list[FloatArray]:
    """All logits of each prompt, read together and continued greedily."""
    batch = batches.open_batch()
    logits = [[batch.add(prompt)] for prompt in prompts]
    for _ in range(steps):
        following = batch.step(np.array([row[-1].argmax() for row in logits]))
        for row, last in zip(logits, following, strict=True):
            row.append(last)
    return [np.stack(row) for row in logits]


@pytest.mark.parametrize("family", ["prefix", "translator"])
def test_an_answer_is_bit_for_bit_the_same_whoever_shares_the_batch(
    family: str, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(family)
    batches = model.decoder(1) if family == "prefix" else model.translator(2)
    prompts = [tokens(length, length) for length in (2, 5, 15, 16, 17, 23)]
    together = answers(batches, prompts, 14)
    for prompt, expected in zip(prompts, together, strict=True):
        assert np.array_equal(answers(batches, [prompt], 14)[0], expected)
    backwards = answers(batches, prompts[::-1], 14)[::-1]
    assert all(map(np.array_equal, backwards, together))


def test_a_translation_read_token_by_token_is_the_whole_one(translator: Model) -> None:
    run = translator.translator(2)
    source, target = tokens(1, 1, 21), tokens(2, 1, 24)
    target[0, 0] = 1
    whole = run.forward(source, target)[0]  # (N, V)
    batch = run.open_batch()
    np.testing.assert_allclose(batch.add(source[0]), whole[0], atol=1e-5)
    for position in range(1, 24):
        step = batch.step(target[:, position])
        np.testing.assert_allclose(step[0], whole[position], atol=1e-5)
        followed = run.read(source[0]).follow(target[:, : position + 1])
        assert np.array_equal(followed, step)
    with pytest.raises(WindowFullError, match="has all its 24 positions"):
        batch.step(target[:, 0])
    assert batch.lengths == [24]


def test_padding_of_the_source_changes_nothing(translator: Model) -> None:
    run, source = translator.translator(1), tokens(1, 1, 13)
    padded = np.zeros((1, 20), np.int64)
    padded[:, :13] = source
    target = np.array([[1, 9, 8]])
    np.testing.assert_allclose(run.forward(source, target), run.forward(padded, target), atol=1e-5)


def test_a_batch_of_translations_holds_its_memories(translator: Model) -> None:
    run, width = translator.translator(1), translate_bundle().manifest.shape.width
    batch = run.open_batch()
    assert batch.nbytes == 0 and batch.lengths == []
    for length in (3, 16, 17, 40):
        batch.add(tokens(length, length))
    assert batch.nbytes == (16 + 16 + 32 + 40) * width * 4
    assert run.bytes_for(17) == 32 * width * 4 and run.bytes_for(3, 5) == 5 * 16 * width * 4
    assert run.read(tokens(0, 17)).nbytes == run.bytes_for(17)
    batch.remove(3)
    batch.remove(0)
    assert batch.nbytes == (16 + 32) * width * 4 and batch.lengths == [1, 1]
    for _ in range(2):
        batch.remove(0)
    assert batch.nbytes == 0


def test_rows_stay_as_they_were_when_something_is_refused(prefix: Model, translator: Model) -> None:
    for batch, limit in (
        (prefix.decoder(1).open_batch(), 40),
        (translator.translator(1).open_batch(), 40),
    ):
        batch.add(tokens(1, 5))
        before = batch.lengths
        with pytest.raises(WindowFullError, match=f"of 41 tokens is longer than .*{limit}"):
            batch.add(tokens(1, 41))
        with pytest.raises(ValueError, match="outside the vocabulary"):
            batch.add(np.array([9999]))
        with pytest.raises(ValueError, match="one token for each of 1 rows"):
            batch.step(np.array([3, 4]))
        with pytest.raises(IndexError):
            batch.remove(1)
        assert batch.lengths == before


def test_each_task_has_its_own_runs(prefix: Model, translator: Model) -> None:
    wrong: list[Callable[[int], object]] = [
        prefix.translator,
        prefix.classifier,
        translator.decoder,
    ]
    for run in (*wrong, translator.decoder):
        with pytest.raises(BundleError, match="is a bundle of the task"):
            run(1)


def test_a_translator_that_breaks_its_promise_is_refused(tmp_path: Path) -> None:
    def promise(name: str, **changes: object) -> Bundle:
        bundle = translate_bundle()
        with open_staging(tmp_path / name) as staging:
            restage(bundle, staging)
            manifest = replace(bundle.manifest, **changes)  # type: ignore[arg-type]  # fields of several types
            return seal_bundle(staging, manifest, tmp_path / name)

    manifest = translate_bundle().manifest
    swapped = replace(
        manifest.rungs[0], graph=manifest.rungs[0].encoder or "", encoder=manifest.rungs[0].graph
    )
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "swapped": (dict(rungs=(swapped, manifest.rungs[1])), "steps-1.onnx: has the unknown"),
        "wider": (dict(shape=replace(manifest.shape, width=17)), "has the output memory as"),
        "longer": (dict(input=TextInput(max_tokens=41)), "fails on 41 tokens"),
        "target": (dict(target_max_tokens=41), "fails on"),
    }
    for name, (changes, message) in cases.items():
        with pytest.raises(BundleError) as refusal:
            open_model(promise(name, **changes), threads=1).warm_up()
        assert message in str(refusal.value), refusal.value
