"""Writing a bundle so that it is there whole or not at all.

Knows files and renames; not how graphs are made.
"""

import fcntl
import json
import os
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve.bundle.fields import BundleError, inside_file
from serve.bundle.latency import Latency
from serve.bundle.manifest import LATENCY_FILE, MANIFEST_FILE, Manifest
from serve.bundle.reading import SEAL, Bundle, file_entry, read_bundle, seal_of
from serve.bundle.staging import remove_abandoned, rename_in


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
    _sync(staging)
    rename_in(staging, target)
    _sync(target.parent)
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
    prefix = f".{path.name}."
    remove_abandoned(path.parent, prefix)
    partial = path.with_name(prefix + uuid.uuid4().hex)
    try:
        with partial.open("w", encoding="utf-8") as file:
            with suppress(OSError):  # where there are no locks, nobody removes anything
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
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
