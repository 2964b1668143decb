"""From run to bundle: every method and norm verified, weights once, never half a bundle."""

import dataclasses
import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from export.__main__ import main
from export.graph import StepGraphs, stitch, stitch_step
from export.latency import calibrate_latency
from export.quality import held_out_batches
from export.run import ExportRequest, export_run
from export.trace import Parts, StepParts
from export.verify import VerificationError
from serve.bundle import Bundle, Manifest, Precision, read_bundle
from serve.runtime import open_model
from serve.runtime.cache import Bytes, MemoryRange, map_adjacent
from serve.runtime.classifier import OrtClassifier
from serve.runtime.protocol import FloatArray, RowArray
from tests.fixtures.tiny_runs import tiny_label_run, tiny_text_run
from train.checkpoint import load_run
from train.data.batch import Batch, Dataset
from train.ode import METHODS

# Logits of these models are of order one; torch and the runtime are both float32.
ABSOLUTE = 2e-5


def export(run: Path, target: Path, *steps: int, method: str | None = None) -> Bundle:
    request = ExportRequest(target, steps or (1, 2, 4), method)
    return export_run(run, request, say=lambda line: None)


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text_run(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def label_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_label_run(tmp_path_factory.mktemp("label"))


@pytest.mark.parametrize("method", METHODS)
def test_every_rung_of_a_decoder_agrees_with_torch(
    text_run: Path, tmp_path: Path, method: str
) -> None:
    bundle = export(text_run, tmp_path / "b", 1, 2, 3, method=method)
    model = load_run(text_run)[0]
    opened = open_model(bundle)
    tokens = torch.randint(1, 30, (3, 24))
    for rung in bundle.manifest.rungs:
        with torch.no_grad():
            expected = model(tokens, steps=rung.steps, method=method).logits.numpy()
        decoder = opened.decoder(rung.steps)
        np.testing.assert_allclose(decoder.forward(tokens.numpy()), expected, atol=ABSOLUTE)
        batch = decoder.open_batch()
        for row, prompt in enumerate((5, 9, 1)):
            first = batch.add(tokens[row, :prompt].numpy())
            np.testing.assert_allclose(first, expected[row, prompt - 1], atol=ABSOLUTE)
        for _ in range(6):
            at = np.array(batch.lengths)
            logits = batch.step(tokens.numpy()[np.arange(3), at])
            np.testing.assert_allclose(logits, expected[np.arange(3), at], atol=ABSOLUTE)
        assert rung.verified.max_abs_error <= rung.verified.tolerance < 1e-3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.long
def test_every_rung_of_a_classifier_agrees_with_torch(
    label_run: Path, tmp_path: Path, method: str
) -> None:
    bundle = export(label_run, tmp_path / "b", 1, 2, 3, method=method)
    model = load_run(label_run)[0]
    opened = open_model(bundle)
    tokens = torch.randint(1, 30, (4, 12))
    tokens[1, 5:] = 0
    tokens[2, 1:] = 0
    for rung in bundle.manifest.rungs:
        with torch.no_grad():
            expected = model(tokens, steps=rung.steps, method=method).logits.numpy()
        logits = opened.classifier(rung.steps).run(tokens.numpy())
        np.testing.assert_allclose(logits, expected, atol=ABSOLUTE)


@pytest.mark.parametrize(
    ("tiny_run", "overrides"),
    [
        (
            tiny_text_run,
            [
                "model.norm=none",
                "model.final_norm=inside",
                "model.T=2.0",
                "data.tokenizer=bpe",
                "data.vocabulary=300",
            ],
        ),
        (
            tiny_label_run,
            ["model.norm=post", "model.final_norm=none", "model.pool=mean", "model.depth=discrete"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value.__name__,
)
def test_norms_depths_and_tokenizers_export_and_verify(
    tmp_path: Path, tiny_run: Callable[..., Path], overrides: list[str]
) -> None:
    bundle = export(tiny_run(tmp_path, *overrides), tmp_path / "b", 1, 2)
    discrete = "model.depth=discrete" in overrides
    assert bundle.manifest.steps == ((1,) if discrete else (1, 2))
    assert bundle.manifest.depth == ("fixed" if discrete else "ode")


def test_weights_stand_once_and_graphs_are_valid(text_run: Path, tmp_path: Path) -> None:
    one = export(text_run, tmp_path / "one", 4)
    four = export(text_run, tmp_path / "four", 1, 2, 4, 8)
    assert four.weights_path.read_bytes() == one.weights_path.read_bytes()
    for rung in four.manifest.rungs:
        onnx.checker.check_model(str(four.graph_path(rung.steps)))
        graph = onnx.load(str(four.graph_path(rung.steps)), load_external_data=False)
        assert [(o.domain, o.version) for o in graph.opset_import] == [("", 21)]
        assert [v.name for v in graph.graph.input] == ["tokens", "keep"]
    step = four.manifest.step
    assert step is not None
    for file in step.graphs.values():
        onnx.checker.check_model(str(four.folder / file))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_rungs_have_plain_operators_only(
    text_run: Path, label_run: Path, tmp_path: Path, precision: Precision
) -> None:
    for run in (text_run, label_run):
        request = ExportRequest(tmp_path / run.parent.name, (1, 4), precision=precision)
        bundle = export_run(run, request, say=lambda line: None)
        for rung in bundle.manifest.rungs:
            graph = onnx.load(str(bundle.graph_path(rung.steps)), load_external_data=False)
            assert {node.domain for node in graph.graph.node} == {""}
            assert (rung.against_fp32 is None) == (precision == "fp32")
            if rung.against_fp32 is not None:
                assert rung.against_fp32.top1_agreement > 0.97
                assert abs(rung.against_fp32.change) < 0.02


def test_two_exports_of_one_run_are_the_same_bytes(text_run: Path, tmp_path: Path) -> None:
    first, second = (export(text_run, tmp_path / name, 1, 2) for name in ("a", "b"))
    names = {path.name for path in first.folder.iterdir()}
    assert names == {path.name for path in second.folder.iterdir()}
    for name in names - {"latency.json"}:
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes(), name


def test_a_wrong_graph_stops_the_export_and_leaves_nothing(
    text_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(parts: Parts, method: str, steps: int) -> onnx.ModelProto:
        T = parts.T * (1.001 if steps == 2 else 1)
        return stitch(dataclasses.replace(parts, T=T), method, steps)

    monkeypatch.setattr("export.graph.stitch", wrong)
    with pytest.raises(VerificationError, match=r"graph of 2 steps \(euler\) is off by"):
        export(text_run, tmp_path / "b", 1, 2)
    assert [p.name for p in tmp_path.iterdir()] == []


def test_a_failure_does_not_wait_for_what_other_rungs_still_measure(
    label_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, taken = 2_000, []

    def batches(dataset: Dataset, draft: Manifest, samples: int | None) -> Iterator[Batch]:
        for batch in islice(cycle(held_out_batches(dataset, draft, samples)), many):
            taken.append(len(batch.targets))
            yield batch

    def wrong(parts: Parts, method: str, steps: int) -> onnx.ModelProto:
        T = parts.T * (1.001 if steps == 2 else 1)
        return stitch(dataclasses.replace(parts, T=T), method, steps)

    monkeypatch.setattr("export.run.held_out_batches", batches)
    monkeypatch.setattr("export.graph.stitch", wrong)
    with pytest.raises(VerificationError, match="graph of 2 steps"):
        export(label_run, tmp_path / "b", 1, 2)
    assert len(taken) < many // 10


@pytest.mark.parametrize("method", ["ab2", "heun"])
def test_a_wrong_step_stops_the_export_too(
    label_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def wrong(parts: Parts, one: StepParts, method: str) -> StepGraphs:
        return stitch_step(parts, one, "euler" if method == "heun" else "midpoint")

    monkeypatch.setattr("export.graph.stitch_step", wrong)
    with pytest.raises(ValueError, match=r"off by .* in single steps|has no input previous"):
        export(label_run, tmp_path / "b", 2, method=method)
    assert [p.name for p in tmp_path.iterdir()] == []


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_rungs_that_disturb_each_other_stop_the_export(
    text_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Precision
) -> None:
    def wrong(parts: Sequence[MemoryRange]) -> Bytes:
        return map_adjacent(parts[::-1])  # the rows of both rungs change places

    monkeypatch.setattr("serve.runtime.mixing.map_adjacent", wrong)
    request = ExportRequest(tmp_path / "b", (1, 2), precision=precision, samples=2)
    with pytest.raises(VerificationError, match=r"steps? answers otherwise when it shares calls"):
        export_run(text_run, request, say=lambda line: None)
    assert [p.name for p in tmp_path.iterdir()] == []


def test_an_answer_that_depends_on_its_batch_stops_the_export(
    label_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OrtClassifier.run

    def wrong(classifier: OrtClassifier, rows: RowArray) -> FloatArray:
        towards = np.float32(np.inf if len(rows) > 1 else -np.inf)
        return np.nextafter(run(classifier, rows), towards)  # the last bit alone

    monkeypatch.setattr(OrtClassifier, "run", wrong)
    with pytest.raises(VerificationError, match=r"in a batch of shape .* otherwise than alone"):
        export(label_run, tmp_path / "b", 1, 2)
    assert [p.name for p in tmp_path.iterdir()] == []


def test_the_manifest_holds_what_was_measured(label_run: Path, tmp_path: Path) -> None:
    bundle = export(label_run, tmp_path / "b", 1, 2, 4)
    m = bundle.manifest
    assert m.labels == ("even", "odd") and m.full_steps == 4
    words = {rung.effort for rung in m.rungs if not rung.dominated}
    assert "max" in words and None not in words
    assert all(rung.effort is None for rung in m.rungs if rung.dominated)
    assert all(rung.quality.samples == 510 for rung in m.rungs)
    assert bundle.latency is not None
    measured = {(e.steps, e.batch) for e in bundle.latency.entries}
    assert measured == {(s, b) for s in (1, 2, 4) for b in (1, 8, 32)}
    card = (bundle.folder / "README.md").read_text()
    assert "even, odd" in card and "| 4 |" in card
    recipe = m.provenance["recipe"]
    assert isinstance(recipe, dict) and recipe["data"]["path"] == ""


def test_the_commands_export_inspect_and_calibrate(
    label_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "b"
    assert main(["export", str(label_run), "--out", str(target), "--steps", "1,2"]) == 0
    assert "next: stepdial serve" in capsys.readouterr().out
    plot = tmp_path / "frontier.png"
    assert main(["inspect", str(target), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "labels: even, odd" in capsys.readouterr().out
    before = json.loads((target / "latency.json").read_text())
    calibrate_latency(target, threads=1)
    after = json.loads((target / "latency.json").read_text())
    assert after["machine"]["threads"] == 1 and len(after["entries"]) == len(before["entries"])
    assert main(["evaluate", str(target), "--steps", "2"]) == 0
    assert f"{read_bundle(target).manifest.rung(2).quality.value:.4f}" in capsys.readouterr().out
    assert main(["evaluate", str(target), "--steps", "3"]) == 2
    assert "does not offer 3 steps" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 2
    assert f"holds some ({target.name}): name one of those" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["inspect", str(tmp_path / "empty")]) == 2
    assert "manifest.json" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    assert "is not a run" in capsys.readouterr().err
    read_bundle(target)


PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")


def test_a_chat_template_goes_into_the_bundle(text_run: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0].content }}", encoding="utf-8")
    for precision in PRECISIONS:  # which has a float32 bundle beside it
        request = ExportRequest(
            tmp_path / precision,
            (1,),
            precision=precision,
            samples=2,
            latency=False,
            chat_template=template,
        )
        path = export_run(text_run, request, say=lambda line: None).chat_template_path
        assert path is not None and path.read_bytes() == template.read_bytes()


def test_without_links_files_are_copied(
    text_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    request = ExportRequest(tmp_path / "b", (1,), precision="int8", samples=2, latency=False)
    read_bundle(export_run(text_run, request, say=lambda line: None).folder)
