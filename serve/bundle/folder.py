"""The folder of a bundle: reading and checking it, staging a new one, sealing it.

The size and hash of every file are checked; no graph is opened.
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serve.bundle.manifest import (
    LATENCY_FILE,
    MANIFEST_FILE,
    SCHEMA_VERSION,
    FileEntry,
    Latency,
    Manifest,
)
from serve.bundle.part import BundleError, check_version, inside_file, read_json

SEAL = "seal"
_ALTERED = "is altered: its sha256 is not the manifest's; copy or export the bundle again"
_MEASURE_AGAIN = "measure the latency again, or delete the file, since it is optional"


@dataclass(frozen=True, slots=True)
class Bundle:
    """An exported model: a folder that has been checked."""

    folder: Path
    manifest: Manifest
    latency: Latency | None

    def __post_init__(self) -> None:
        if self.latency is None:
            return
        kinds = ("classify",) if self.manifest.labelled else ("prefill", "decode")
        for index, entry in enumerate(self.latency.entries):
            where = f"entries[{index}]"
            with inside_file(self.folder / LATENCY_FILE):
                if entry.steps not in self.manifest.steps:
                    raise BundleError(
                        f"is {entry.steps}, which {self.manifest.name} does not offer; "
                        f"{_MEASURE_AGAIN}",
                        field=f"{where}.steps",
                    )
                if entry.kind not in kinds:
                    raise BundleError(
                        f"is {entry.kind}, which {self.manifest.name} never does; {_MEASURE_AGAIN}",
                        field=f"{where}.kind",
                    )

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / self.manifest.text_tokenizer.file

    @property
    def chat_template_path(self) -> Path | None:
        file = self.manifest.text_tokenizer.chat_template
        return None if file is None else self.folder / file

    @property
    def weights_path(self) -> Path:
        return self.folder / self.manifest.weights

    def graph_path(self, steps: int) -> Path:
        return self.folder / self.manifest.rung(steps).graph


def read_bundle(folder: Path, verify: bool = True, latency: bool = True) -> Bundle:
    """The bundle in a folder. Refuses a malformed manifest and missing or truncated files.

    With `verify` every file is hashed, which finds any change; otherwise only sizes are checked.
    Without `latency` the latency table is not read, for callers that will measure it again.
    """
    folder = Path(folder)
    try:
        there = folder.is_dir()
        has_manifest = (folder / MANIFEST_FILE).is_file()
    except OSError as error:  # a name that is too long, or a folder that may not be read
        raise BundleError(
            f"cannot be opened ({error.strerror}); name the folder of a bundle", file=str(folder)
        ) from error
    if not there:
        near = Path("zoo") / folder
        meant = f"; did you mean {near}?" if (near / MANIFEST_FILE).is_file() else ""
        raise BundleError(f"is no folder; name the folder of a bundle{meant}", file=str(folder))
    if not has_manifest:
        held = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST_FILE}"))
        if held:
            raise BundleError(
                f"is no bundle, but holds some ({', '.join(held)}): name one of those, or to serve "
                f"all of them: stepdial serve --zoo {folder}",
                file=str(folder),
            )
        raise BundleError(
            f"has no {MANIFEST_FILE}, so it is no bundle; make one with: stepdial export",
            file=str(folder),
        )
    value = read_json(folder / MANIFEST_FILE)
    with inside_file(folder / MANIFEST_FILE):
        manifest = Manifest.from_json(_unsealed(value))
    for name, entry in manifest.files.items():
        check_file(folder / name, entry, verify)
    return Bundle(folder, manifest, _read_latency(folder / LATENCY_FILE) if latency else None)


def seal_of(value: dict[str, Any]) -> str:
    """The sha256 of a manifest's members, whatever their order and spacing."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # Half a surrogate pair is refused later, by the rule that names its member.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _unsealed(value: object) -> object:
    """The manifest without its seal, which must be right."""
    if not isinstance(value, dict) or "schema_version" not in value:
        return value  # refused by the manifest's own rules
    check_version(value["schema_version"], SCHEMA_VERSION)
    members = {key: item for key, item in value.items() if key != SEAL}
    if value.get(SEAL) != seal_of(members):
        raise BundleError(
            "is missing or wrong: the manifest was changed after it was written; copy or export "
            "the bundle again",
            field=SEAL,
        )
    return members


def check_file(path: Path, expected: FileEntry, verify: bool) -> None:
    """Refuse a file that is not the one that was sealed."""
    with inside_file(path):
        if path.is_symlink():  # runtimes refuse links, which may lead out of the bundle
            raise BundleError("is a link; copy the file itself into the bundle")
        if not path.is_file():
            raise BundleError("is missing from the bundle; copy or export the bundle again")
        try:
            size = path.stat().st_size
            if size != expected.bytes:
                raise BundleError(
                    f"has {size} bytes instead of {expected.bytes}: it is "
                    f"{'truncated' if size < expected.bytes else 'altered'}; copy or export the "
                    "bundle again"
                )
            if verify and _sha256(path) != expected.sha256:
                raise BundleError(_ALTERED)
        except OSError as error:
            raise BundleError(f"cannot be read ({error.strerror or error})") from None


def read_checked(path: Path, expected: FileEntry) -> bytes:
    """The bytes of a sealed file, exactly those that were checked."""
    check_file(path, expected, verify=False)
    with inside_file(path):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BundleError(f"cannot be read ({error.strerror or error})") from None
        if hashlib.sha256(content).hexdigest() != expected.sha256:
            raise BundleError(_ALTERED)
    return content


def link_or_copy(source: Path, target: Path) -> None:
    """The same file at another place; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def file_entry(path: Path) -> FileEntry:
    """The entry for a file as it is now."""
    return FileEntry(sha256=_sha256(path), bytes=path.stat().st_size)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_latency(path: Path) -> Latency | None:
    if not path.exists():
        return None
    if not path.is_file():  # reading a pipe would never end
        raise BundleError(f"is no file; {_MEASURE_AGAIN}", file=str(path))
    try:
        value = read_json(path)
        with inside_file(path):
            return Latency.from_json(value)
    except BundleError as error:
        problem = f"{error.problem.partition('; ')[0]}; {_MEASURE_AGAIN}"
        raise BundleError(problem, field=error.field, file=error.file) from None


# Staging folders lie beside their target. Whoever writes one holds a lock on it, which the system
# releases however the process ends; folders without a lock are left-overs and are removed.


_STAGING, _REPLACED = "staging", "replaced"
# Linux: both names are relative to the working directory, and change places.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def open_staging(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, to be filled and sealed; removed if it was not sealed."""
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    _clear_up(target)
    staging, lock = _new_staging(target)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def rename_in(staging: Path, target: Path) -> None:
    """Rename a folder to its target; an older folder there is removed."""
    if target.exists():
        if exchange(staging, target):
            shutil.rmtree(staging, ignore_errors=True)
        else:
            _replace(staging, target)
        return
    _rename(staging, target)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove folders whose names begin like this and that nobody holds a lock on."""
    for path in folder.iterdir():
        if path.name.startswith(prefix):
            with suppress(OSError):
                lock = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                finally:
                    os.close(lock)


def _new_staging(target: Path) -> tuple[Path, int]:
    """A new staging folder, and the open lock on it."""
    while True:
        staging = _beside(target, _STAGING)
        staging.mkdir()
        lock = os.open(staging, os.O_RDONLY)
        with suppress(OSError):  # file systems without locks: nobody removes anything there
            fcntl.flock(lock, fcntl.LOCK_EX)
        if staging.exists():  # removed by another process before it was locked
            return staging, lock
        os.close(lock)


def _clear_up(target: Path) -> None:
    """Remove what dead writers left; an older bundle that one had put aside is put back."""
    aside = f".{target.name}.{_REPLACED}-"
    if not target.exists():
        for path in target.parent.iterdir():
            if path.name.startswith(aside):
                os.rename(path, target)
                break
    remove_abandoned(target.parent, f".{target.name}.{_STAGING}-")
    remove_abandoned(target.parent, aside)


def _replace(staging: Path, target: Path) -> None:
    """Replace in two steps, between which there is no bundle."""
    aside = _beside(target, _REPLACED)
    os.rename(target, aside)
    try:
        _rename(staging, target)
    except (OSError, BundleError):
        os.rename(aside, target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _rename(staging: Path, target: Path) -> None:
    try:
        os.rename(staging, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise BundleError(
            f"is on another file system than {target}; stage the bundle beside its target",
            file=str(staging),
        ) from None


def _beside(target: Path, purpose: str) -> Path:
    return target.with_name(f".{target.name}.{purpose}-{uuid.uuid4().hex[:12]}")


def seal_bundle(staging: Path, manifest: Manifest, target: Path) -> Bundle:
    """Hash the files in `staging` into the manifest, sync everything, and rename it to `target`.

    An older bundle at `target` is replaced; anything else there is refused. Both must be on one
    file system, since only a rename is atomic: use `open_staging(target)`.
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
            with suppress(OSError):  # without locks nobody removes anything
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
