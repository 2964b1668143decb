"""A process that opens bundles as a server does, and says what came of each.

For `benchmarks.corruption` and `benchmarks.kills`: a bundle may crash it. Reads a folder a line,
and answers with a line of JSON.
"""

import hashlib
import json
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np

from serve.bundle import BundleError
from serve.catalog import Served, open_catalog
from serve.runtime import open_model
from serve.runtime.protocol import FloatArray, RowArray, largest_row

# Of address space, which a runtime takes more of than it ever fills.
MEMORY_LIMIT_BYTES = 4 << 30
TEXT = "the quick fox"
MORE_TOKENS = 2


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where libraries in C++ may write what they like
    for line in sys.stdin:
        found = opened(Path(json.loads(line)))
        print(json.dumps(found | {"peak_kib": _peak_kib()}), file=answers, flush=True)
    return 0


def _peak_kib() -> int:
    """The most memory of this process; `ru_maxrss` counts that of whoever started it too."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def opened(folder: Path) -> dict[str, Any]:
    """What came of loading a bundle, warming it up and asking it something."""
    stage = "loading"
    try:
        (served,) = open_catalog([folder], threads=1)
        stage = "answering"
        return {"outcome": "answered", "answer": answer(served)}
    except BundleError as error:
        named = bool(error.file or error.field)
        return {"outcome": "refused", "message": str(error), "named": named, "stage": stage}
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the panics of a library in Rust are no Exceptions
        message = f"{type(error).__name__}: {error}"
        return {"outcome": "raised", "message": message, "stage": stage}


def answer(served: Served) -> str:
    """A digest of all that a caller could see of the model, but for its card and latency."""
    manifest = served.manifest
    facts = {**manifest.to_json(), "card": None, "provenance": None, "files": None}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for steps in manifest.steps:
        served.measured(steps)
        for logits in (*_asked(served, steps), *_elsewhere(served, steps)):
            digest.update(repr(logits.shape).encode() + logits.tobytes())
    return digest.hexdigest()


def _asked(served: Served, steps: int) -> list[FloatArray]:
    """What a request is answered from."""
    manifest, model, rows = served.manifest, served.model, _rows(served)
    if manifest.labelled:
        return [model.classifier(steps).run(rows)]
    prompt = rows[0].astype(np.int64)
    writer = model.decoder(steps) if manifest.task == "generate" else model.translator(steps)
    batch = writer.open_batch()
    logits = [batch.add(prompt)]
    for _ in range(MORE_TOKENS):
        after = batch.step(prompt[:1])[0]
        served.codec.decode([int(after.argmax())])
        logits.append(after)
    return logits


def _elsewhere(served: Served, steps: int) -> list[FloatArray]:
    """What the graphs give that another device or an early answer would run."""
    manifest, rows = served.manifest, _rows(served)
    if manifest.task == "translate":
        return []
    opened = open_model(served.bundle, threads=1)
    logits = [opened.unrolled(steps).forward(rows)]
    if manifest.labelled and manifest.step is not None:
        logits.append(opened.step_classifier(steps).run(rows))
    return logits


def _rows(served: Served) -> RowArray:
    manifest = served.manifest
    if served.text is None:
        row = largest_row(manifest)
        return np.linspace(-1, 1, row.size, dtype=np.float32).reshape(1, *row.shape)
    if manifest.task == "tag":
        return largest_row(manifest)[None]
    if manifest.task == "classify":
        tokens = served.text.encode_input(TEXT, truncate=True).tokens
    else:
        tokens = served.text.encode_prompt(TEXT)
    return np.array([tokens], dtype=np.int64)


if __name__ == "__main__":
    sys.exit(main())
