"""The configurations of a Triton model repository, as protobuf text.

Knows the fields of Triton's model_config.proto that a classifier needs; neither files nor graphs.
"""

import json
from collections.abc import Mapping, Sequence

from serve.bundle import ImageInput, Manifest, PointsInput, Rung

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
