"""Reading, sealing and replacing bundles: whole or refused, never half."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve.bundle import (
    LATENCY_FILE,
    MANIFEST_FILE,
    Bundle,
    BundleError,
    Latency,
    open_staging,
    read_bundle,
    seal_bundle,
    write_latency,
)
from serve.bundle import folder as staging_folder
from tests.fixtures.tiny_bundles import build_classify, build_generate, restage


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return build_generate(tmp_path / "tiny", steps=(1, 2))


def test_a_sealed_bundle_reads_back(bundle: Bundle) -> None:
    again = read_bundle(bundle.folder)
    assert again == bundle
    assert again.manifest.steps == (1, 2)
    assert again.latency is not None and len(again.latency.entries) == 16
    assert again.graph_path(2).is_file()
    assert again.weights_path.is_file() and again.tokenizer_path.is_file()
    listed = set(again.manifest.files) | {MANIFEST_FILE, LATENCY_FILE}
    assert listed == {path.name for path in bundle.folder.iterdir()}


def test_four_rungs_cost_little_more_than_one(tmp_path: Path) -> None:
    def size(folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.glob("*.bin"))

    one = build_generate(tmp_path / "one", steps=(1,))
    four = build_generate(tmp_path / "four", steps=(1, 2, 4, 8))
    assert size(four.folder) == size(one.folder)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", ["weights.bin", "steps-1.onnx", "tokenizer.json", "README.md"])
def test_a_truncated_file_is_refused(bundle: Bundle, name: str, verify: bool) -> None:
    path = bundle.folder / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BundleError, match="it is truncated; copy or export") as refusal:
        read_bundle(bundle.folder, verify=verify)
    assert str(refusal.value).startswith(f"{path}: ")


@pytest.mark.parametrize("name", ["weights.bin", "steps-2.onnx", "tokenizer.json", "README.md"])
def test_one_altered_byte_is_refused(bundle: Bundle, name: str) -> None:
    path = bundle.folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match="its sha256 is not the manifest's") as refusal:
        read_bundle(bundle.folder)
    assert str(refusal.value).startswith(f"{path}: ")


def test_a_longer_file_is_refused(bundle: Bundle) -> None:
    with bundle.weights_path.open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(BundleError, match="it is altered"):
        read_bundle(bundle.folder, verify=False)


@pytest.mark.parametrize("instead", [lambda path: None, Path.mkdir, os.mkfifo])
def test_a_file_that_is_missing_or_no_file_is_refused(
    bundle: Bundle, instead: Callable[[Path], object]
) -> None:
    path = bundle.graph_path(2)
    path.unlink()
    instead(path)  # a pipe is not waited for
    with pytest.raises(BundleError, match=r"steps-2\.onnx: is missing from the bundle"):
        read_bundle(bundle.folder)


def test_a_link_in_place_of_a_file_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    elsewhere = bundle.weights_path.rename(tmp_path / "elsewhere.bin")
    bundle.weights_path.symlink_to(elsewhere)
    with pytest.raises(BundleError, match=r"weights\.bin: is a link; copy the file itself"):
        read_bundle(bundle.folder)


def test_a_folder_that_may_not_be_read_is_refused(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(BundleError, match=r"cannot be opened \(Permission denied\); name the"):
        read_bundle(bundle.folder)


def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"has no manifest\.json, so it is no bundle"):
        read_bundle(tmp_path)
    with pytest.raises(BundleError, match="is no folder; name the folder of a bundle"):
        read_bundle(tmp_path / "nowhere")
    with pytest.raises(BundleError, match=r"cannot be opened \(File name too long\); name the"):
        read_bundle(tmp_path / ("a" * 300))


def test_a_bundle_of_the_zoo_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(
        BundleError, match=r"name the folder of a bundle; did you mean zoo/topics\?"
    ):
        read_bundle(Path("topics"))


def test_a_folder_of_bundles_names_them(bundle: Bundle) -> None:
    message = rf"is no bundle, but holds some \({bundle.folder.name}\): name one of those"
    with pytest.raises(BundleError, match=message):
        read_bundle(bundle.folder.parent)


def test_files_of_others_in_the_folder_are_ignored(bundle: Bundle) -> None:
    (bundle.folder / ".DS_Store").write_bytes(b"x")
    assert read_bundle(bundle.folder).manifest == bundle.manifest


def test_sealing_replaces_an_older_bundle(bundle: Bundle) -> None:
    newer = replace(bundle.manifest, name="newer", files={})
    with open_staging(bundle.folder) as staging:
        restage(bundle, staging)
        (staging / "extra.txt").write_text("new")
        sealed = seal_bundle(staging, newer, bundle.folder)
    assert sealed == read_bundle(bundle.folder)
    assert sealed.manifest.name == "newer"
    assert sealed.manifest.files["extra.txt"].bytes == 3
    assert sealed.latency is None
    assert [path.name for path in bundle.folder.parent.iterdir()] == [bundle.folder.name]


def test_a_bundle_is_readable_by_other_users(bundle: Bundle) -> None:
    mask = os.umask(0o022)
    try:
        again = build_classify(bundle.folder.parent / "again")
    finally:
        os.umask(mask)
    assert again.folder.stat().st_mode & 0o055 == 0o055
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in again.folder.iterdir())


def test_sealing_never_replaces_what_is_no_bundle(bundle: Bundle, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")
    with (
        open_staging(precious) as staging,
        pytest.raises(BundleError, match="exists and is no bundle, so it is not replaced"),
    ):
        restage(bundle, staging)
        seal_bundle(staging, bundle.manifest, precious)
    assert (precious / "thesis.txt").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


def test_an_incomplete_staging_folder_is_not_sealed(bundle: Bundle, tmp_path: Path) -> None:
    target = tmp_path / "new"
    with (
        open_staging(target) as staging,
        pytest.raises(BundleError, match=r"files does not list weights\.bin"),
    ):
        restage(bundle, staging)
        (staging / "weights.bin").unlink()
        seal_bundle(staging, bundle.manifest, target)
    assert not target.exists()


def test_folders_and_links_are_not_sealed(bundle: Bundle, tmp_path: Path) -> None:
    for make in (Path.mkdir, lambda path: path.symlink_to(bundle.weights_path)):
        with (
            open_staging(tmp_path / "new") as staging,
            pytest.raises(BundleError, match="is no plain file; a bundle is a flat folder"),
        ):
            restage(bundle, staging)
            make(staging / "inner")
            seal_bundle(staging, bundle.manifest, tmp_path / "new")


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failing_rename_leaves_the_older_bundle(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    rename, calls = os.rename, 0

    def fail_once(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(5, "disk on fire")
        rename(source, target)

    monkeypatch.setattr(staging_folder, "exchange", lambda *_: False)
    with open_staging(bundle.folder) as staging:
        restage(bundle, staging)
        monkeypatch.setattr(os, "rename", fail_once)
        with pytest.raises(OSError, match="disk on fire"):
            seal_bundle(staging, replace(bundle.manifest, name="newer"), bundle.folder)
    assert read_bundle(bundle.folder).manifest.name == bundle.manifest.name


def test_a_process_killed_while_sealing_leaves_no_bundle(bundle: Bundle, tmp_path: Path) -> None:
    target = tmp_path / "killed" / "bundle"
    script = (
        "import os, shutil, sys\n"
        "from pathlib import Path\n"
        "from serve.bundle import open_staging, read_bundle, seal_bundle\n"
        "source, target = map(Path, sys.argv[1:])\n"
        "os.replace = lambda *_: os._exit(9)\n"  # dies just before the manifest appears
        "bundle = read_bundle(source)\n"
        "with open_staging(target) as staging:\n"
        "    for name in bundle.manifest.files:\n"
        "        shutil.copy(source / name, staging / name)\n"
        "    seal_bundle(staging, bundle.manifest, target)\n"
    )
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", script, bundle.folder, target], cwd=root)
    assert killed.returncode == 9
    assert not target.exists()
    (left_over,) = target.parent.iterdir()
    with pytest.raises(BundleError, match=r"has no manifest\.json"):
        read_bundle(left_over)


def test_latency_is_replaced_without_touching_the_rest(bundle: Bundle) -> None:
    assert bundle.latency is not None
    slower = replace(bundle.latency, measured_at="2026-02-02T00:00:00+00:00")
    write_latency(bundle.folder, slower)
    again = read_bundle(bundle.folder)
    assert again.latency == slower
    assert again.manifest == bundle.manifest
    with pytest.raises(BundleError, match="is no bundle"):
        write_latency(bundle.folder.parent, slower)


def _first(value: dict[str, Any], key: str, to: object) -> None:
    value["entries"][0][key] = to


LATENCY_CASES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown key": (lambda v: v.update(color=1), "color is not a known key"),
    "later schema": (lambda v: v.update(schema_version=2), "schema_version is 2"),
    "no machine": (lambda v: v.pop("machine"), "machine is missing"),
    "no time": (lambda v: v.update(measured_at="yesterday"), "measured_at is 'yesterday'"),
    "no such rung": (lambda v: _first(v, "steps", 3), "entries[0].steps is 3, which tiny"),
    "another task": (lambda v: _first(v, "kind", "classify"), "entries[0].kind is classify"),
    "unknown kind": (lambda v: _first(v, "kind", "train"), "entries[0].kind must be 'classify'"),
    "negative time": (lambda v: _first(v, "median_ms", -1), "entries[0].median_ms must be at"),
    "p95 below median": (lambda v: _first(v, "p95_ms", 0.0), "entries[0].median_ms is 0.1, above"),
    "no rows": (lambda v: _first(v, "batch", 0), "entries[0].batch must be at least 1"),
    "repeated": (lambda v: v["entries"].append(v["entries"][0]), "entries[16] repeats the steps"),
}


@pytest.mark.parametrize("case", LATENCY_CASES)
def test_malformed_latency_is_refused(bundle: Bundle, case: str) -> None:
    change, message = LATENCY_CASES[case]
    assert bundle.latency is not None
    value = bundle.latency.to_json()
    assert Latency.from_json(value) == bundle.latency
    change(value)
    (bundle.folder / LATENCY_FILE).write_text(json.dumps(value))
    with pytest.raises(BundleError) as refusal:
        read_bundle(bundle.folder)
    sentence = str(refusal.value)
    assert sentence.startswith(f"{bundle.folder / LATENCY_FILE}: {message}")
    assert "delete the file" in sentence


def test_a_bundle_without_latency_is_whole(bundle: Bundle) -> None:
    (bundle.folder / LATENCY_FILE).unlink()
    assert read_bundle(bundle.folder).latency is None


def test_reading_a_bundle_loads_no_runtime_and_no_torch() -> None:
    script = (
        "import sys; import serve.bundle\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=True)
