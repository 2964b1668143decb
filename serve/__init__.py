"""The server: bundles, their runtime, the engine and the HTTP API. It never imports torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from serve.local import LocalModel


def load(folder: "Path | str", threads: int | None = None) -> "LocalModel":
    """Open a bundle to use in this process, without HTTP: `classify` and `generate`."""
    from serve.local import LocalModel  # imported late: it brings the runtime and the engine

    return LocalModel(folder, threads)
