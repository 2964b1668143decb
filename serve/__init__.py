"""The server: bundles, their runtime, the engine and the HTTP API. It never imports torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from serve.local import LocalModel


def load(folder: "Path | str", threads: int | None = None) -> "LocalModel":
    """Open a bundle to use in this process, without HTTP: `classify` and `generate`."""
    from serve import local  # imported late: it brings the runtime and the engine

    return local.load(folder, threads)
