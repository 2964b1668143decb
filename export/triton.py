"""A bundle as a model repository for Triton: its files and their configurations."""

import json
import os
import shlex
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper
from tokenizers import Tokenizer

from serve.bundle import (
    Bundle,
    BundleError,
    ImageInput,
    Manifest,
    PointsInput,
    Rung,
    TextInput,
    open_staging,
    steps_in_words,
)
from serve.bundle.folder import link_or_copy
from serve.runtime.protocol import largest_row

# The most rows of one call. Triton splits nothing: a request of more rows is refused.
MAX_BATCH_ROWS = 64
LABELS_FILE = "labels.txt"
WARM_UP = "longest"


class Word(str):
    """A value that is written without quotes: of an enumeration."""


Value = str | int | bool | Mapping[str, "Value"] | Sequence["Value"]
Fields = Mapping[str, Value]


def protobuf_text(fields: Fields, indent: str = "") -> str:
    """A message as text; a list stands for a repeated field."""
    lines = []
    for name, value in fields.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{name} {_message(value, indent)}")
        elif isinstance(value, str | int):
            lines.append(f"{indent}{name}: {_scalar(value)}")
        elif all(isinstance(item, Mapping) for item in value):
            lines += [protobuf_text({name: item}, indent).rstrip("\n") for item in value]
        else:
            items = ", ".join(_scalar(item) for item in value if isinstance(item, str | int))
            lines.append(f"{indent}{name}: [{items}]")
    return "".join(f"{line}\n" for line in lines)


def rung_name(manifest: Manifest, rung: Rung) -> str:
    """The model of a rung, which takes what the graph takes."""
    return f"{manifest.name}-steps-{rung.steps}"


def text_name(manifest: Manifest, rung: Rung) -> str:
    """The pipeline of a rung, which takes texts."""
    return f"{manifest.name}-text-steps-{rung.steps}"


def tokenize_name(manifest: Manifest) -> str:
    """The model that makes tokens of texts."""
    return f"{manifest.name}-tokenize"


def graph_input(manifest: Manifest) -> tuple[str, Word, list[int]]:
    """Name, type and shape of one row of what the graph takes; -1 stands for any size."""
    match manifest.input:
        case ImageInput(channels=channels, height=height, width=width):
            return "pixels", Word("TYPE_FP32"), [channels, height, width]
        case PointsInput(dimensions=dimensions):
            return "points", Word("TYPE_FP32"), [-1, dimensions]
        case _:
            return "tokens", Word("TYPE_INT64"), [-1]


def rung_config(manifest: Manifest, rung: Rung, warm_shape: Sequence[int]) -> str:
    """Of the graph of one rung, which onnxruntime runs; warmed up with one row of this shape."""
    name, kind, dims = graph_input(manifest)
    warm: Fields = {"data_type": kind, "dims": list(warm_shape), "input_data_file": name}
    fields: Fields = {
        "name": rung_name(manifest, rung),
        "platform": "onnxruntime_onnx",
        "max_batch_size": MAX_BATCH_ROWS,
        "input": [{"name": name, "data_type": kind, "dims": dims}],
        "output": [_of_classes("logits", manifest), _of_classes("scores", manifest)],
        **_scheduled("KIND_AUTO"),
        "model_warmup": [_warm_up(name, warm)],
        "parameters": _parameters(_facts(manifest, rung)),
    }
    return protobuf_text(fields)


def tokenize_config(manifest: Manifest) -> str:
    """Of the Python model that makes tokens of texts."""
    warm: Fields = {"data_type": Word("TYPE_STRING"), "dims": [1], "input_data_file": "text"}
    spec, tokenizer = manifest.text_input, manifest.text_tokenizer
    cut = spec.truncation
    head, tail = (spec.max_tokens, 0) if cut is None else (cut.head, cut.tail)
    facts = {
        "kind": tokenizer.kind,
        "pad_id": str(tokenizer.pad_id),
        "special_ids": json.dumps(list(tokenizer.special_ids)),
        "max_tokens": str(spec.max_tokens),
        "head": str(head),
        "tail": str(tail),
    }
    fields: Fields = {
        "name": tokenize_name(manifest),
        "backend": "python",
        "max_batch_size": MAX_BATCH_ROWS,
        "input": [_text_input()],
        "output": [{"name": "tokens", "data_type": Word("TYPE_INT64"), "dims": [-1]}],
        **_scheduled("KIND_CPU"),
        "model_warmup": [_warm_up("text", warm)],
        "parameters": _parameters(facts),
    }
    return protobuf_text(fields)


def ensemble_config(manifest: Manifest, rung: Rung) -> str:
    """Of the pipeline of one rung: texts to tokens to scores."""
    steps = (
        (tokenize_name(manifest), {"text": "text"}, {"tokens": "tokens"}),
        (rung_name(manifest, rung), {"tokens": "tokens"}, {"scores": "scores"}),
    )
    fields: Fields = {
        "name": text_name(manifest, rung),
        "platform": "ensemble",
        "max_batch_size": MAX_BATCH_ROWS,
        "input": [_text_input()],
        "output": [_of_classes("scores", manifest)],
        "version_policy": _LATEST,
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": model,
                    "model_version": -1,
                    "input_map": [{"key": key, "value": name} for key, name in taken.items()],
                    "output_map": [{"key": key, "value": name} for key, name in given.items()],
                }
                for model, taken, given in steps
            ]
        },
        "parameters": _parameters(_facts(manifest, rung)),
    }
    return protobuf_text(fields)


_LATEST: Fields = {"latest": {"num_versions": 1}}


def _scheduled(kind: str) -> Fields:
    """One instance a device, the newest version, and batches of whatever is waiting.

    Preferred sizes are left out: Triton's guide advises them only for engines with a profile for
    each size.
    """
    return {
        "version_policy": _LATEST,
        "instance_group": [{"count": 1, "kind": Word(kind)}],
        "dynamic_batching": {"max_queue_delay_microseconds": 0},
    }


def _text_input() -> Fields:
    return {"name": "text", "data_type": Word("TYPE_STRING"), "dims": [1]}


def _of_classes(name: str, manifest: Manifest) -> Fields:
    return {
        "name": name,
        "data_type": Word("TYPE_FP32"),
        "dims": [len(manifest.labels or ())],
        "label_filename": LABELS_FILE,
    }


def _warm_up(name: str, taken: Fields) -> Fields:
    return {"name": WARM_UP, "batch_size": 1, "inputs": [{"key": name, "value": taken}]}


def _facts(manifest: Manifest, rung: Rung) -> dict[str, str]:
    """What a caller may want to know of a rung; Triton itself makes nothing of it."""
    facts = {
        "steps": str(rung.steps),
        "method": rung.method,
        "nfe": str(rung.nfe),
        rung.quality.metric: str(rung.quality.value),
    }
    if isinstance(manifest.input, ImageInput):
        facts |= {
            "mean": json.dumps(list(manifest.input.mean)),
            "std": json.dumps(list(manifest.input.std)),
        }
    return facts


def _parameters(facts: Mapping[str, str]) -> Sequence[Value]:
    return [{"key": key, "value": {"string_value": text}} for key, text in facts.items()]


def _message(fields: Fields, indent: str) -> str:
    return f"{{\n{protobuf_text(fields, indent + '  ')}{indent}}}"


def _scalar(value: str | int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return (
        json.dumps(value) if isinstance(value, str) and not isinstance(value, Word) else str(value)
    )


# A model repository for the Triton Inference Server, written from a classifier's bundle. One
# model a rung, which takes what the graph takes; and where that is tokens, one model that makes
# tokens of texts and one pipeline a rung.


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
    word = _known_word(bundle)
    _write_warm_up(tokenize, "text", struct.pack("<I", len(word)) + word)
    version = tokenize / _VERSION
    version.mkdir()
    shutil.copyfile(_TOKENIZE, version / "model.py")
    shutil.copyfile(bundle.tokenizer_path, version / "tokenizer.json")
    for rung in manifest.rungs:
        pipeline = folder / text_name(manifest, rung)
        _write(pipeline / "config.pbtxt", ensemble_config(manifest, rung))
        _write_labels(pipeline, manifest)
        # Triton asks for this folder. Empty ones are lost in git and in stores of objects.
        _write(pipeline / _VERSION / "README", "A pipeline has no files of its own.\n")


def _with_scores(bundle: Bundle, rung: Rung) -> onnx.ModelProto:
    """The graph of a rung, which also gives the scores that its logits mean."""
    model = onnx.load(bundle.graph_path(rung.steps), load_external_data=False)
    classes = len(bundle.manifest.labels or ())
    only = [output for output in model.graph.output if output.name == "logits"]
    del model.graph.output[:]
    model.graph.output.extend(only)
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
    link_or_copy(placed, path)
    return placed


def _known_word(bundle: Bundle) -> bytes:
    """A text that the tokenizer reads: Triton loads no model whose warm-up fails."""
    if bundle.manifest.text_tokenizer.kind != "chars":
        return b"a"
    vocab = Tokenizer.from_file(str(bundle.tokenizer_path)).get_vocab()
    return min(token for token in vocab if len(token) == 1).encode()


def _write_labels(model: Path, manifest: Manifest) -> None:
    _write(model / LABELS_FILE, "".join(f"{label}\n" for label in manifest.labels or ()))


def _write_warm_up(model: Path, name: str, data: bytes) -> None:
    folder = model / "warmup"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(data)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
