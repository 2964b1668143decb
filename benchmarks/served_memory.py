"""Memory of a process that serves all rungs of a bundle, beside one that serves a single rung.

    python -m benchmarks.served_memory

Each case is a process of its own, with the settings of a server: it opens the bundle, warms up
every rung, and answers once at each. Beside it stands a process that only imports. HTTP is
left out: its memory would make the ratio look better than it is.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.lab import ROOT, Cell, Provenance, Result, Table, Target, parser, run
from benchmarks.server import Memory, process_memory
from serve.bundle import Bundle, open_staging, read_bundle, seal_bundle
from serve.runtime.model import OrtModel
from serve.runtime.protocol import largest_row, largest_tokens
from serve.server import keep_memory_low

# A bundle with only the last of another's rungs: what the exporter would have made of that alone.
# The same weights, tokenizer and graphs of one step, and the graph of that rung.


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


NAME = "served_memory"
WANTED_RATIO, WANTED_MB = 1.2, 60.0
NEW_TOKENS = 8
MB = 1e6


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument(
        "--one", nargs="*", type=Path, metavar="FOLDER", help="serve only this, or nothing"
    )
    parsed = made.parse_args(arguments)
    if parsed.one is not None:
        print(json.dumps(_serve(parsed.one)))
        return 0
    return run(NAME, arguments, parsed, partial(measure, parsed.bundles, parsed.quick))


def measure(folders: Sequence[Path] | None, quick: bool, provenance: Provenance) -> Result:
    rows: list[Sequence[Cell]] = []
    targets: list[Target] = []
    bare = _in_own_process()
    with tempfile.TemporaryDirectory() as own:
        bundles = _references(Path(own), quick) if folders is None else map(read_bundle, folders)
        for bundle in bundles:
            manifest = bundle.manifest
            alone = _in_own_process(one_rung(bundle, Path(own) / f"{manifest.name}-one").folder)
            whole = _in_own_process(bundle.folder)
            ratio, above_mb = whole.pss / alone.pss, (whole.pss - bare.pss) / MB
            for what, memory in ((1, alone), (len(manifest.rungs), whole)):
                above = memory.pss - bare.pss
                sizes = (memory.pss, above, memory.anonymous, memory.peak)
                rows.append([manifest.name, manifest.precision, what, *(one / MB for one in sizes)])
            what_ratio = f"{manifest.name}: {len(manifest.rungs)} rungs, of the largest alone"
            targets.append(Target(what_ratio, ratio, "<=", WANTED_RATIO, "times"))
            if manifest.precision == "int8":
                what_above = f"{manifest.name}: all rungs, above the bare process"
                targets.append(Target(what_above, above_mb, "<=", WANTED_MB, "MB"))
    rows.append(
        ["bare process", "", 0, bare.pss / MB, 0.0, bare.anonymous / MB, bare.peak / MB],
    )
    columns = ("bundle", "precision", "rungs", "PSS, MB", "above bare", "anonymous", "peak RSS")
    return provenance.result(
        NAME,
        "Memory of a served ladder",
        "Memory of a process after it opened a bundle, warmed up every rung and answered once at "
        "each; the single rung is the largest.",
        [Table("MB are millions of bytes. Bare: the same imports, no bundle.", columns, rows)],
        targets,
    )


def _references(folder: Path, quick: bool) -> list[Bundle]:
    # Here, not above: what only serves must not load torch.
    from benchmarks import reference

    steps = reference.QUICK_STEPS if quick else reference.STEPS
    origins = (reference.decoder(quick), reference.classifier(quick))
    return [
        bundle for origin in origins for bundle in reference.bundles(origin, folder, steps).values()
    ]


def _in_own_process(*folders: Path) -> Memory:
    command = [sys.executable, "-m", f"benchmarks.{NAME}", "--one", *map(str, folders)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return Memory(**json.loads(done.stdout))


def _serve(folders: Sequence[Path]) -> dict[str, int]:
    """Serve the bundle, if there is one; what this process then takes."""
    keep_memory_low()
    models = [OrtModel(read_bundle(folder)) for folder in folders]
    for model in models:
        model.warm_up()
        for rung in model.bundle.manifest.rungs:
            _answer(model, rung.steps)
    return asdict(process_memory("self"))


def _answer(model: OrtModel, steps: int) -> None:
    manifest = model.bundle.manifest
    if manifest.task == "classify":
        model.classifier(steps).run(largest_row(manifest)[None])
        return
    tokens = largest_tokens(manifest)
    batch = model.decoder(steps).open_batch()
    batch.add(tokens[:-NEW_TOKENS])
    for token in tokens[-NEW_TOKENS:]:
        batch.step(np.array([token]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
