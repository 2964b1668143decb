"""The shapes of the Open Inference Protocol: what its requests and answers hold, documented.

Knows shapes only; deliberately neither which tensors a model takes nor how they are encoded.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict

from serve.budget import Reason
from serve.bundle import Method, Metric, Task
from serve.wire.answers import METRIC, Answer
from serve.wire.oip_parameters import parameter_schema
from serve.wire.schemas import whole

VERSION = "1"
# More than any model here takes or gives; beyond it a request is refused at once.
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


class _Sent(BaseModel):
    """A part of a request; null stands for nothing in this protocol, so no field takes it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class InputTensor(_Sent):
    """A tensor that the model is to read."""

    name: str = Field(description="`text`, `image` or `points`: see the metadata of the model.")
    datatype: str = Field(description="`BYTES` for texts, `FP32` or `UINT8` for images, `FP32`.")
    shape: list[Annotated[int, BeforeValidator(whole)]] = Field(
        max_length=MAX_AXES,
        description="Rows first: [rows] texts, [rows, channels, height, width] or [rows, points, "
        "dimensions].",
    )
    parameters: dict[str, Any] = Field(
        {},
        max_length=MAX_MEMBERS,
        description="`binary_data_size`: how many bytes behind the JSON are this tensor, in place "
        "of `data`.",
    )
    data: list[Any] = Field(
        [],
        description="The elements in row-major order, flat or nested like the shape: strings for "
        "BYTES, numbers otherwise. Left out where the tensor is binary.",
    )


class RequestedOutput(_Sent):
    """An output that is wanted."""

    name: str = Field(description="One of the outputs in the metadata of the model.")
    parameters: dict[str, Any] = Field(
        {},
        max_length=MAX_MEMBERS,
        description="`binary_data`: whether to send it as bytes behind the JSON.",
    )


class InferRequest(_Sent):
    """Tensors to answer."""

    model_config = ConfigDict(json_schema_extra={"examples": [*_EXAMPLES]})

    id: str = Field("", description="Comes back in the answer.")
    parameters: dict[str, Any] = Field(
        {},
        description="The budget, how to write, and `binary_data_output`.",
        json_schema_extra=parameter_schema(),
    )
    inputs: list[InputTensor] = Field(
        min_length=1,
        max_length=MAX_TENSORS,
        description="The one tensor that the model takes; each row gets an answer.",
    )
    outputs: list[RequestedOutput] = Field(
        [],
        max_length=MAX_TENSORS,
        description="Which outputs to send, in which order; all where none is named.",
    )


class TensorMetadata(Answer):
    """A tensor that a model takes or gives; -1 is any size."""

    name: str = Field(description="Its name.")
    datatype: Datatype = Field(description="Of its elements.")
    shape: list[int] = Field(description="Rows first; -1 is any size.")


class ModelParameters(Answer):
    """The dial of a model, and what else a request may set."""

    task: Task = Field(description="What it does.")
    steps: list[int] = Field(description="The ladder: what a request may send as `steps`.")
    efforts: dict[str, int] = Field(description="What it may send as `effort`, with their steps.")
    default_steps: int = Field(description="Steps where a request asks for none.")
    full_steps: int = Field(description="The most steps.")
    max_disagreement: list[float] = Field(
        description="Levels of `max_disagreement` that the model is calibrated for."
    )
    labels: list[str] | None = Field(
        None, exclude_if=lambda labels: labels is None, description="Of a classifier."
    )
    request: list[str] = Field(description="Names that `parameters` of a request may have.")


class ModelMetadata(Answer):
    """A model, as its requests see it."""

    name: str = Field(description="Its name.")
    versions: list[str] = Field(description="The versions that are served: one.")
    platform: str = Field(description="What runs it.")
    inputs: list[TensorMetadata] = Field(description="The tensor that it takes.")
    outputs: list[TensorMetadata] = Field(description="The tensors that it gives.")
    parameters: ModelParameters = Field(description="Its ladder, and what a request may set.")


class ServerMetadata(Answer):
    """This server."""

    name: str = Field(description="Always `stepdial`.")
    version: str = Field(description="Its release.")
    extensions: list[str] = Field(description="Extensions of the protocol that it speaks.")


class ServerLive(Answer):
    """Whether the process should go on; what is wrong comes as an error."""

    live: bool = Field(description="Always true.")


class ServerReady(Answer):
    """Whether to send requests here; what is wrong comes as an error."""

    ready: bool = Field(description="Always true.")


class ModelReady(Answer):
    """Whether to send requests of this model here; what is wrong comes as an error."""

    name: str = Field(description="Its name.")
    ready: bool = Field(description="Always true.")


class RepositoryEntry(Answer):
    """A model in the list of all."""

    name: str = Field(description="Its name.")
    version: str = Field(description="The version that is served.")
    state: Literal["READY", "UNAVAILABLE"] = Field(description="Whether it answers.")
    reason: str = Field(description="Why it does not, or nothing.")


class IndexRequest(_Sent):
    """Which models to list."""

    ready: bool = Field(False, description="Only those that answer.")


class OutputParameters(Answer):
    """Where a binary tensor is."""

    binary_data_size: int = Field(description="How many bytes behind the JSON are this tensor.")


class OutputTensor(Answer):
    """A tensor of an answer."""

    name: str = Field(description="Its name.")
    datatype: Datatype = Field(description="Of its elements.")
    shape: list[int] = Field(description="[rows].")
    parameters: OutputParameters | None = Field(
        None, exclude_if=lambda found: found is None, description="Where it is, if it is binary."
    )
    data: list[str] | list[float] | list[int] | None = Field(
        None, exclude_if=lambda data: data is None, description="One element a row, if in JSON."
    )


class InferFacts(Answer):
    """What was done for all rows together."""

    reason: Reason = Field(description="What decided the steps; of several, of the fewest.")
    method: Method = Field(description="How a step uses the velocity.")
    full_steps: int = Field(description="The most steps that the model's ladder has.")
    metric: Metric = Field(description=METRIC)
    expected: float = Field(description="The measured quality at the fewest steps of any row.")
    expected_full: float = Field(description="The same at the full steps.")
    max_disagreement: float | None = Field(
        None,
        exclude_if=lambda level: level is None,
        description="The certified level that was applied to early answers, if any could come.",
    )
    truncated: int | None = Field(
        None,
        exclude_if=lambda count: count is None,
        description="How many texts to classify were cut to fit the model.",
    )
    seed: int | None = Field(
        None,
        exclude_if=lambda seed: seed is None,
        description="Of the first row that was written; each further row has the next number.",
    )
    queue_ms: float = Field(description="Waiting for the first call of the model.")
    compute_ms: float = Field(description="From the first call to the end of the last.")
    total_ms: float = Field(description="From the arrival of the request to this answer.")


class InferResponse(Answer):
    """One answer for each row."""

    model_name: str = Field(description="The model that answered.")
    model_version: str = Field(description="Its version.")
    id: str = Field(description="As the request sent it, else the one of x-request-id.")
    parameters: InferFacts = Field(description="What was done.")
    outputs: list[OutputTensor] = Field(description="The outputs that were asked for, or all.")


class OipError(Answer):
    """Every answer under /v2 that is not a 200."""

    error: str = Field(description="What went wrong, and what to do about it.")
