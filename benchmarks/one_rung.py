"""A bundle with only the last of another's rungs: what the exporter would have made of that alone.

The same weights, tokenizer and graphs of one step, and the graph of that rung. It deliberately
opens no graph.
"""

import shutil
from dataclasses import replace
from pathlib import Path

from serve.bundle import Bundle, open_staging, seal_bundle


def one_rung(bundle: Bundle, folder: Path) -> Bundle:
    """That bundle, at `folder`."""
    manifest = bundle.manifest
    # The only rung is also the largest one there is.
    last = replace(manifest.rungs[-1], effort="max", dominated=False)
    others = {name for rung in manifest.rungs[:-1] for name in rung.graphs.values()}
    with open_staging(folder) as staging:
        for name in manifest.files.keys() - others:
            shutil.copyfile(bundle.folder / name, staging / name)
        return seal_bundle(
            staging,
            replace(
                manifest,
                name=f"{manifest.name}-one",
                rungs=(last,),
                full_steps=last.steps,
                default_steps=last.steps,
            ),
            folder,
        )


def folder_bytes(bundle: Bundle) -> int:
    """What all of its files take on disk."""
    return sum(path.stat().st_size for path in bundle.folder.iterdir())
