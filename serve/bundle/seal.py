"""Writing a bundle so that it is there whole or not at all.

Knows files and renames; not how graphs are made.
"""

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve.bundle.fields import BundleError, inside_file
from serve.bundle.latency import Latency
from serve.bundle.manifest import LATENCY_FILE, MANIFEST_FILE, Manifest
from serve.bundle.reading import SEAL, Bundle, file_entry, read_bundle, seal_of


@contextmanager
def open_staging(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, to be filled and sealed; removed if it was not sealed."""
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = _beside(target, "staging")
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def seal_bundle(staging: Path, manifest: Manifest, target: Path) -> Bundle:
    """Hash the files in `staging` into the manifest, make all durable, rename it to `target`.

    An older bundle at `target` is replaced; anything else there is refused. The folders must be
    on one file system, since only a rename is atomic: `open_staging(target)` gives such a folder.
    """
    target = Path(os.path.realpath(target))
    _check_replaceable(target)
    entries = {}
    for path in sorted(staging.iterdir()):
        if path.is_symlink() or not path.is_file():
            raise BundleError("is no plain file; a bundle is a flat folder", file=str(path))
        if path.name not in (MANIFEST_FILE, LATENCY_FILE):
            entries[path.name] = file_entry(path)
        _sync(path)
    with inside_file(staging / MANIFEST_FILE):
        sealed = Manifest.from_json(replace(manifest, files=entries).to_json())
    value = sealed.to_json()
    _write_json(staging / MANIFEST_FILE, value | {SEAL: seal_of(value)})
    read_bundle(staging)
    _rename_in(staging, target)
    return read_bundle(target, verify=False)


def write_latency(folder: Path, latency: Latency) -> None:
    """Write or replace the latency table of a bundle, atomically."""
    if not (folder / MANIFEST_FILE).is_file():
        raise BundleError("is no bundle: it has no manifest.json", file=str(folder))
    with inside_file(folder / LATENCY_FILE):
        checked = Latency.from_json(latency.to_json())
    _write_json(folder / LATENCY_FILE, checked.to_json())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_text(text, encoding="utf-8")
        _sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync(path.parent)


def _check_replaceable(target: Path) -> None:
    if not os.path.lexists(target):
        return
    is_bundle = (target / MANIFEST_FILE).is_file()
    if not target.is_dir() or not (is_bundle or not any(target.iterdir())):
        raise BundleError(
            "exists and is no bundle, so it is not replaced; remove it or name another target",
            file=str(target),
        )


def _rename_in(staging: Path, target: Path) -> None:
    aside = _beside(target, "replaced")
    _sync(staging)
    replaces = target.exists()
    if replaces:
        os.rename(target, aside)
    try:
        os.rename(staging, target)
    except OSError as error:
        if replaces:
            os.rename(aside, target)
        if error.errno == errno.EXDEV:
            raise BundleError(
                f"is on another file system than {target}; stage the bundle beside its target",
                file=str(staging),
            ) from None
        raise
    _sync(target.parent)
    if replaces:
        shutil.rmtree(aside, ignore_errors=True)


def _beside(target: Path, purpose: str) -> Path:
    return target.with_name(f".{target.name}.{purpose}-{uuid.uuid4().hex[:12]}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        # Some file systems cannot sync a folder; the rename is still atomic there.
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)
