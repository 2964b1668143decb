"""8-bit caches: verified and compared at the export, a quarter of the memory, no byte wasted."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from export.__main__ import main
from export.inspect import describe
from export.int8 import LARGEST
from export.int8_cache import HEADROOM, ROWS, measured_scales
from export.run import ExportRequest, export_run
from serve.bundle import Bundle, BundleError, Precision, open_staging, seal_bundle
from serve.runtime import open_model
from serve.runtime.decoder import OrtDecodeBatch
from tests.fixtures.tiny_runs import tiny_label_run, tiny_text_recipe, tiny_text_run
from train.checkpoint import load_run
from train.data import open_dataset

STEPS = (1, 2, 3)


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text_run(tmp_path_factory.mktemp("text"))


def export(run: Path, target: Path, precision: Precision = "fp32", method: str = "euler") -> Bundle:
    request = ExportRequest(target, STEPS, method, precision=precision, cache="int8")
    return export_run(run, request, say=lambda line: None)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("method", ["euler", "ab2", "heun"])
def test_every_rung_is_verified_and_compared_with_float32(
    text_run: Path, tmp_path: Path, method: str, precision: Precision
) -> None:
    bundle = export(text_run, tmp_path / "b", precision, method)
    manifest = bundle.manifest
    assert (manifest.cache, manifest.precision) == ("kv_int8", precision)
    assert f"  {precision}, 8-bit caches, " in describe(bundle)
    for rung in manifest.rungs:
        assert rung.verified.max_abs_error <= rung.verified.tolerance
        assert rung.against_fp32 is not None and rung.against_fp32.top1_agreement >= 0.98


@pytest.mark.long
def test_decoding_gives_what_reading_does_in_a_quarter_of_the_memory(tmp_path: Path) -> None:
    """Of a head whose bytes are whole pages: one of a width of 64, and of 64 positions."""
    run = tiny_text_run(tmp_path, "model.heads=1", "model.width=64", "model.window=64")
    bundle = export(run, tmp_path / "b")
    floats = export_run(
        run, ExportRequest(tmp_path / "f", STEPS, latency=False), say=lambda line: None
    )
    tokens = torch.randint(1, 30, (3, 24), generator=torch.manual_seed(0)).numpy()
    for steps in STEPS:
        decoder, other = (open_model(one).decoder(steps) for one in (bundle, floats))
        assert 4 * decoder.bytes_for(24, 3) == other.bytes_for(24, 3)
        batch = decoder.open_batch()
        found = [np.stack([batch.add(row[:10]) for row in tokens])]
        found += [batch.step(tokens[:, at].copy()) for at in range(10, 24)]
        assert batch.nbytes == decoder.bytes_for(24, 3)
        whole = decoder.forward(tokens)
        np.testing.assert_allclose(np.stack(found, axis=1), whole[:, 9:], atol=1e-6)
        assert 0 < np.abs(whole - other.forward(tokens)).max() < 0.05


def test_bytes_are_used_from_end_to_end(text_run: Path, tmp_path: Path) -> None:
    """On the rows that were measured some key of each channel is large, and none is cut off."""
    bundle = export(text_run, tmp_path / "b")
    recipe = tiny_text_recipe(text_run.parent)
    (tokens,) = open_dataset(recipe, load_run(text_run)[2]).batch(0, ROWS, seed=0).inputs
    opened = open_model(bundle)
    largest = []
    for steps in STEPS:
        batch = opened.decoder(steps).open_batch()
        assert isinstance(batch, OrtDecodeBatch)
        for row in tokens.numpy()[:, :-1]:
            batch.add(row)
        for step in range(steps):
            arrays = [one for one in batch.caches(step) if isinstance(one, np.ndarray)]
            assert len(arrays) == len(batch.caches(step)), "on the CPU"
            slots = [array[:, :, : tokens.shape[1] - 1] for array in arrays]
            assert all(slot.dtype == np.int8 for slot in slots)
            largest.append([np.abs(slot.astype(int)).max(axis=(0, 2)) for slot in slots])
    most = np.max(largest, axis=0)  # (buffers, H, d)
    used = LARGEST / HEADROOM  # what is left is for tokens that were not measured
    assert used - 1 < most.max() < LARGEST and most.min() > 0.7 * used


def test_scales_are_those_of_each_attention_whatever_the_method(text_run: Path) -> None:
    model, recipe, tokenizer, _ = load_run(text_run)
    dataset = open_dataset(recipe, tokenizer)
    attentions = recipe.model.layers
    euler, heun = (
        measured_scales(model, dataset, [1], method, attentions) for method in ("euler", "heun")
    )
    assert euler.shape[:2] == (attentions, 2)
    assert (heun >= euler).all() and (heun > euler).any()  # heun sees the end of the step too


def test_what_keeps_no_caches_has_none_to_make_smaller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_label_run(tmp_path)
    assert main(["export", str(run), "--out", str(tmp_path / "b"), "--cache", "int8"]) == 2
    said = capsys.readouterr().err
    assert "keeps no keys and values" in said and "leave it out" in said
    assert not (tmp_path / "b").exists()


def test_a_manifest_that_promises_other_caches_is_refused(text_run: Path, tmp_path: Path) -> None:
    bundle = export(text_run, tmp_path / "b")
    rungs = tuple(dataclasses.replace(rung, against_fp32=None) for rung in bundle.manifest.rungs)
    promised = dataclasses.replace(bundle.manifest, cache="kv", rungs=rungs)
    with open_staging(tmp_path / "c") as staging:
        for name in promised.files:
            shutil.copyfile(bundle.folder / name, staging / name)
        made = seal_bundle(staging, promised, tmp_path / "c")
    with pytest.raises(BundleError, match=r"k_0_0 as tensor\(int8\).*instead of tensor\(float\)"):
        open_model(made).decoder(1)
