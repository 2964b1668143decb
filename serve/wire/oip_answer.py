"""The answer of an inference in the Open Inference Protocol: which outputs, in JSON or as bytes.

Knows requested outputs and encodings; deliberately not how the values came to be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from starlette.responses import Response

from serve.bundle import Manifest
from serve.errors import InvalidField
from serve.wire.answers import Budget, Timing
from serve.wire.oip_body import HEADER_LENGTH
from serve.wire.oip_models import outputs_of
from serve.wire.oip_parameters import binary_by_default, flag_of
from serve.wire.oip_schemas import (
    VERSION,
    Datatype,
    InferFacts,
    InferRequest,
    InferResponse,
    OutputParameters,
    OutputTensor,
    RequestedOutput,
)
from serve.wire.oip_tensors import bytes_of
from serve.wire.ready import ReadyAnswer

Values = list[str] | list[float] | list[int]

_BINARY = "binary_data"


@dataclass(frozen=True, slots=True)
class Wanted:
    """An output to send."""

    name: str
    datatype: Datatype
    binary: bool


def wanted_outputs(asked: InferRequest, manifest: Manifest) -> list[Wanted]:
    """The outputs to send, in their order; InvalidField naming what there is not."""
    known = outputs_of(manifest)
    binary = binary_by_default(asked.parameters)
    if not asked.outputs:
        return [Wanted(name, datatype, binary) for name, datatype in known.items()]
    wanted: dict[str, Wanted] = {}
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
        wanted[output.name] = Wanted(output.name, known[output.name], own)
    return list(wanted.values())


def facts_of(
    budget: Budget, spent: Timing, *, truncated: int | None = None, seed: int | None = None
) -> InferFacts:
    """What was done; `budget` is that of the row with the fewest steps."""
    return InferFacts(
        reason=budget["reason"],
        method=budget["method"],
        full_steps=budget["full_steps"],
        metric=budget["expected"]["metric"],
        expected=budget["expected"]["value"],
        expected_full=budget["expected"]["full_value"],
        max_disagreement=budget.get("max_disagreement"),
        truncated=truncated,
        seed=seed,
        **spent,
    )


def written(
    model: str,
    request_id: str,
    facts: InferFacts,
    wanted: Sequence[Wanted],
    columns: Mapping[str, Values],
    *headers: tuple[bytes, bytes],
) -> Response:
    """The answer on the wire: JSON, and behind it the outputs that are wanted as bytes."""
    tensors, binary = [], []
    for one in wanted:
        values = columns[one.name]
        if one.binary:
            binary.append(bytes_of(values, one.datatype))
        tensors.append(_tensor(one, values, len(binary[-1]) if one.binary else None))
    response = InferResponse(
        model_name=model,
        model_version=VERSION,
        id=request_id,
        parameters=facts,
        outputs=tensors,
    )
    text = response.model_dump_json().encode()
    if not binary:
        return ReadyAnswer(text, *headers)
    answered = Response(
        b"".join([text, *binary]),
        media_type="application/octet-stream",
        headers={HEADER_LENGTH: str(len(text))},
    )
    answered.raw_headers += headers
    return answered


def _tensor(one: Wanted, values: Values, size: int | None) -> OutputTensor:
    place = None if size is None else OutputParameters(binary_data_size=size)
    if one.datatype == "FP32":  # the same numbers as in bytes
        values = np.asarray(values, dtype=np.float32).tolist()
    return OutputTensor(
        name=one.name,
        datatype=one.datatype,
        shape=[len(values)],
        parameters=place,
        data=values if place is None else None,
    )


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
