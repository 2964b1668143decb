"""Clouds of points that requests send, as the model was trained on them.

Knows no model but its PointsInput.
"""

import numpy as np
import numpy.typing as npt

from serve.bundle import PointsInput
from serve.errors import Unprocessable
from serve.inputs.arrays import check_list, number_rows
from serve.runtime.protocol import FloatArray


def read_points(value: object, spec: PointsInput, param: str) -> FloatArray:
    """Points (N, dimensions) around their mean, the farthest at distance 1."""
    rows = check_list(value, param)
    if len(rows) > spec.max_points:
        raise Unprocessable(
            f"{param} has {len(rows)} points, but the model takes at most {spec.max_points}: leave "
            "some out",
            param=param,
            max_points=spec.max_points,
        )
    points, _ = number_rows(rows, param)  # (N, dimensions)
    if points.shape[1] != spec.dimensions:
        raise Unprocessable(
            f"{param} has points of {points.shape[1]} numbers, but the model takes "
            f"{spec.dimensions}: send [[x, ...], ...] with {spec.dimensions} numbers a point",
            param=param,
        )
    return unit_cloud(points)


def unit_cloud(points: npt.NDArray[np.float64]) -> FloatArray:
    """The same points (N, dimensions) around their mean, the farthest at distance 1."""
    if (points == points[0]).all():  # the mean of equal numbers may differ from them
        return np.zeros(points.shape, dtype=np.float32)
    points = points - points.mean(axis=0)
    # In two steps, so that the square of a very small number does not vanish.
    points /= np.abs(points).max()
    points /= np.sqrt((points**2).sum(axis=1)).max()
    cloud: FloatArray = points.astype(np.float32)
    return cloud
