"""What a model takes and gives in the Open Inference Protocol, and its metadata.

Knows manifests and tensors; deliberately neither requests nor the engine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from serve.bundle import ImageInput, Manifest, PointsInput
from serve.errors import InvalidField, Unprocessable
from serve.wire.oip_parameters import parameter_names
from serve.wire.oip_schemas import (
    VERSION,
    Datatype,
    InputTensor,
    ModelMetadata,
    ModelParameters,
    TensorMetadata,
)

PLATFORM = "stepdial_bundle"
_ANY = -1
_LABELS: dict[str, Datatype] = {"label": "BYTES", "score": "FP32", "steps": "INT32"}
_TAGS: dict[str, Datatype] = {"tokens": "BYTES", "score": "FP32", "steps": "INT32"}
_TEXTS: dict[str, Datatype] = {"text": "BYTES", "finish_reason": "BYTES", "steps": "INT32"}


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The one tensor that a model takes; -1 in the shape is any size."""

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
        """InvalidField unless this is the one tensor, of a shape that the model takes."""
        for index, tensor in enumerate(tensors):
            if tensor.name != self.name:
                raise InvalidField(
                    f"inputs[{index}].name is {_shown(tensor.name)}, but {model} takes "
                    f"{self.name!r} only"
                )
        if len(tensors) > 1:
            raise InvalidField(
                f"inputs has {len(tensors)} tensors named {self.name!r}: send one, with a row each"
            )
        (tensor,) = tensors
        if tensor.datatype not in self.datatypes:
            raise InvalidField(
                f"inputs[0].datatype is {_shown(tensor.datatype)}, but {self.name} of {model} is "
                + " or ".join(self.datatypes)
            )
        self._check_shape(tensor.shape, model, max_rows)

    def _check_shape(self, shape: Sequence[int], model: str, max_rows: int) -> None:
        fits = len(shape) == len(self.shape) and all(
            size == wanted if wanted != _ANY else size >= 1
            for size, wanted in zip(shape, self.shape, strict=True)
        )
        if not fits:
            raise InvalidField(
                f"inputs[0].shape is {_shown(list(shape))}, but {self.name} of {model} is "
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
    """The outputs of a model with their datatypes; each has one element a row."""
    if manifest.task == "tag":
        return _TAGS
    return _LABELS if manifest.task == "classify" else _TEXTS


def metadata_of(manifest: Manifest) -> ModelMetadata:
    """What clients learn of a model."""
    taken = InputSpec.of(manifest)
    calibrated = () if manifest.calibration is None else manifest.calibration.levels
    return ModelMetadata(
        name=manifest.name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[
            TensorMetadata(name=taken.name, datatype=taken.datatypes[0], shape=list(taken.shape))
        ],
        outputs=[
            TensorMetadata(name=name, datatype=datatype, shape=[_ANY])
            for name, datatype in outputs_of(manifest).items()
        ],
        parameters=ModelParameters(
            task=manifest.task,
            steps=list(manifest.steps),
            efforts={rung.effort: rung.steps for rung in manifest.rungs if rung.effort is not None},
            default_steps=manifest.default_steps,
            full_steps=manifest.full_steps,
            max_disagreement=[
                level.max_disagreement for level in calibrated if level.threshold is not None
            ],
            labels=None if manifest.labels is None else list(manifest.labels),
            request=list(parameter_names(manifest.task)),
        ),
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
