"""Serving: bundles, their runtime, the scheduler, the engine, the HTTP contract; never torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from serve.local import LocalModel


def load(folder: "Path | str", threads: int | None = None) -> "LocalModel":
    """Open a bundle to use it in this process: `classify` and `generate`, without HTTP."""
    from serve import local  # here, not above: it brings the runtime and the engine

    return local.load(folder, threads)
