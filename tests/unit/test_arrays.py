"""Images and clouds to train on: scaled always, and moved, mirrored or drawn in training only."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serve.inputs.rows import unit_cloud
from train.data.arrays import ImageDataset, PointDataset, read_array, shifted, unit_sphere
from train.data.batch import Batch
from train.data.tables import divide
from train.recipe import DataConfig

ROWS, SIDE = 40, 6


def dataset(folder: Path, **changes: Any) -> ImageDataset:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (ROWS, SIDE, SIDE, 3)).astype(np.uint8)
    np.savez(folder / "data.npz", x=images, y=np.arange(ROWS) % 2)
    changes |= {"train": "data.npz:x", "train_labels": "data.npz:y"}
    config = DataConfig("images", str(folder), **changes)
    return ImageDataset(config, 0)


def test_pixels_have_the_mean_and_deviation_that_are_named(tmp_path: Path) -> None:
    plain = dataset(tmp_path, mean=(0.0,) * 3, std=(1.0,) * 3)
    pixels = plain.batch(0, 8, 0).inputs[0]  # (B, C, H, W)
    assert float(pixels.min()) == 0 and float(pixels.max()) == 1
    scaled = dataset(tmp_path, mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0)).batch(0, 8, 0).inputs[0]
    for channel, (mean, std) in enumerate(((0.1, 0.5), (0.2, 1.0), (0.3, 2.0))):
        torch.testing.assert_close(scaled[:, channel], (pixels[:, channel] - mean) / std)


def test_channels_come_first_and_rows_stay_rows(tmp_path: Path) -> None:
    data = dataset(tmp_path, mean=(0.0,) * 3, std=(1.0,) * 3)
    with np.load(tmp_path / "data.npz") as arrays:
        images = torch.from_numpy(arrays["x"]).float() / 255  # (N, H, W, C)
    _, held = divide(ROWS, DataConfig("images").held_out, 0)
    found = torch.cat([batch.inputs[0] for batch in data.held_out(3)])
    torch.testing.assert_close(found, images[torch.from_numpy(held)].permute(0, 3, 1, 2))


def test_what_is_held_out_is_not_trained_on_and_a_test_set_is_another(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    values, others = (draw.normal(size=(rows, 4, 3)) for rows in (ROWS, 6))
    classes = np.arange(ROWS) % 2
    np.savez(tmp_path / "a.npz", x=values, y=classes, z=1 - classes, tx=others, ty=classes[:6])
    names = {"train": "a.npz:x", "train_labels": "a.npz:y"}
    tested = names | {"test": "a.npz:tx", "test_labels": "a.npz:ty"}
    plain, whole, turned = (
        PointDataset(DataConfig("points", str(tmp_path), **given), 4, 0)  # type: ignore[arg-type]  # of strings all
        for given in (names, tested, names | {"train_labels": "a.npz:z"})
    )

    def rows(batches: Iterable[Batch]) -> set[bytes]:
        return {each.numpy().tobytes() for batch in batches for each in batch.inputs[0]}

    used, held = rows(plain.batch(i, 9, 0) for i in range(4)), rows(plain.validation(9))
    assert (len(used), len(held)) == (36, 4) and not used & held
    assert rows(plain.held_out(9)) == rows(whole.validation(9)) == held
    assert len(rows(whole.held_out(4))) == 6 and not rows(whole.held_out(4)) & (used | held)
    assert plain.digest == whole.digest != turned.digest  # other labels are other data


def test_a_channel_of_one_value_stays_finite(tmp_path: Path) -> None:
    images = np.full((ROWS, SIDE, SIDE), 7, np.uint8)
    np.savez(tmp_path / "data.npz", x=images, y=np.arange(ROWS) % 2)
    config = DataConfig("images", str(tmp_path), train="data.npz:x", train_labels="data.npz:y")
    assert ImageDataset(config, 0).batch(0, 4, 0).inputs[0].abs().max() < 1e-6


def test_an_idx_file_may_hold_numbers_of_several_bytes(tmp_path: Path) -> None:
    head = bytes([0, 0, 0x0D, 2]) + np.array([2, 3], ">i4").tobytes()
    (tmp_path / "a.idx").write_bytes(head + np.arange(6, dtype=">f4").tobytes())
    found = read_array(DataConfig("points", str(tmp_path)), "a.idx", "data.train")
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_mean_and_deviation_are_measured_on_what_is_trained_on(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    every = torch.cat([data.batch(i, 12, 0).inputs[0] for i in range(3)])  # an epoch of 36
    torch.testing.assert_close(every.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    deviation = every.std((0, 2, 3), correction=0)
    torch.testing.assert_close(deviation, torch.ones(3), atol=1e-5, rtol=0)


def test_half_of_the_images_are_mirrored_in_training_only(tmp_path: Path) -> None:
    plain, flipped = dataset(tmp_path), dataset(tmp_path, flip=True)
    mirrored, seen = 0, set()
    for i in range(30):
        before, after = plain.batch(i, 12, 0).inputs[0], flipped.batch(i, 12, 0).inputs[0]
        turned = [torch.equal(b, a.flip(-1)) for b, a in zip(before, after, strict=True)]
        kept = [torch.equal(b, a) for b, a in zip(before, after, strict=True)]
        assert all(one != other for one, other in zip(turned, kept, strict=True))
        mirrored += sum(turned)
        seen |= {one.numpy().tobytes() for one in before}
    assert len(seen) == 36  # one form of each row where nothing is mirrored
    assert mirrored / 360 == pytest.approx(0.5, abs=0.1)
    for one, other in zip(plain.held_out(3), flipped.held_out(3), strict=True):
        assert torch.equal(one.inputs[0], other.inputs[0])


def test_an_image_is_moved_by_up_to_so_many_pixels_either_way() -> None:
    image = np.zeros((1, 1, 7, 7), np.uint8)
    image[0, 0, 3, 3] = 1
    draw = np.random.default_rng(0)
    seen = {
        tuple(int(place) for place in np.argwhere(shifted(image, 2, draw)[0, 0])[0])
        for _ in range(400)
    }
    assert seen == {(row, column) for row in range(1, 6) for column in range(1, 6)}


def test_what_is_moved_in_depends_on_seed_and_iteration_alone(tmp_path: Path) -> None:
    one, other = (dataset(tmp_path, shift=2, flip=True) for _ in range(2))
    one.batch(0, 8, 3)
    assert torch.equal(one.batch(5, 8, 3).inputs[0], other.batch(5, 8, 3).inputs[0])
    plain = dataset(tmp_path)
    assert not torch.equal(plain.batch(5, 8, 3).inputs[0], one.batch(5, 8, 3).inputs[0])
    held, moved = next(plain.held_out(4)), next(one.held_out(4))
    assert torch.equal(held.inputs[0], moved.inputs[0])


def clouds(folder: Path, points: int) -> PointDataset:
    """Clouds of 9 points; the third number of a point says which it is."""
    values = np.random.default_rng(1).normal(3.0, 2.0, (ROWS, 9, 3)).astype(np.float32)
    values[:, :, 2] = np.arange(9)
    np.savez(folder / "data.npz", x=values, y=np.arange(ROWS) % 2)
    config = DataConfig("points", str(folder), train="data.npz:x", train_labels="data.npz:y")
    return PointDataset(config, points, 0)


def test_a_cloud_is_centred_with_its_farthest_point_at_one(tmp_path: Path) -> None:
    data = clouds(tmp_path, 9)
    for batch in (data.batch(0, 8, 0), next(data.held_out(4))):
        points = batch.inputs[0]  # (B, N, 3)
        torch.testing.assert_close(points.mean(1), torch.zeros(len(points), 3), atol=1e-6, rtol=0)
        farthest = points.norm(dim=2).amax(1)
        torch.testing.assert_close(farthest, torch.ones(len(points)))


def test_a_cloud_far_from_the_origin_keeps_its_form() -> None:
    """As the server keeps it: coordinates of a map in metres."""
    near = np.random.default_rng(2).normal(size=(2, 9, 3))
    far = near + np.array([691_000.0, 5_334_000.0, 500.0])
    np.testing.assert_allclose(unit_sphere(far), unit_sphere(near), atol=1e-6)
    assert unit_sphere(far).dtype == np.float32


def test_equal_points_are_all_in_the_middle_as_the_server_puts_them() -> None:
    spread = np.random.default_rng(3).normal(size=(7, 3))
    clouds = np.stack([np.full((7, 3), 0.1), spread]).astype(np.float32)
    assert (unit_sphere(clouds)[0] == 0).all()
    for cloud, found in zip(clouds, unit_sphere(clouds), strict=True):
        np.testing.assert_allclose(found, unit_cloud(cloud.astype(np.float64)), atol=1e-6)


def test_points_are_drawn_anew_for_each_cloud_in_training_only(tmp_path: Path) -> None:
    data = clouds(tmp_path, 5)
    drawn = data.batch(0, 8, 0).inputs[0]
    assert drawn.shape == (8, 5, 3)
    orders = {tuple(cloud[:, 2].argsort().tolist()) for cloud in drawn}
    assert len(orders) > 1
    assert torch.equal(drawn, clouds(tmp_path, 5).batch(0, 8, 0).inputs[0])
    held = next(data.held_out(4)).inputs[0]
    assert held.shape == (4, 5, 3)
    assert len({tuple(cloud[:, 2].argsort().tolist()) for cloud in held}) == 1
    assert all(len(set(cloud[:, 2].tolist())) == 5 for cloud in (*drawn, *held))  # none twice


def test_one_row_is_held_out_of_a_few() -> None:
    used, held = divide(3, 0.1, 0)
    assert len(held) == 1 and sorted([*used, *held]) == [0, 1, 2]
