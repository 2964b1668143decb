"""A Triton repository: what Triton's schema and guide ask for, and answers that are ours."""

import importlib.util
import json
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from google.protobuf import text_format

from export.tensorrt import sample_rows
from export.triton import write_repository
from serve.bundle import Bundle, BundleError, ImageInput, TokenizerSpec, read_bundle
from serve.engine.classify import softmax
from serve.errors import Unprocessable
from serve.inputs.text import TextCodec
from serve.runtime import open_model
from tests.fixtures.tiny_bundles import TRUNCATION, build_classify, build_generate
from tests.fixtures.tiny_families import build_image, build_points
from tests.triton_schema import parse_config
from train.data.text import train_tokenizer

KINDS: dict[str, Callable[[Path], Bundle]] = {
    "tokens": build_classify,
    "pixels": build_image,
    "points": build_points,
}
TEXTS = (
    "a good film",
    "a bad one, and <pad> is five characters",
    "no truncation " * 3,
    "the story was thin, the acting was thick, and nobody laughed. " * 20,
    "\N{SNOWMAN} caf\N{LATIN SMALL LETTER E WITH ACUTE} \x00 \u200b",
)


def write(bundle: Bundle, folder: Path) -> list[str]:
    said: list[str] = []
    write_repository(bundle, folder, said.append)
    return said


def configs(folder: Path) -> dict[str, Any]:
    return {
        path.parent.name: parse_config(path.read_text()) for path in folder.glob("*/config.pbtxt")
    }


@pytest.mark.parametrize("name", KINDS)
def test_every_rung_is_a_model_that_answers_as_the_bundle_does(tmp_path: Path, name: str) -> None:
    bundle = KINDS[name](tmp_path / "bundle")
    folder = tmp_path / "repository"
    write(bundle, folder)
    found = configs(folder)
    manifest = bundle.manifest
    reference = open_model(bundle)
    for rung in manifest.rungs:
        model = f"{manifest.name}-steps-{rung.steps}"
        config = found[model]
        assert config.name == model and config.platform == "onnxruntime_onnx"
        assert config.version_policy.latest.num_versions == 1
        assert config.dynamic_batching.IsInitialized() and config.instance_group[0].count == 1
        assert (folder / model / "labels.txt").read_text().splitlines() == list(
            manifest.labels or ()
        )
        graph = folder / model / "1" / "model.onnx" / "model.onnx"
        session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
        # What the configuration says is what the graph has.
        (taken,) = config.input
        (node,) = session.get_inputs()
        assert taken.name == node.name == name
        sides = [side if isinstance(side, int) else -1 for side in node.shape[1:]]
        assert list(taken.dims) == sides
        assert {one.name: list(one.dims) for one in config.output} == {
            one.name: one.shape[1:] for one in session.get_outputs()
        }
        for rows in sample_rows(manifest, np.random.default_rng(0)):
            logits, scores = session.run(["logits", "scores"], {name: rows})
            np.testing.assert_allclose(
                logits, reference.classifier(rung.steps).run(rows), atol=1e-5
            )
            for row, wanted in zip(scores, logits, strict=True):
                np.testing.assert_allclose(row, softmax(wanted), atol=1e-6)
        (warm,) = config.model_warmup
        (entry,) = warm.inputs
        data = (folder / model / "warmup" / entry.value.input_data_file).read_bytes()
        kind = np.int64 if name == "tokens" else np.float32
        row = np.frombuffer(data, kind).reshape(entry.value.dims)
        assert np.isfinite(reference.classifier(rung.steps).run(row[None])).all()


def test_weights_lie_beside_every_graph_and_once_on_disk(tmp_path: Path) -> None:
    bundle = build_classify(tmp_path / "bundle")
    write(bundle, tmp_path / "repository")
    weights = sorted((tmp_path / "repository").rglob("weights.bin"))
    assert len(weights) == len(bundle.manifest.rungs)
    assert len({path.stat().st_ino for path in weights}) == 1
    assert weights[0].stat().st_ino != bundle.weights_path.stat().st_ino
    assert not any(path.is_symlink() for path in (tmp_path / "repository").rglob("*"))


def test_a_pipeline_joins_the_tokenizer_to_its_rung(tmp_path: Path) -> None:
    bundle = build_classify(tmp_path / "bundle")
    said = write(bundle, tmp_path / "repository")
    assert said[-1].startswith("next: tritonserver --model-repository=")
    found = configs(tmp_path / "repository")
    name, steps = bundle.manifest.name, bundle.manifest.steps
    assert set(found) == {f"{name}-tokenize"} | {
        f"{name}-{kind}{count}" for kind in ("steps-", "text-steps-") for count in steps
    }
    for count in steps:
        pipeline = found[f"{name}-text-steps-{count}"]
        assert pipeline.platform == "ensemble"
        folder = tmp_path / "repository" / pipeline.name
        assert (folder / "labels.txt").is_file()
        assert any((folder / "1").iterdir()), "git and object stores keep no empty folder"
        known = {tensor.name for tensor in pipeline.input}
        for step in pipeline.ensemble_scheduling.step:
            inner = found[step.model_name]
            assert {one.key for one in step.input_map} == {one.name for one in inner.input}
            assert {one.key for one in step.output_map} <= {one.name for one in inner.output}
            assert {one.value for one in step.input_map} <= known
            known |= {one.value for one in step.output_map}
        assert {one.name for one in pipeline.output} <= known


def fake_utils() -> ModuleType:
    """The part of triton_python_backend_utils that the tokenising model uses."""

    class Tensor:
        def __init__(self, name: str, array: Any) -> None:
            self.name, self.array = name, array

        def as_numpy(self) -> Any:
            return self.array

    class InferenceResponse:
        def __init__(self, output_tensors: list[Tensor], error: str | None = None) -> None:
            self.tensors, self.error = output_tensors, error

    made = ModuleType("triton_python_backend_utils")
    made.__dict__.update(
        Tensor=Tensor,
        InferenceResponse=InferenceResponse,
        TritonError=str,
        get_input_tensor_by_name=lambda request, name: request[name],
    )
    return made


def tokenizing_model(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model.py of a repository, started as Triton's Python backend starts it."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_utils())
    (folder,) = repository.glob("*-tokenize")
    spec = importlib.util.spec_from_file_location("model", folder / "1" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config: Any = parse_config((folder / "config.pbtxt").read_text())
    parameters = {
        entry.key: {"string_value": entry.value.string_value} for entry in config.parameters
    }
    model = module.TritonPythonModel()
    model.initialize(
        {
            "model_config": json.dumps({"parameters": parameters}),
            "model_repository": str(folder),
            "model_version": "1",
        }
    )
    return model


def ask(model: Any, *texts: str) -> Any:
    (response,) = model.execute([request_of(*texts)])
    return response


def request_of(*texts: str) -> dict[str, Any]:
    utils = sys.modules["triton_python_backend_utils"]
    return {"text": utils.Tensor("text", np.array([[one.encode()] for one in texts], dtype=object))}


@pytest.mark.parametrize("truncated", [True, False])
def test_the_tokenizing_model_makes_the_tokens_that_the_server_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truncated: bool
) -> None:
    truncation = TRUNCATION if truncated else None
    bundle = build_classify(tmp_path / "bundle", truncation=truncation)
    write(bundle, tmp_path / "repository")
    model, codec = tokenizing_model(tmp_path / "repository", monkeypatch), TextCodec(bundle)
    wanted = [codec.encode_input(text, truncate=True).tokens for text in TEXTS]
    (tensor,) = ask(model, *TEXTS).tensors
    assert tensor.name == "tokens" and tensor.array.dtype == np.int64
    length = tensor.array.shape[1]
    assert length == bundle.manifest.text_input.max_tokens, "a text was too long, and cut"
    pad_id = bundle.manifest.text_tokenizer.pad_id
    for row, tokens in zip(tensor.array.tolist(), wanted, strict=True):
        assert row == tokens + [pad_id] * (length - len(tokens))
    # Short texts are padded to a length that others share, so that Triton can batch them.
    (short,) = ask(model, TEXTS[0]).tensors
    assert short.array.shape == (1, 16)
    assert "empty" in ask(model, "fine", "").error
    # Triton hands over what waits together; each request gets an answer of its own.
    one, wrong, other = model.execute(list(map(request_of, (TEXTS[0], "", TEXTS[1]))))
    assert "empty" in wrong.error and one.error is other.error is None
    for response, tokens in ((one, wanted[0]), (other, wanted[1])):
        assert response.tensors[0].array[0, : len(tokens)].tolist() == tokens


def test_a_tokenizer_of_characters_names_the_one_that_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    write(build_classify(tmp_path / "bundle"), repository)
    decoder = build_generate(tmp_path / "decoder", steps=(1,), max_tokens=48)
    (folder,) = repository.glob("*-tokenize")
    (folder / "1" / "tokenizer.json").write_bytes(decoder.tokenizer_path.read_bytes())
    config = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(config.replace('"bpe"', '"chars"'))
    model = tokenizing_model(repository, monkeypatch)
    assert "'\N{SNOWMAN}'" in ask(model, "a \N{SNOWMAN}").error
    with pytest.raises(Unprocessable, match="\N{SNOWMAN}"):
        TextCodec(decoder).encode_prompt("a \N{SNOWMAN}")
    (tensor,) = ask(model, "To be").tensors
    assert tensor.array[0, :5].tolist() == TextCodec(decoder).encode_prompt("To be")


def test_a_warm_up_text_is_written_as_triton_reads_it(tmp_path: Path) -> None:
    write(build_classify(tmp_path / "bundle"), tmp_path / "repository")
    (path,) = (tmp_path / "repository").glob("*-tokenize/warmup/text")
    data = path.read_bytes()
    assert struct.unpack("<I", data[:4])[0] == len(data) - 4 > 0


def test_a_warm_up_text_has_only_characters_that_the_tokenizer_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = build_classify(tmp_path / "bundle")
    train_tokenizer(["GATTACA"], "chars").save(str(bundle.tokenizer_path))
    spec = TokenizerSpec("chars", "tokenizer.json", pad_id=0, vocab_size=5)
    manifest = replace(bundle.manifest, tokenizer=spec)
    for card in ({}, {"examples": [""]}, {"examples": ["gene"]}):
        repository = tmp_path / f"repository-{len(str(card))}"
        write(replace(bundle, manifest=replace(manifest, card=card)), repository)
        (path,) = repository.glob("*-tokenize/warmup/text")
        model = tokenizing_model(repository, monkeypatch)
        assert ask(model, path.read_bytes()[4:].decode()).error is None


def test_an_image_model_says_how_its_pixels_are_normalised(tmp_path: Path) -> None:
    bundle = build_image(tmp_path / "bundle", channels=3)
    write(bundle, tmp_path / "repository")
    config = configs(tmp_path / "repository")["tiny-image-steps-1"]
    facts = {entry.key: entry.value.string_value for entry in config.parameters}
    assert isinstance(bundle.manifest.input, ImageInput)
    assert json.loads(facts["mean"]) == list(bundle.manifest.input.mean)
    assert facts["steps"] == facts["nfe"] == "1"


def test_what_is_no_classifier_or_in_the_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="for classifiers: serve this one with stepdial serve"):
        write(build_generate(tmp_path / "decoder", steps=(1,)), tmp_path / "repository")
    bundle = build_image(tmp_path / "bundle")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BundleError, match="exists: remove it"):
        write(bundle, tmp_path / "file")
    with pytest.raises(BundleError, match="label of several lines"):
        write(build_classify(tmp_path / "odd", labels=("a\nb", "c")), tmp_path / "repository")
    assert {path.name for path in tmp_path.iterdir()} == {"decoder", "bundle", "file", "odd"}
    assert read_bundle(bundle.folder).manifest == bundle.manifest


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ('nam: "x"', "nam"),
        ("max_batch_size: big", "big"),
        ("input { dims: -1 kind: KIND_CPU }", "kind"),
    ],
)
def test_the_schema_refuses_what_triton_would(wrong: str, reason: str) -> None:
    with pytest.raises(text_format.ParseError, match=reason):
        parse_config(wrong)
