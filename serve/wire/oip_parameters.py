"""The `parameters` of a request of the Open Inference Protocol: the same fields that /v1 has.

Knows which fields of the two schemas are parameters here; deliberately nothing of tensors.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from serve.bundle import LABELLING, Task
from serve.errors import InvalidField
from serve.wire.body import close_names, explain, shown
from serve.wire.schemas import ClassifyRequest, GenerateRequest

BINARY_OUTPUT = "binary_data_output"
# What the tensors, the path and the requested outputs say here.
_SAID_ELSEWHERE = frozenset({"model", "input", "prompt", "stream", "logprobs"})
CLASSIFY = tuple(
    name
    for name in ClassifyRequest.model_fields
    if name not in _SAID_ELSEWHERE | {"top_k", "trace"}
)
GENERATE = tuple(name for name in GenerateRequest.model_fields if name not in _SAID_ELSEWHERE)
# Of Triton, under another name here.
_OTHER_NAMES = {"timeout": "deadline_ms"}


def parameter_names(task: Task) -> tuple[str, ...]:
    """What `parameters` may hold for a model of this task."""
    own = CLASSIFY if task in LABELLING else GENERATE
    if task == "generate":
        own = tuple(name for name in own if name != "num_beams")
    return (*own, BINARY_OUTPUT)


def classify_request(sent: Mapping[str, Any]) -> ClassifyRequest:
    """What is asked of a classifier; InvalidField naming what is wrong."""
    _check_names(sent, parameter_names("classify"))
    try:
        return ClassifyRequest.model_validate({"input": "-", **_without_format(sent)})
    except ValidationError as error:
        raise explain(error, ClassifyRequest) from None


def generate_request(sent: Mapping[str, Any], task: Task) -> GenerateRequest:
    """What is asked of a model that writes; InvalidField naming what is wrong."""
    _check_names(sent, parameter_names(task))
    try:
        return GenerateRequest.model_validate({"prompt": "-", **_without_format(sent)})
    except ValidationError as error:
        raise explain(error, GenerateRequest) from None


def binary_by_default(sent: Mapping[str, Any]) -> bool:
    """Whether outputs that do not say so themselves are to be sent as bytes."""
    return flag_of(sent, BINARY_OUTPUT, "parameters")


def flag_of(sent: Mapping[str, Any], name: str, where: str, default: bool = False) -> bool:
    """A parameter that is true or false."""
    found = sent.get(name, default)
    if not isinstance(found, bool):
        raise InvalidField(f"{where}.{name} must be true or false", param=name)
    return found


def parameter_schema() -> dict[str, Any]:
    """The documentation of `parameters`: every field as /v1 documents it."""
    classify = ClassifyRequest.model_json_schema()["properties"]
    generate = GenerateRequest.model_json_schema()["properties"]
    documented = {name: classify[name] for name in CLASSIFY} | {
        name: generate[name] for name in GENERATE
    }
    own = {name: _without_null(schema) for name, schema in documented.items()}
    own[BINARY_OUTPUT] = {
        "type": "boolean",
        "default": False,
        "description": "Send outputs as bytes behind the JSON.",
    }
    return {"properties": own, "additionalProperties": False}


def _check_names(sent: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, value in sent.items():
        if name in known:
            if value is None:
                raise InvalidField(f"{name} is null: leave it out", param=name)
            continue
        close = close_names(name, known)
        meant = _OTHER_NAMES.get(name) or (close[0] if close else None)
        hint = f"did you mean {meant}?" if meant else f"there are {', '.join(known)}"
        raise InvalidField(f"unknown parameter {shown(name)!r}: {hint}", param=shown(name))


def _without_format(sent: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sent.items() if name != BINARY_OUTPUT}


def _without_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema for a protocol in which nothing is said by leaving it out."""
    kept = {key: value for key, value in schema.items() if key not in ("default", "anyOf")}
    if schema.get("default") is not None:
        kept["default"] = schema["default"]
    choices: list[dict[str, Any]] = [
        one for one in schema.get("anyOf", ()) if one != {"type": "null"}
    ]
    if len(choices) == 1:
        return kept | choices[0]
    return kept | {"anyOf": choices} if choices else kept
