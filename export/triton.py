"""A model repository for the Triton Inference Server, written from a classifier's bundle.

One model a rung, which takes what the graph takes; and where that is tokens, one model that makes
tokens of texts and one pipeline a rung. Knows Triton's folders; what is in a configuration is
told by export.triton_config.
"""

import os
import shlex
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from export.triton_config import (
    LABELS_FILE,
    ensemble_config,
    graph_input,
    rung_config,
    rung_name,
    text_name,
    tokenize_config,
    tokenize_name,
)
from serve.bundle import (
    Bundle,
    BundleError,
    Manifest,
    Rung,
    TextInput,
    open_staging,
    steps_in_words,
)
from serve.runtime.warm_rows import largest_row

_VERSION = "1"
_TOKENIZE = Path(__file__).with_name("triton_tokenize.py")


def write_repository(bundle: Bundle, target: Path, say: Callable[[str], None] = print) -> None:
    """Write the repository; it is there whole or not at all. `target` must not exist yet."""
    manifest = bundle.manifest
    if manifest.task == "tag":
        raise BundleError(
            f"{manifest.name} labels positions, but a Triton repository is for classifiers: serve "
            "this one with stepdial serve"
        )
    check_repository(manifest.name, manifest.labels, target)
    with open_staging(target) as staging:
        _fill(bundle, staging)
        os.rename(staging, os.path.realpath(target))
    for rung in manifest.rungs:
        taken = text_name(manifest, rung) if _reads_text(manifest) else rung_name(manifest, rung)
        quality = f"{rung.quality.metric} {rung.quality.value:.4g}"
        say(f"{taken}: {steps_in_words(rung.steps)}, {quality}")
    needs = " (its Python needs: pip install tokenizers)" if _reads_text(manifest) else ""
    say(f"next: tritonserver --model-repository={shlex.quote(str(target))}{needs}")


def check_repository(name: str, labels: Sequence[str] | None, target: Path) -> None:
    """BundleError unless a model of that name and these classes can be written there."""
    if labels is None:
        raise BundleError(
            f"{name} writes text, but a Triton repository is for classifiers: serve this one with "
            "stepdial serve, which keeps its caches"
        )
    if any(len(label.splitlines()) != 1 for label in labels):
        raise BundleError(
            f"{name} has a label of several lines, which a Triton label file cannot hold: train "
            "with data.labels set to names of one line"
        )
    if os.path.lexists(target):
        raise BundleError("exists: remove it, or name another folder", file=str(target))


def _reads_text(manifest: Manifest) -> bool:
    return isinstance(manifest.input, TextInput)


def _fill(bundle: Bundle, folder: Path) -> None:
    manifest = bundle.manifest
    row = largest_row(manifest)
    weights: Path | None = None
    for rung in manifest.rungs:
        model = folder / rung_name(manifest, rung)
        _write(model / "config.pbtxt", rung_config(manifest, rung, row.shape))
        _write_labels(model, manifest)
        _write_warm_up(model, graph_input(manifest)[0], row.tobytes())
        # The folder that Triton wants of a model of several files.
        files = model / _VERSION / "model.onnx"
        files.mkdir(parents=True)
        onnx.save(_with_scores(bundle, rung), files / "model.onnx")
        weights = _place_weights(bundle, files, weights)
    if _reads_text(manifest):
        _fill_text(bundle, folder)


def _fill_text(bundle: Bundle, folder: Path) -> None:
    manifest = bundle.manifest
    tokenize = folder / tokenize_name(manifest)
    _write(tokenize / "config.pbtxt", tokenize_config(manifest))
    word = _some_text(bundle)
    _write_warm_up(tokenize, "text", struct.pack("<I", len(word)) + word)
    version = tokenize / _VERSION
    version.mkdir()
    shutil.copyfile(_TOKENIZE, version / "model.py")
    shutil.copyfile(bundle.tokenizer_path, version / "tokenizer.json")
    for rung in manifest.rungs:
        pipeline = folder / text_name(manifest, rung)
        _write(pipeline / "config.pbtxt", ensemble_config(manifest, rung))
        _write_labels(pipeline, manifest)
        (pipeline / _VERSION).mkdir()


def _with_scores(bundle: Bundle, rung: Rung) -> onnx.ModelProto:
    """The graph of a rung, which also gives the scores that its logits mean."""
    model = onnx.load(bundle.graph_path(rung.steps), load_external_data=False)
    classes = len(bundle.manifest.labels or ())
    model.graph.node.append(helper.make_node("Softmax", ["logits"], ["scores"], axis=-1))
    model.graph.output.append(
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", classes])
    )
    return model


def _place_weights(bundle: Bundle, folder: Path, placed: Path | None) -> Path:
    """Every model has the weights beside its graph; on disk they are one file."""
    path = folder / bundle.manifest.weights
    if placed is None:
        shutil.copyfile(bundle.weights_path, path)
        return path
    try:
        os.link(placed, path)
    except OSError:  # this file system has no links
        shutil.copyfile(placed, path)
    return placed


def _some_text(bundle: Bundle) -> bytes:
    """A text that the tokenizer of any bundle reads."""
    examples = bundle.manifest.card.get("examples")
    text = examples[0] if isinstance(examples, list) and examples else "a"
    return str(text).encode()


def _write_labels(model: Path, manifest: Manifest) -> None:
    _write(model / LABELS_FILE, "".join(f"{label}\n" for label in manifest.labels or ()))


def _write_warm_up(model: Path, name: str, data: bytes) -> None:
    folder = model / "warmup"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(data)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
