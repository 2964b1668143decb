"""KServe's Open Inference Protocol: /v2, with tensors in JSON or as bytes."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, RootModel, ValidationError
from pydantic.config import JsonDict
from pydantic_core import ErrorDetails, to_json
from starlette.requests import Request
from starlette.responses import Response

from serve.api.body import (
    METRIC,
    Answer,
    BodyT,
    Budget,
    ClassifyRequest,
    ComputeMs,
    GenerateRequest,
    QueueMs,
    Reader,
    Timing,
    budget_of,
    check_query,
    checked_json,
    describe_problem,
    read_body,
    server_timing,
    shown,
    validated,
    whole,
)
from serve.api.models import check_ready
from serve.api.submission import (
    RUN_PROBLEMS,
    Submission,
    answer,
    problems,
    ranked,
    takes,
    token_labels,
)
from serve.budget import Reason, efforts_of
from serve.bundle import (
    LABELLING,
    ImageInput,
    Manifest,
    Method,
    Metric,
    PointsInput,
    Task,
    TextInput,
)
from serve.catalog import Served
from serve.engine.engine import Engine
from serve.engine.job import ClassifiedEvent, Span, Tags
from serve.errors import BadRequest, InvalidField, NotReady, ServeError, UnknownModel, Unprocessable
from serve.exchange import Exchange, Route, ThisExchange
from serve.inputs.images import check_finite, number_rows
from serve.inputs.rows import Input, InputRow, cloud_rows, image_rows, read_items
from stepdial import nearest

# Tensors in JSON and as bytes. Bytes are little-endian; an element of BYTES is its length in 4
# bytes, then UTF-8.


Numbers = npt.NDArray[np.float64]
WIDTHS: dict[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"),
    "INT32": np.dtype("<i4"),
    "UINT8": np.dtype("u1"),
}

_LENGTH = struct.Struct("<I")


def texts_of_json(data: list[Any], shape: Sequence[int], where: str) -> list[str]:
    """The elements of a BYTES tensor in JSON."""
    flat = _flat(data, shape, where)
    for index, element in enumerate(flat):
        if not isinstance(element, str):
            raise InvalidField(f"{where}.data[{index}] is no string: BYTES takes strings")
    return flat


def texts_of_bytes(raw: memoryview, shape: Sequence[int], where: str) -> list[str]:
    """The elements of a BYTES tensor in bytes, exactly as many as the shape says."""
    count, at, texts = math.prod(shape), 0, []
    for index in range(count):
        if at + _LENGTH.size > len(raw):
            raise InvalidField(
                f"{where} has {index} whole elements in its {len(raw)} bytes, but its shape has "
                f"{count}: send the length of each in 4 bytes, then the element"
            )
        (length,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        if length > len(raw) - at:
            raise InvalidField(
                f"{where}, element {index}, is said to have {length} bytes, but {len(raw) - at} "
                "are left: send its length as 4 little-endian bytes"
            )
        texts.append(_text(raw[at : at + length], f"{where}, element {index},"))
        at += length
    if at != len(raw):
        raise InvalidField(
            f"{where} has {len(raw) - at} bytes behind its {count} elements: leave them out, or "
            "send the shape that they have"
        )
    return texts


def numbers_of_json(data: list[Any], datatype: str, shape: Sequence[int], where: str) -> Numbers:
    """The elements of a numeric tensor in JSON, in its shape."""
    array, _ = number_rows([_flat(data, shape, where)], f"{where}.data")
    if datatype == "UINT8" and ((array % 1).any() or array.min() < 0 or array.max() > 255):
        raise InvalidField(f"{where}.data is UINT8: send integers from 0 to 255")
    return array.reshape(shape)


def numbers_of_bytes(raw: memoryview, datatype: str, shape: Sequence[int], where: str) -> Numbers:
    """The elements of a numeric tensor in bytes, in its shape."""
    width = WIDTHS[datatype]
    wanted = math.prod(shape) * width.itemsize
    if len(raw) != wanted:
        raise InvalidField(
            f"{where} has {len(raw)} bytes, but {datatype} of shape {list(shape)} has {wanted}: "
            "send exactly these"
        )
    array = np.frombuffer(raw, dtype=width).astype(np.float64)
    check_finite(array, where)
    return array.reshape(shape)


def bytes_of(values: Sequence[str] | Sequence[float] | Sequence[int], datatype: str) -> bytes:
    """The elements of an output, as bytes."""
    if datatype == "BYTES":
        encoded = [str(value).encode() for value in values]
        return b"".join([_LENGTH.pack(len(one)) + one for one in encoded])
    return np.asarray(values, dtype=WIDTHS[datatype]).tobytes()


def _text(raw: memoryview, where: str) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidField(
            f"{where} is no UTF-8 at byte {error.start} ({error.reason}): encode texts as UTF-8"
        ) from None


def _flat(data: list[Any], shape: Sequence[int], where: str) -> list[Any]:
    """The elements in row-major order, from a flat or a nested list."""
    count = math.prod(shape)
    if len(data) == count and not isinstance(data[0], list):
        return data
    level = [data]
    for size in shape:
        if any(not isinstance(row, list) or len(row) != size for row in level):
            raise InvalidField(
                f"{where}.data does not have the shape {list(shape)}: send {count} elements, flat "
                "or nested like the shape"
            )
        level = [element for row in level for element in row]
    return level


# The `parameters` of a request: the same fields as in /v1.


BINARY_OUTPUT = "binary_data_output"
# Fields that the tensors, the path and the requested outputs replace.
_SAID_ELSEWHERE = frozenset({"model", "input", "prompt", "stream", "logprobs"})
CLASSIFY = tuple(
    name
    for name in ClassifyRequest.model_fields
    if name not in _SAID_ELSEWHERE | {"top_k", "trace"}
)
GENERATE = tuple(name for name in GenerateRequest.model_fields if name not in _SAID_ELSEWHERE)
PARAMETERS = {*CLASSIFY, *GENERATE, BINARY_OUTPUT}
# Triton's names for fields of ours.
_OTHER_NAMES = {"timeout": "deadline_ms"}


def parameter_names(task: Task) -> tuple[str, ...]:
    """The names that `parameters` may have for a model of this task."""
    own = CLASSIFY if task in LABELLING else GENERATE
    if task == "generate":
        own = tuple(name for name in own if name != "num_beams")
    return (*own, BINARY_OUTPUT)


def request_of(
    schema: type[BodyT], text_field: str, parameters: Mapping[str, Any], task: Task
) -> BodyT:
    """The parameters as a request to /v1, with any text; InvalidField names what is wrong."""
    _check_names(parameters, parameter_names(task))
    given = {name: value for name, value in parameters.items() if name != BINARY_OUTPUT}
    return validated(schema, {text_field: "-", **given})


def flag_of(parameters: Mapping[str, Any], name: str, where: str, default: bool = False) -> bool:
    """A parameter that must be true or false."""
    found = parameters.get(name, default)
    if not isinstance(found, bool):
        raise InvalidField(f"{where}.{name} must be true or false", param=name)
    return found


def parameter_schema() -> dict[str, Any]:
    """The schema of `parameters`: every field as /v1 documents it."""
    classify = ClassifyRequest.model_json_schema()["properties"]
    generate = GenerateRequest.model_json_schema()["properties"]
    documented = {name: classify[name] for name in CLASSIFY} | {
        name: generate[name] for name in GENERATE
    }
    own = {name: _without_null(schema) for name, schema in documented.items()}
    own[BINARY_OUTPUT] = {
        "type": "boolean",
        "default": False,
        "description": "Send outputs as bytes after the JSON.",
    }
    return {"properties": own, "additionalProperties": False}


def _check_names(parameters: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, value in parameters.items():
        if name in known:
            if value is None:
                raise InvalidField(f"{name} is null: leave it out", param=name)
            continue
        meant = _OTHER_NAMES.get(name) or nearest(name, known)
        hint = f"did you mean {meant}?" if meant else f"there are {', '.join(known)}"
        raise InvalidField(f"unknown parameter {shown(name)!r}: {hint}", param=shown(name))


def _without_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without null: in this protocol a field is left out instead."""
    kept = {key: value for key, value in schema.items() if key not in ("default", "anyOf")}
    if schema.get("default") is not None:
        kept["default"] = schema["default"]
    choices: list[dict[str, Any]] = [
        one for one in schema.get("anyOf", ()) if one != {"type": "null"}
    ]
    if len(choices) == 1:
        return kept | choices[0]
    return kept | {"anyOf": choices} if choices else kept


# Request and response fields.


VERSION = "1"
# Larger requests are refused at once; no model takes or returns that many.
MAX_TENSORS = 16
MAX_AXES = 8
MAX_MEMBERS = 64
Datatype = Literal["BYTES", "BOOL", "FP32", "INT32", "UINT8"]

_EXAMPLES: list[JsonDict] = [
    {
        "inputs": [
            {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["A film that stays."]}
        ],
        "parameters": {"steps": 2},
    },
    {
        "id": "42",
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["ROMEO:"]}],
        "outputs": [{"name": "text"}, {"name": "steps"}],
        "parameters": {"effort": "low", "max_tokens": 16, "seed": 7},
    },
]


class _RequestPart(BaseModel):
    """A part of a request. Null is not allowed in this protocol, so no field takes it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class InputTensor(_RequestPart):
    """An input tensor."""

    name: str = Field(description="`text`, `image` or `points`, as the model's metadata says.")
    datatype: str = Field(
        description="`BYTES` for texts, `FP32` or `UINT8` for images, `FP32` for points."
    )
    shape: list[Annotated[int, BeforeValidator(whole)]] = Field(
        max_length=MAX_AXES,
        description="Shape, rows first: [rows] for texts, [rows, channels, height, width] for "
        "images, [rows, points, dimensions] for points.",
    )
    parameters: dict[str, Any] = Field(
        {},
        max_length=MAX_MEMBERS,
        description="`binary_data_size`: size in bytes of this tensor after the JSON, instead "
        "of `data`.",
    )
    data: list[Any] = Field(
        [],
        description="The elements in row-major order, flat or nested like the shape: strings "
        "for BYTES, else numbers. Left out if the tensor is sent as bytes.",
    )


class RequestedOutput(_RequestPart):
    """An output to return."""

    name: str = Field(description="Name of an output in the model's metadata.")
    parameters: dict[str, Any] = Field(
        {},
        max_length=MAX_MEMBERS,
        description="`binary_data`: send this output as bytes after the JSON.",
    )


class InferRequest(_RequestPart):
    """Tensors to run the model on."""

    model_config = ConfigDict(json_schema_extra={"examples": [*_EXAMPLES]})

    id: str = Field("", description="Id of the request; the answer repeats it.")
    model_name: str | None = Field(
        None, description="As KServe's client repeats it: the model of the path, or left out."
    )
    model_version: str | None = Field(None, description="Accepted and ignored, as `model_name`.")
    parameters: dict[str, Any] = Field(
        {},
        description="The budget fields, the options of generation, and `binary_data_output`.",
        json_schema_extra=parameter_schema(),
    )
    inputs: list[InputTensor] = Field(
        min_length=1,
        max_length=MAX_TENSORS,
        description="The model's one input tensor. Each row gets an answer.",
    )
    outputs: list[RequestedOutput] = Field(
        [],
        max_length=MAX_TENSORS,
        description="Outputs to return, in this order; default: all.",
    )


class TensorMetadata(Answer):
    """An input or output tensor of a model."""

    name: str = Field(description="Name.")
    datatype: Datatype = Field(description="Type of the elements.")
    shape: list[int] = Field(description="Shape, rows first; -1 means any size.")


class ModelParameters(Answer):
    """The step counts of a model, and the parameters that a request may set."""

    task: Task = Field(description="Task of the model.")
    steps: list[int] = Field(description="Possible values of `steps`.")
    efforts: dict[str, int] = Field(description="The step count that each word of `effort` means.")
    default_steps: int = Field(description="Step count of a request without budget parameters.")
    full_steps: int = Field(description="Largest step count.")
    max_disagreement: list[float] = Field(
        description="Values of `max_disagreement` at which answers can stop early."
    )
    labels: list[str] | None = Field(
        None, exclude_if=lambda labels: labels is None, description="Labels, for a classifier."
    )
    request: list[str] = Field(description="Names that `parameters` of a request may have.")


class ModelMetadata(Answer):
    """A model, with its tensors and parameters."""

    name: str = Field(description="Name.")
    versions: list[str] = Field(description="Versions that are served: always one.")
    platform: str = Field(description="Platform that runs the model.")
    inputs: list[TensorMetadata] = Field(description="Input tensor.")
    outputs: list[TensorMetadata] = Field(description="Output tensors.")
    parameters: ModelParameters = Field(
        description="The step counts, and the parameters that a request may set."
    )


class ServerMetadata(Answer):
    """This server."""

    name: str = Field(description="Always `stepdial`.")
    version: str = Field(description="Version of the server.")
    extensions: list[str] = Field(description="Protocol extensions that the server supports.")


class ServerLive(Answer):
    """The process is alive. If not, the answer is an error."""

    live: bool = Field(description="Always true.")


class ServerReady(Answer):
    """The server takes requests. If not, the answer is an error."""

    ready: bool = Field(description="Always true.")


class ModelReady(Answer):
    """The model takes requests. If not, the answer is an error."""

    name: str = Field(description="Name.")
    ready: bool = Field(description="Always true.")


class RepositoryEntry(Answer):
    """A model in the index."""

    name: str = Field(description="Name.")
    version: str = Field(description="Version that is served.")
    state: Literal["READY", "UNAVAILABLE"] = Field(description="Whether the model takes requests.")
    reason: str = Field(description="Why it does not take requests; empty if it does.")


class IndexRequest(_RequestPart):
    """Which models to list."""

    ready: bool = Field(False, description="List only models that take requests.")


class OutputParameters(Answer):
    """Size of a tensor that is sent as bytes."""

    binary_data_size: int = Field(description="Size in bytes of this tensor after the JSON.")


class OutputTensor(Answer):
    """An output tensor."""

    name: str = Field(description="Name.")
    datatype: Datatype = Field(description="Type of the elements.")
    shape: list[int] = Field(description="[rows].")
    parameters: OutputParameters | None = Field(
        None,
        description="Size of the tensor, if it is sent as bytes.",
    )
    data: list[str] | list[float] | list[int] | None = Field(
        None,
        description="One element per row, if the tensor is sent in JSON.",
    )


class InferFacts(Answer):
    """The work that was done, for all rows together."""

    reason: Reason = Field(
        description="Why this step count; if rows differ, the reason of the "
        "row with the fewest steps."
    )
    method: Method = Field(description="Integration method of a step.")
    full_steps: int = Field(description="The model's largest step count.")
    metric: Metric = Field(description=METRIC)
    expected: float = Field(description="Measured quality at the fewest steps of any row.")
    expected_full: float = Field(description="Measured quality at the full step count.")
    max_disagreement: float | None = Field(
        None,
        description="Certified level that was applied to early answers, if any could stop early.",
    )
    truncated: int | None = Field(
        None,
        description="Number of texts that were cut to fit the model, for a classifier.",
    )
    seed: int | None = Field(
        None,
        description="Seed of the first row that was generated. Each further row uses the next "
        "seed.",
    )
    queue_ms: QueueMs
    compute_ms: ComputeMs
    total_ms: float = Field(description="From the arrival of the request to this answer.")


class InferResponse(Answer):
    """One answer per row."""

    model_name: str = Field(description="The model that answered.")
    model_version: str = Field(description="Version of the model.")
    id: str = Field(description="Id that the request sent, else the one in x-request-id.")
    parameters: InferFacts = Field(description="The work that was done.")
    outputs: list[OutputTensor] = Field(description="The requested outputs, or all.")


class OipError(Answer):
    """The body of every error under /v2."""

    error: str = Field(description="What went wrong, and what to do about it.")


# Request bodies: JSON, then tensors as bytes.


HEADER_LENGTH = "inference-header-content-length"
BINARY_SIZE = "binary_data_size"

_PARTS: tuple[type[BaseModel], ...] = (InferRequest, InputTensor, RequestedOutput)


async def read_inference(
    exchange: Exchange, reader: Reader
) -> tuple[InferRequest, list[memoryview | None]]:
    """The JSON of a request, and the bytes of each input that was sent as bytes."""
    if exchange.query:  # clients of Triton take fields for it
        check_query(exchange.query, PARAMETERS, "parameters of the JSON body")
    body = await read_body(exchange, reader)
    length = _header_length(exchange, len(body))
    text = body if length is None else body[:length]
    asked = await checked_json(exchange, text, InferRequest, reader, explain_request)
    exchange.weight += len(body) - len(text)
    binary = memoryview(body)[len(body) if length is None else length :]
    return asked, _split(asked, binary, length is not None)


def _header_length(exchange: Exchange, size: int) -> int | None:
    """How many bytes of the body are JSON, if the client says so."""
    name = HEADER_LENGTH.encode()
    lengths = [value for one, value in exchange.header_list if one == name]
    if not lengths:
        return None
    text = lengths[0].strip()
    # The length is checked first: int() of very long digit strings is slow.
    if len(lengths) > 1 or not text.isdigit() or len(text) > 20:
        raise BadRequest("Inference-Header-Content-Length must be one number of bytes")
    length = int(text)
    if length > size:
        raise BadRequest(
            f"Inference-Header-Content-Length is {length}, but the body has {size} bytes: send "
            "the size of its JSON"
        )
    return length


def _split(asked: InferRequest, binary: memoryview, announced: bool) -> list[memoryview | None]:
    """The bytes of each input, in order. Together they must be the whole rest of the body."""
    found: list[memoryview | None] = []
    at = 0
    for index, tensor in enumerate(asked.inputs):
        where = f"inputs[{index}]"
        size = _binary_size(tensor, where)
        if size is None:
            found.append(None)
            continue
        if not announced:
            raise InvalidField(
                f"{where} has {BINARY_SIZE}, but the header Inference-Header-Content-Length is "
                "missing: send in it how many bytes the JSON has"
            )
        if size > len(binary) - at:
            raise InvalidField(
                f"{where}.parameters.{BINARY_SIZE} is {size}, but {len(binary) - at} bytes are "
                "left behind the JSON: send as many as it says"
            )
        found.append(binary[at : at + size])
        at += size
    if at != len(binary):
        raise InvalidField(
            f"{len(binary) - at} bytes behind the JSON belong to no input: name them in "
            f"{BINARY_SIZE}, or leave them out"
        )
    return found


def _binary_size(tensor: InputTensor, where: str) -> int | None:
    """How many bytes an input has after the JSON; None if it is in the JSON."""
    others = sorted(set(tensor.parameters) - {BINARY_SIZE})
    if others:
        raise InvalidField(
            f"{where}.parameters.{shown(others[0])} is not known here: an input takes "
            f"{BINARY_SIZE} only"
        )
    in_json = "data" in tensor.model_fields_set
    if BINARY_SIZE not in tensor.parameters:
        if not in_json:
            raise InvalidField(f"{where}.data is missing: send it, or {BINARY_SIZE} and bytes")
        return None
    if in_json:
        raise InvalidField(f"{where} has both data and {BINARY_SIZE}: send one of them")
    size = tensor.parameters[BINARY_SIZE]
    if type(size) is not int or size < 0:
        raise InvalidField(f"{where}.parameters.{BINARY_SIZE} must be a number of bytes")
    return size


def explain_request(error: ValidationError, schema: type[BaseModel]) -> ServeError:
    """The error for the first field that is wrong."""
    first = error.errors(include_url=False, include_input=False)[0]
    return InvalidField(_sentence(first, _path(first["loc"]), schema))


def _sentence(problem: ErrorDetails, path: str, schema: type[BaseModel]) -> str:
    if problem["type"] == "missing":
        return f"{path} is missing: send it"
    if problem["type"] != "extra_forbidden":
        return f"{path} {describe_problem(problem)}"
    if schema is InferRequest and path in PARAMETERS:
        return f"unknown field {path}: send it in parameters"
    parts = _PARTS if schema in _PARTS else (schema,)
    known = sorted({name for part in parts for name in part.model_fields})
    close = nearest(str(problem["loc"][-1]), known)
    return f"unknown field {path}: " + (f"did you mean {close}?" if close else "leave it out")


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{shown(part)}"
    return path.removeprefix(".")


# Model metadata.


PLATFORM = "stepdial_bundle"
_ANY = -1
_LABELS: dict[str, Datatype] = {"label": "BYTES", "score": "FP32", "steps": "INT32"}
_TAGS: dict[str, Datatype] = {"tokens": "BYTES", "score": "FP32", "steps": "INT32"}
_TEXTS: dict[str, Datatype] = {"text": "BYTES", "finish_reason": "BYTES", "steps": "INT32"}


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The one input tensor of a model; -1 in the shape is any size."""

    name: str
    datatypes: tuple[Datatype, ...]
    shape: tuple[int, ...]
    most: int  # elements along an axis of any size but the first

    @classmethod
    def of(cls, manifest: Manifest) -> "InputSpec":
        match manifest.input:
            case ImageInput(channels=channels, height=height, width=width):
                shape = (_ANY, channels, height, width)
                return cls("image", ("FP32", "UINT8"), shape, 0)
            case PointsInput(max_points=max_points, dimensions=dimensions):
                return cls("points", ("FP32",), (_ANY, _ANY, dimensions), max_points)
            case _:
                return cls("text", ("BYTES",), (_ANY,), 0)

    def check(self, tensors: Sequence[InputTensor], model: str, max_rows: int) -> None:
        """InvalidField unless this is the one tensor, in a shape that the model takes."""
        for index, tensor in enumerate(tensors):
            if tensor.name != self.name:
                raise InvalidField(
                    f"inputs[{index}].name is {shown(repr(tensor.name))}, but {model} takes "
                    f"{self.name!r} only"
                )
        if len(tensors) > 1:
            raise InvalidField(
                f"inputs has {len(tensors)} tensors named {self.name!r}: send one, with a row each"
            )
        (tensor,) = tensors
        if tensor.datatype not in self.datatypes:
            raise InvalidField(
                f"inputs[0].datatype is {shown(repr(tensor.datatype))}, but {self.name} of {model} "
                f"is {' or '.join(self.datatypes)}"
            )
        self._check_shape(tensor.shape, model, max_rows)

    def _check_shape(self, shape: Sequence[int], model: str, max_rows: int) -> None:
        fits = len(shape) == len(self.shape) and all(
            size == wanted if wanted != _ANY else size >= 1
            for size, wanted in zip(shape, self.shape, strict=True)
        )
        if not fits:
            raise InvalidField(
                f"inputs[0].shape is {shown(repr(list(shape)))}, but {self.name} of {model} is "
                f"{list(self.shape)}, where -1 is any size from 1"
            )
        if shape[0] > max_rows:
            raise Unprocessable(
                f"inputs[0] has {shape[0]} rows, but this server takes at most {max_rows} at once: "
                "send several requests"
            )
        if self.most and math.prod(shape[1:-1]) > self.most:
            raise Unprocessable(
                f"inputs[0] has {shape[1]} {self.name}, but {model} takes at most {self.most}: "
                "leave some out"
            )


def outputs_of(manifest: Manifest) -> dict[str, Datatype]:
    """The outputs of a model with their datatypes. Each has one element per row."""
    if manifest.task == "tag":
        return _TAGS
    return _LABELS if manifest.task == "classify" else _TEXTS


def metadata_of(manifest: Manifest) -> ModelMetadata:
    spec = InputSpec.of(manifest)
    return ModelMetadata(
        name=manifest.name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[
            TensorMetadata(
                name=spec.name,
                datatype=spec.datatypes[0],
                shape=list(spec.shape),
            )
        ],
        outputs=[
            TensorMetadata(name=name, datatype=datatype, shape=[_ANY])
            for name, datatype in outputs_of(manifest).items()
        ],
        parameters=ModelParameters(
            task=manifest.task,
            steps=list(manifest.steps),
            efforts={word: rung.steps for word, rung in efforts_of(manifest).items()},
            default_steps=manifest.default_steps,
            full_steps=manifest.full_steps,
            max_disagreement=manifest.early_levels,
            labels=None if manifest.labels is None else list(manifest.labels),
            request=[
                name
                for name in parameter_names(manifest.task)
                if name != "truncate" or manifest.input.kind == "text"
            ],
        ),
    )


# The server and its models.


EXTENSIONS = ["binary_tensor_data", "parameters"]


class RepositoryIndex(RootModel[list[RepositoryEntry]]):
    """All models."""


_UNKNOWN = "No model with this name or version is served."
_NOT_READY = "The server is shutting down, a model call is stuck, or the model fails."


_METADATA: dict[str, Any] = {
    "response_model": ModelMetadata,
    "response_description": "Input and output tensors, and the step counts.",
    "responses": problems(OipError, e404=_UNKNOWN),
}
_READINESS: dict[str, Any] = {
    "response_model": ModelReady,
    "response_description": "The model takes requests.",
    "responses": problems(OipError, e404=_UNKNOWN, e503=_NOT_READY),
}


def find_version(engine: Engine, name: str, version: str) -> Served:
    """The model of this name; UnknownModel for a version that is not served."""
    served = engine.catalog.find(name)
    if version != VERSION:
        raise UnknownModel(
            f"{name} has no version {version[:80]!r}: it has {VERSION}", param="version"
        )
    return served


def _entry(engine: Engine, served: Served) -> RepositoryEntry:
    try:
        check_ready(engine, [served])
    except ServeError as error:
        return RepositoryEntry(
            name=served.name, version=VERSION, state="UNAVAILABLE", reason=error.message
        )
    return RepositoryEntry(name=served.name, version=VERSION, state="READY", reason="")


# Response bodies.


Values = list[str] | list[float] | list[int]

_BINARY = "binary_data"


@dataclass(frozen=True, slots=True)
class OutputChoice:
    """An output to send, and how."""

    name: str
    datatype: Datatype
    binary: bool


def wanted_outputs(asked: InferRequest, manifest: Manifest) -> list[OutputChoice]:
    """The outputs to send, in order; InvalidField names an unknown one."""
    known = outputs_of(manifest)
    binary = flag_of(asked.parameters, BINARY_OUTPUT, "parameters")
    if not asked.outputs:
        return [OutputChoice(name, datatype, binary) for name, datatype in known.items()]
    wanted: dict[str, OutputChoice] = {}
    for index, output in enumerate(asked.outputs):
        where = f"outputs[{index}]"
        if output.name not in known:
            raise InvalidField(
                f"{where}.name is {output.name[:80]!r}, but {manifest.name} gives "
                + ", ".join(known)
            )
        if output.name in wanted:
            raise InvalidField(f"{where} names {output.name!r} a second time: leave it out")
        _check_parameters(output, where)
        own = flag_of(output.parameters, _BINARY, f"{where}.parameters", binary)
        wanted[output.name] = OutputChoice(output.name, known[output.name], own)
    return list(wanted.values())


def facts_of(budget: Budget, spent: Timing, **found: int | None) -> dict[str, object]:
    """The fields of InferFacts; `budget` is that of the row with the fewest steps."""
    expected = budget["expected"]
    facts: dict[str, object] = {
        "reason": budget["reason"],
        "method": budget["method"],
        "full_steps": budget["full_steps"],
        "metric": expected["metric"],
        "expected": expected["value"],
        "expected_full": expected["full_value"],
    }
    optional = {"max_disagreement": budget.get("max_disagreement"), **found}
    return facts | {name: one for name, one in optional.items() if one is not None} | {**spent}


def _check_parameters(output: RequestedOutput, where: str) -> None:
    for name in output.parameters:
        if name == "classification":
            raise InvalidField(
                f"{where}.parameters.classification is not supported: leave it out, and read the "
                "outputs label and score; POST /v1/classify lists the top_k labels"
            )
        if name != _BINARY:
            raise InvalidField(
                f"{where}.parameters.{name[:80]} is not known here: an output takes {_BINARY} only"
            )


_WHERE = "inputs[0]"
_BYTES = {"type": "string", "format": "binary"}
_TAKES = takes(InferRequest)
_TAKES["requestBody"]["content"]["application/octet-stream"] = {"schema": _BYTES}
_TAKES["parameters"] = [
    {
        "name": "Inference-Header-Content-Length",
        "in": "header",
        "required": False,
        "schema": {"type": "integer", "minimum": 0},
        "description": "How many bytes of the body are JSON, if tensors follow as bytes.",
    }
]
_GIVES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One answer per row; outputs that were requested as bytes follow the JSON.",
        "content": {"application/octet-stream": {"schema": _BYTES}},
    },
    **{status: one | {"model": OipError} for status, one in RUN_PROBLEMS.items() if status != 422},
    **problems(
        OipError,
        e400="The body cannot be parsed, or asks for something impossible.",
        e404=_UNKNOWN,
    ),
}
_INFERENCE: dict[str, Any] = {
    "response_model": InferResponse,
    "responses": _GIVES,
    "openapi_extra": _TAKES,
}


@dataclass(frozen=True, slots=True)
class Inference:
    """One request whose tensor the model can take."""

    exchange: Exchange
    engine: Engine
    reader: Reader
    served: Served
    asked: InferRequest
    raw: memoryview | None  # the elements, if they were sent as bytes
    wanted: Sequence[OutputChoice]

    async def classify(self) -> Response:
        """Labels, scores and steps, per row."""
        task = self.served.manifest.task
        asked = request_of(ClassifyRequest, "input", self.asked.parameters, task)
        submission = Submission.of(self.exchange, self.engine, self.served, asked)
        inputs, event = await submission.classify(
            self.reader,
            self.asked.inputs[0].shape[0],
            self._characters(),
            lambda: self._rows(asked.truncate is not False),
        )
        budgets = [
            budget_of(submission.decision.served_at(steps), spent)
            for steps, spent in zip(event.steps, event.spent, strict=True)
        ]
        columns = self._labels(event, inputs)
        columns["steps"] = [budget["steps"] for budget in budgets]
        texts = isinstance(self.served.manifest.input, TextInput)
        truncated = sum(one.truncated for one in inputs) if texts else None
        worst = min(budgets, key=lambda budget: budget["steps"])
        spent = submission.timing(event.span)
        response = self._answer(facts_of(worst, spent, truncated=truncated), spent, columns)
        self.engine.answer.observe(self.engine.clock() - event.span.ended_s)
        return response

    def _labels(self, event: ClassifiedEvent, inputs: Sequence[InputRow]) -> dict[str, Values]:
        """A label and its score per row; for tokens, JSON and the lowest score of any token."""
        manifest = self.served.manifest
        tagged = [row.found for row in event.rows if isinstance(row.found, Tags)]
        if tagged:
            tokens = [
                token_labels(tags, one, manifest) for tags, one in zip(tagged, inputs, strict=True)
            ]
            return {
                "tokens": [json.dumps(row, ensure_ascii=False) for row in tokens],
                "score": [min(tags.scores) for tags in tagged],
            }
        labels = manifest.labels or ()
        rows = [row.found for row in event.rows if not isinstance(row.found, Tags)]
        best = [ranked(scores)[0] for scores in rows]
        return {
            "label": [labels[index] for index in best],
            "score": [scores[index] for scores, index in zip(rows, best, strict=True)],
        }

    async def write(self) -> Response:
        """A text per row, each generated by a job of its own."""
        task = self.served.manifest.task
        asked = request_of(GenerateRequest, "prompt", self.asked.parameters, task)
        submission = Submission.of(self.exchange, self.engine, self.served, asked)
        texts = self.asked.inputs[0].shape[0]
        await submission.write(self.reader, asked, texts, self._characters(), self._prompts)
        events = await submission.ends()
        steps = submission.decision.steps
        columns: dict[str, Values] = {
            "text": [event.text for event in events],
            "finish_reason": [str(event.finish_reason) for event in events],
            "steps": [steps for _ in events],
        }
        spent = submission.timing(Span.over(event.span for event in events))
        sent = submission.requests[0].sampling.seed
        facts = facts_of(budget_of(submission.decision), spent, seed=sent)
        return self._answer(facts, spent, columns)

    def _characters(self) -> int | None:
        """At most how much text there is to read; None for images and points."""
        if not isinstance(self.served.manifest.input, TextInput):
            return None
        if self.raw is not None:
            return len(self.raw)
        data = self.asked.inputs[0].data
        if len(data) > self.reader.settings.max_inputs:  # too many: refused later, with the limit
            return None
        return sum(len(text) for text in data if isinstance(text, str))

    def _texts(self) -> list[str]:
        tensor = self.asked.inputs[0]
        if self.raw is None:
            return texts_of_json(tensor.data, tensor.shape, _WHERE)
        return texts_of_bytes(self.raw, tensor.shape, _WHERE)

    def _prompts(self) -> list[list[int]]:
        codec = self.served.codec
        return [codec.encode_prompt(text, f"text[{row}]") for row, text in enumerate(self._texts())]

    def _rows(self, truncate: bool) -> list[InputRow]:
        """The rows of the tensor, as the model takes them."""
        spec = self.served.manifest.input
        if isinstance(spec, TextInput):
            texts = enumerate(self._texts())
            items = tuple(Input("text", text, f"text[{row}]") for row, text in texts)
            return read_items(items, self.served.manifest, self.served.text, truncate)
        tensor = self.asked.inputs[0]
        numbers = (
            numbers_of_json(tensor.data, tensor.datatype, tensor.shape, _WHERE)
            if self.raw is None
            else numbers_of_bytes(self.raw, tensor.datatype, tensor.shape, _WHERE)
        )
        if isinstance(spec, ImageInput):
            return image_rows(numbers, tensor.datatype == "UINT8", spec, _WHERE)
        return cloud_rows(numbers)

    def _answer(
        self, facts: Mapping[str, object], spent: Timing, columns: Mapping[str, Values]
    ) -> Response:
        """The response body: JSON, then the outputs that are sent as bytes."""
        tensors, binary = [], []
        for one in self.wanted:
            values = columns[one.name]
            tensor: dict[str, object] = {"name": one.name, "datatype": one.datatype}
            tensor["shape"] = [len(values)]
            if one.binary:
                binary.append(bytes_of(values, one.datatype))
                tensor["parameters"] = {BINARY_SIZE: len(binary[-1])}
            elif one.datatype == "FP32":  # rounded as the bytes are
                tensor["data"] = np.asarray(values, dtype=np.float32).tolist()
            else:
                tensor["data"] = values
            tensors.append(tensor)
        response = {
            "model_name": self.served.name,
            "model_version": VERSION,
            "id": self.asked.id or self.exchange.id,
            "parameters": facts,
            "outputs": tensors,
        }
        if not binary:
            return answer(response, server_timing(spent))
        text = to_json(response)
        answered = Response(
            b"".join([text, *binary]),
            media_type="application/octet-stream",
            headers={HEADER_LENGTH: str(len(text))},
        )
        answered.raw_headers.append(server_timing(spent))
        return answered


# The routes.


def oip_routes(engine: Engine, reader: Reader) -> APIRouter:
    router = APIRouter(tags=["open inference protocol"], route_class=Route)

    @router.get("/v2/", include_in_schema=False)
    @router.get(
        "/v2",
        summary="Server metadata",
        response_model=ServerMetadata,
        response_description="Name, version and extensions of the server.",
    )
    async def server(request: Request) -> Response:
        version = request.app.version
        return answer(ServerMetadata(name="stepdial", version=version, extensions=EXTENSIONS))

    @router.get(
        "/v2/health/live",
        summary="Liveness probe",
        response_model=ServerLive,
        response_description="The process is alive.",
        responses=problems(OipError, e503="The engine has stopped: restart the process."),
    )
    async def live() -> Response:
        if engine.dead:
            raise NotReady("the engine has stopped: restart the server")
        return answer(ServerLive(live=True))

    @router.get(
        "/v2/health/ready",
        summary="Readiness probe",
        response_model=ServerReady,
        response_description="The server takes requests.",
        responses=problems(OipError, e503=_NOT_READY),
    )
    async def ready() -> Response:
        check_ready(engine, engine.catalog)
        return answer(ServerReady(ready=True))

    @router.get(
        "/v2/models/{name}/versions/{version}",
        summary="Metadata of one version of a model",
        **_METADATA,
    )
    async def model_version(name: str, version: str) -> Response:
        return answer(metadata_of(find_version(engine, name, version).manifest))

    @router.get(
        "/v2/models/{name}",
        summary="Metadata of a model",
        **_METADATA,
    )
    async def model(name: str) -> Response:
        return await model_version(name, VERSION)

    @router.get(
        "/v2/models/{name}/versions/{version}/ready",
        summary="Readiness of one version of a model",
        **_READINESS,
    )
    async def version_ready(name: str, version: str) -> Response:
        served = find_version(engine, name, version)
        check_ready(engine, [served])
        return answer(ModelReady(name=served.name, ready=True))

    @router.get(
        "/v2/models/{name}/ready",
        summary="Readiness of a model",
        **_READINESS,
    )
    async def model_ready(name: str) -> Response:
        return await version_ready(name, VERSION)

    @router.post(
        "/v2/repository/index",
        summary="List the models",
        response_model=RepositoryIndex,
        response_description="Every model, and whether it takes requests.",
        responses=problems(
            OipError,
            e400="The body is not valid JSON, or a field of it is wrong.",
            e403="A web page of another origin sent the request.",
            e408="The body did not arrive in time.",
            e413="The body is too large.",
            e415="The body is packed in a way that is not known.",
        ),
        openapi_extra=takes(IndexRequest, required=False),
    )
    async def index(exchange: ThisExchange) -> Response:
        body = await read_body(exchange, reader)
        only_ready = False
        if body.strip():
            asked = await checked_json(exchange, body, IndexRequest, reader, explain_request)
            only_ready = asked.ready
        entries = [_entry(engine, served) for served in engine.catalog]
        listed = [one for one in entries if one.state == "READY" or not only_ready]
        return answer(RepositoryIndex(listed))

    @router.post(
        "/v2/models/{name}/versions/{version}/infer",
        summary="Run one version of a model: classify, generate or translate",
        **_INFERENCE,
    )
    async def infer_version(exchange: ThisExchange, name: str, version: str) -> Response:
        find_version(engine, name, version)  # before the body is read
        asked, raw = await read_inference(exchange, reader)
        served = find_version(engine, name, version)
        manifest = served.manifest
        if asked.model_name and asked.model_name != name:
            raise InvalidField(
                f"model_name is {asked.model_name[:80]!r}, but the path names {name}: leave it out",
                param="model_name",
            )
        InputSpec.of(manifest).check(asked.inputs, served.name, reader.settings.max_inputs)
        wanted = wanted_outputs(asked, manifest)
        inference = Inference(exchange, engine, reader, served, asked, raw[0], wanted)
        if manifest.labelled:
            return await inference.classify()
        return await inference.write()

    @router.post(
        "/v2/models/{name}/infer",
        summary="Run a model: classify, generate or translate",
        **_INFERENCE,
    )
    async def infer(exchange: ThisExchange, name: str) -> Response:
        return await infer_version(exchange, name, VERSION)

    return router
