"""Finding the bundles of a zoo."""

from pathlib import Path

import pytest

from serve.bundle import BundleError
from serve.catalog import find_bundles


def put(zoo: Path, name: str) -> Path:
    folder = zoo / name
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    return folder


def test_bundles_are_found_by_name(tmp_path: Path) -> None:
    second, first = put(tmp_path, "second"), put(tmp_path, "first")
    assert find_bundles(tmp_path) == [first, second]


def test_what_an_interrupted_export_left_is_no_bundle(tmp_path: Path) -> None:
    put(tmp_path, ".first.staging-0123456789ab")
    with pytest.raises(BundleError, match="holds no bundles"):
        find_bundles(tmp_path)
    first = put(tmp_path, "first")
    assert find_bundles(tmp_path) == [first]
