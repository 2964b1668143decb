"""Clouds of points in requests: where they end up, and what is refused."""

import numpy as np
import pytest

from serve.bundle import PointsInput
from serve.errors import ServeError
from serve.inputs.rows import read_points

SPEC = PointsInput(max_points=8, dimensions=3)


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e30])
def test_a_cloud_is_centred_and_fits_the_unit_sphere(scale: float) -> None:
    cloud = (np.random.default_rng(0).uniform(-1, 1, (7, 3)) * scale).tolist()
    points = read_points(cloud, SPEC, "input.points")
    assert points.dtype == np.float32 and points.shape == (7, 3)
    np.testing.assert_allclose(points.mean(axis=0), 0, atol=1e-6)
    assert np.linalg.norm(points, axis=1).max() == pytest.approx(1.0)
    moved = (np.array(cloud) / scale * 3 + 5).tolist()
    np.testing.assert_allclose(read_points(moved, SPEC, "p"), points, atol=1e-6)


def test_equal_points_are_all_in_the_middle() -> None:
    for cloud in ([[0.1, 0.2, 0.3]] * 7, [[1, 2, 3]], [[0, 0, 0]]):
        assert not read_points(cloud, SPEC, "p").any()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "an empty list"),
        ("cube", "no list"),
        ([1, 2, 3], "p[0] is no list"),
        ([[1, 2, 3]] * 9, "has 9 points, but the model takes at most 8"),
        ([[1, 2]], "has points of 2 numbers, but the model takes 3"),
        ([[1, 2, 3], [1, 2]], "p[1] has 2 numbers"),
        ([[1, 2, float("nan")]], "not finite"),
        ([[1, 2, float("-inf")]], "not finite"),
        ([[1, 2, 1e31]], "not finite, or beyond"),
        ([[1, 2, "3"]], "holds text"),
        ([[1, 2, False]], "holds true or false"),
        ([[1, 2, None]], "holds null"),
    ],
)
def test_what_is_no_cloud_is_refused(value: object, says: str) -> None:
    with pytest.raises(ServeError) as refusal:
        read_points(value, SPEC, "p")
    assert refusal.value.status == 422 and says in refusal.value.message
