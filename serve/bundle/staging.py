"""Folders in which bundles are made, each beside its target; those of dead writers are removed.

Whoever makes a bundle holds a lock on its folder, which the system lets go of however the process
ends. Knows names, locks and renames; not what a bundle is.
"""

import ctypes
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from serve.bundle.fields import BundleError

_STAGING, _REPLACED = "staging", "replaced"
# Of Linux: both names are found from the working folder, and change places.
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
    """Give a folder the name of its target; another folder there gives way and is removed."""
    if target.exists():
        if exchange(staging, target):
            shutil.rmtree(staging, ignore_errors=True)
        else:
            _replace(staging, target)
        return
    _rename(staging, target)


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove what begins with this name and nobody holds a lock on."""
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
    """A folder, and the open lock on it."""
    while True:
        staging = _beside(target, _STAGING)
        staging.mkdir()
        lock = os.open(staging, os.O_RDONLY)
        with suppress(OSError):  # file systems without locks: nobody removes anything there
            fcntl.flock(lock, fcntl.LOCK_EX)
        if staging.exists():  # else somebody has cleared it up before it was locked
            return staging, lock
        os.close(lock)


def _clear_up(target: Path) -> None:
    """What writers left behind that died; an older bundle that one had put aside is put back."""
    aside = f".{target.name}.{_REPLACED}-"
    if not target.exists():
        for path in target.parent.iterdir():
            if path.name.startswith(aside):
                os.rename(path, target)
                break
    remove_abandoned(target.parent, f".{target.name}.{_STAGING}-")
    remove_abandoned(target.parent, aside)


def _replace(staging: Path, target: Path) -> None:
    """In two steps, between which there is no bundle."""
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
