"""The smallest, usual and largest shape of each input of a graph, as TensorRT's profiles want.

Knows the manifest's limits; not who builds an engine of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from serve.bundle import ImageInput, Manifest, PointsInput
from serve.runtime.interface import Nodes

DEFAULT_ROWS = 64
Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """Of one input."""

    min: Dims
    opt: Dims
    max: Dims

    def holds(self, shape: Dims) -> bool:
        return len(shape) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )


Profile = Mapping[str, ShapeRange]


def one_profile(inputs: Nodes, manifest: Manifest, rows: int = DEFAULT_ROWS) -> Profile:
    """Any batch up to `rows`, best at half of it."""
    return _profile(inputs, manifest, (1, max(1, rows // 2), rows))


def profiles(inputs: Nodes, manifest: Manifest, rows: int = DEFAULT_ROWS) -> list[Profile]:
    """A single row, which waits for nobody; and batches of up to `rows`."""
    single = _profile(inputs, manifest, (1, 1, 1))
    return [single] if rows == 1 else [single, one_profile(inputs, manifest, rows)]


def _profile(inputs: Nodes, manifest: Manifest, batch: tuple[int, int, int]) -> Profile:
    sizes = _sizes(manifest) | {"batch": batch}
    ranges = {}
    for name, (_, shape) in inputs.items():
        assert shape is not None, f"{name} has no shape"
        sides = [sizes[side] if isinstance(side, str) else (side,) * 3 for side in shape]
        low, usual, high = (tuple(side[index] for side in sides) for index in range(3))
        ranges[name] = ShapeRange(low, usual, high)
    return ranges


def _sizes(manifest: Manifest) -> dict[str, tuple[int, int, int]]:
    """What each word of an interface stands for."""
    match manifest.input:
        case ImageInput():
            return {}
        case PointsInput(max_points=most):
            return {"count": _up_to(most)}
        case text:
            written = manifest.target_max_tokens or text.max_tokens
            return {
                "length": _up_to(written),
                "source_length": _up_to(text.max_tokens),
                # Two even of a single prefix; all positions only where a decoder is verified.
                "kept": (1, 2, max(2, written)),
            }


def _up_to(most: int) -> tuple[int, int, int]:
    return 1, max(1, most // 2), most
