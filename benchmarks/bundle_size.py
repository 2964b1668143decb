"""What a ladder costs on disk: a whole bundle beside one with only one of its rungs.

The bundle of one rung is what the exporter would have written: the same weights and tokenizer,
one graph, and a manifest and a latency table of that rung only. It deliberately opens no graph.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.options import Options, options, parser, run
from benchmarks.result import Cell, Provenance, Result, Table, Target
from serve.bundle import LATENCY_FILE, MANIFEST_FILE, Bundle

NAME = "bundle_size"
WANTED_RATIO = 1.15


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    rows: list[Sequence[Cell]] = []
    targets = []
    for bundle in chosen.read():
        manifest = bundle.manifest
        whole_bytes = sum(path.stat().st_size for path in bundle.folder.iterdir())
        ratios = []
        for steps in (manifest.steps[0], manifest.full_steps):
            one_bytes = one_rung_bytes(bundle, steps)
            ratios.append(whole_bytes / one_bytes)
            rows.append(
                [
                    manifest.name,
                    len(manifest.rungs),
                    whole_bytes,
                    steps,
                    one_bytes,
                    f"{ratios[-1]:.3f}",
                ]
            )
        what = f"{manifest.name}: {len(manifest.rungs)} rungs, of its smallest rung alone"
        targets.append(Target(what, max(ratios), "<=", WANTED_RATIO, "times"))
    columns = ("bundle", "rungs", "bytes", "one rung: steps", "its bytes", "ratio")
    return provenance.result(
        NAME,
        "What a ladder costs on disk",
        "Bytes of a bundle beside the bundle that would hold one of its rungs only.",
        [Table("All files of the folders are counted.", columns, rows)],
        targets,
    )


def one_rung_bytes(bundle: Bundle, steps: int) -> int:
    """Bytes of the bundle that has only this rung."""
    manifest = bundle.manifest
    rung = manifest.rung(steps)
    others = {other.graph for other in manifest.rungs} - {rung.graph}
    files = {name: entry for name, entry in manifest.files.items() if name not in others}
    # The only rung is also the largest one there is.
    alone = replace(
        manifest,
        rungs=(replace(rung, effort="max"),),
        full_steps=steps,
        default_steps=steps,
        files=files,
    )
    total = sum(entry.bytes for entry in files.values())
    total += _rewritten_bytes(bundle, MANIFEST_FILE, manifest.to_json(), alone.to_json())
    if bundle.latency is not None:
        entries = tuple(one for one in bundle.latency.entries if one.steps == steps)
        table = replace(bundle.latency, entries=entries)
        total += _rewritten_bytes(bundle, LATENCY_FILE, bundle.latency.to_json(), table.to_json())
    return total


def _rewritten_bytes(
    bundle: Bundle, name: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> int:
    """The size of a JSON file, had its content been another, written in the same way."""
    saved = len(_written(before)) - len(_written(after))
    return (bundle.folder / name).stat().st_size - saved


def _written(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
