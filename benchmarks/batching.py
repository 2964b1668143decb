"""Classifications a second of 32 clients, as a share of what the runtime alone computes.

    python -m benchmarks.batching [--bundles FOLDER ...]

Clients ask again as soon as they have an answer, over HTTP, from a process of their own. Beside
them stands the same graph run without a server on the same rows, at the batch size that is best for
it. Once for models, and once for a stub that waits 5 ms a call and 0.5 ms a row, which leaves the
machine to the server and the clients.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks import reference
from benchmarks.client import Load, load
from benchmarks.lab import (
    Cell,
    Options,
    Provenance,
    Result,
    Table,
    Target,
    options,
    parser,
    percentile,
    run,
)
from benchmarks.server import running_server, running_stub
from benchmarks.texts import text_of
from serve.bundle import Bundle
from serve.inputs.text import TextCodec
from serve.runtime import open_model

NAME = "batching"
CLIENTS, STEPS, BATCH, WANTED = 32, 4, 16, 0.9
CALL_MS, ROW_MS = 5.0, 0.5
TOKENS = 128
_BATCHES = (1, 2, 4, 8, 16, 32)


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    seconds, rounds = (0.5, 1) if chosen.quick else (8.0, 5)
    rows: list[Sequence[Cell]] = []
    targets = []
    ideal = BATCH / (CALL_MS + BATCH * ROW_MS) * 1000
    zoo = chosen.read("classify")
    with running_stub(zoo[0].folder, CALL_MS, ROW_MS) as server:
        body = _body(zoo[0], text_of(TextCodec(zoo[0]), 12), zoo[0].manifest.full_steps)
        found = [load(server, "/v1/classify", [body], CLIENTS, seconds) for _ in range(rounds)]
    share = _row(rows, f"stub, {CALL_MS:g} ms + {ROW_MS:g} ms a row", [ideal] * rounds, found)
    targets.append(Target("stub: share of an ideal worker", share, ">=", WANTED, "times"))
    with tempfile.TemporaryDirectory() as folder:
        built = build(chosen.quick, Path(folder))
        for bundle in (built, *zoo):
            codec = TextCodec(bundle)
            longest = min(TOKENS, bundle.manifest.text_input.max_tokens)
            # The tokens of the built one are single characters, and no space among them.
            text = "A" * longest if bundle is built else text_of(codec, longest)
            share = _row(rows, bundle.manifest.name, *_both(bundle, text, seconds, rounds))
            if bundle is built:
                what = f"{bundle.manifest.name}: share of the bare runtime"
                targets.append(Target(what, share, ">=", WANTED, "times"))
    columns = ("what", "ideal, rows/s", "over HTTP, rows/s", "share", "p50 ms", "p99 ms", "errors")
    return provenance.result(
        NAME,
        "Many clients that classify",
        f"{CLIENTS} clients over HTTP on the machine of the server, one text of about {TOKENS} "
        "tokens a request (the stub: 12); texts of models at their full steps. Medians of rounds; "
        "the share is the median of those within each round. Small models are bound by HTTP, "
        "which takes the clients' part of the processor too.",
        [Table("", columns, rows)],
        targets,
    )


def build(quick: bool, folder: Path) -> Bundle:
    """A model that is large enough for its time, not that of HTTP, to be what counts."""
    return reference.bundles(reference.classifier(quick), folder, (STEPS,))["fp32"]


def _both(bundle: Bundle, text: str, seconds: float, rounds: int) -> tuple[list[float], list[Load]]:
    """Rows a second of the bare runtime, and what clients got, in turn."""
    codec = TextCodec(bundle)
    steps = bundle.manifest.full_steps
    tokens = np.array(codec.encode_input(text, truncate=True).tokens, np.int64)
    model = open_model(bundle)
    model.warm_up()  # as the server does, which finds how many threads are best here
    classifier = model.classifier(steps)
    calls = {rows: partial(classifier.run, np.tile(tokens, (rows, 1))) for rows in _BATCHES}
    best = min(calls, key=lambda rows: _call_s(calls[rows], 0.3) / rows)
    ideal, found = [], []
    body = _body(bundle, text, steps)
    with running_server([bundle.folder]) as server:
        for _ in range(rounds):
            ideal.append(best / _call_s(calls[best], seconds / 2))
            found.append(load(server, "/v1/classify", [body], CLIENTS, seconds))
    return ideal, found


def _call_s(call: Callable[[], object], seconds: float) -> float:
    """Seconds a call takes, in the mean over some time."""
    call()
    begun_s, count = time.perf_counter(), 0
    while (spent_s := time.perf_counter() - begun_s) < seconds or not count:
        call()
        count += 1
    return spent_s / count


def _row(rows: list[Sequence[Cell]], what: str, ideal: list[float], found: list[Load]) -> float:
    share = median([one.per_s / bare for one, bare in zip(found, ideal, strict=True)])
    latencies_ms = [1000 * latency for one in found for latency in one.latencies_s]
    p50, p99 = (percentile(latencies_ms, share) for share in (0.5, 0.99))
    errors = sum(one.errors for one in found)
    per_s = median([one.per_s for one in found])
    rows.append([what, median(ideal), per_s, share, p50, p99, errors])
    return share


def _body(bundle: Bundle, text: str, steps: int) -> bytes:
    return json.dumps({"model": bundle.manifest.name, "input": text, "steps": steps}).encode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
