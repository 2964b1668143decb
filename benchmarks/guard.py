"""This checkout beside another, over HTTP: nothing that a user sees may become slower.

    git worktree add ../before COMMIT
    python -m benchmarks.guard --before ../before --bundles zoo/topics zoo/shakespeare ...

Both serve the same bundles, which the older one has to be able to read, with default settings, at
the same time. Each measurement is made of both in turn, again and again; ratios are medians of
rounds, above 1 where this checkout is better.
"""

import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.client import Shot, arrivals, burst, fire, load
from benchmarks.lab import (
    Cell,
    Options,
    Provenance,
    Result,
    Table,
    interleave,
    median_ratio,
    options,
    parser,
    run,
)
from benchmarks.server import Server, started
from benchmarks.texts import PARAGRAPHS, PROMPT
from serve.bundle import Bundle
from serve.errors import ServeError
from serve.inputs.text import TextCodec

NAME = "guard"
CLIENTS, ROWS, TOKENS = 32, 16, 64
OVERLOAD, DEADLINE_S = 4, 0.25
_ROUND_S, _OVERLOAD_S, _ROUNDS = 2.0, 8.0, 5
_NOW, _BEFORE = "now", "before"


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--before", type=Path, required=True, help="the other checkout")
    parsed = made.parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed), parsed.before.resolve()))


def measure(chosen: Options, before: Path, provenance: Provenance) -> Result:
    bundles = chosen.read()
    rows: list[Sequence[Cell]] = []
    folders = [str(one.folder.resolve()) for one in bundles]
    serve = partial(started, "serve", *folders, "--port", "0")
    with serve() as now, serve(cwd=before, variables={"PYTHONPATH": str(before)}) as older:
        servers = {_NOW: now, _BEFORE: older}
        rows += _memory("memory idle, MB", servers)
        for bundle in bundles:
            for what, lower, sample in _samples(bundle, older, chosen.quick):
                calls = {name: partial(sample, server) for name, server in servers.items()}
                found = interleave(calls, 0.0, 2 if chosen.quick else _ROUNDS)
                rows.append(_row(f"{bundle.manifest.name}: {what}", lower, found))
        rows += _memory("memory after that, MB", servers)
    at = subprocess.run(
        ["git", "-C", str(before), "rev-parse", "--short", "HEAD"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return provenance.result(
        NAME,
        "Beside an earlier version",
        f"This version beside {at}, both with default settings and the same bundles, in turn.",
        [Table("`ratio`: above 1 where this version is better.", _COLUMNS, rows)],
        [],
    )


_COLUMNS = ("what", "now", "before", "ratio", "least", "most", "rounds")


def _row(what: str, lower: bool, found: dict[str, list[float]]) -> list[Cell]:
    good, bad = (_BEFORE, _NOW) if lower else (_NOW, _BEFORE)
    ratios = [one / other for one, other in zip(found[good], found[bad], strict=True)]
    print(what, *(f"{name} {median(found[name]):.4g}" for name in found), file=sys.stderr)
    return [
        what,
        *(median(found[name]) for name in (_NOW, _BEFORE)),
        median_ratio(found[good], found[bad]),
        *(min(ratios), max(ratios), len(ratios)),
    ]


def _memory(what: str, servers: dict[str, Server]) -> list[Sequence[Cell]]:
    found = {name: [server.memory().pss / 1e6] for name, server in servers.items()}
    return [_row(what, True, found)]


def _samples(
    bundle: Bundle, older: Server, quick: bool
) -> Iterator[tuple[str, bool, Callable[[Server], float]]]:
    """What is measured of a bundle, whether less is better, and how."""
    name, full = bundle.manifest.name, bundle.manifest.full_steps
    seconds, over_s = (0.3, 1.0) if quick else (_ROUND_S, _OVERLOAD_S)
    if bundle.manifest.task == "classify":
        for steps in (1, full):
            asked = [{"model": name, "input": text, "steps": steps} for text in PARAGRAPHS]
            many = partial(_per_s, "/v1/classify", asked, CLIENTS, seconds)
            yield f"answers a second, {CLIENTS} clients, {steps} steps", False, many
            alone = partial(_alone_ms, "/v1/classify", asked, seconds)
            yield f"ms of an answer, one client, {steps} steps", True, alone
        sustained = {"model": name, "input": PARAGRAPHS[0], "steps": full}
        rate = OVERLOAD * burst(older, "/v1/classify", [sustained] * 128)
        what = f"in time at {OVERLOAD} times the load, deadline {1000 * DEADLINE_S:.0f} ms, %"
        yield what, False, partial(_in_time, name, rate, over_s)
        return
    prompt = _known(bundle)
    tokens = min(16 if quick else TOKENS, bundle.manifest.text_input.max_tokens - len(prompt))
    ladder = [steps for steps in bundle.manifest.steps if steps <= full]
    # Mixed: clients of all step counts at once.
    kinds = {f"1 row, {full} steps": ([full], 1), f"{ROWS} rows, {full} steps": ([full], ROWS)}
    kinds["1 row, 1 step"] = ([ladder[0]], 1)
    kinds[f"{ROWS} rows of mixed steps"] = (ladder, ROWS)
    for what, (counts, clients) in kinds.items():
        asked = [
            {"model": name, "prompt": prompt, "steps": steps, "max_tokens": tokens, "seed": seed}
            for seed, steps in enumerate(itertools.islice(itertools.cycle(counts), clients))
        ]
        yield f"tokens a second, {what}", False, partial(_tokens_per_s, asked, tokens)


def _known(bundle: Bundle) -> str:
    """A prompt of characters that the model knows."""
    try:
        TextCodec(bundle).encode_prompt(PROMPT)
    except ServeError:
        return "HELLO"
    return PROMPT


def _bodies(asked: Sequence[dict[str, object]]) -> list[bytes]:
    return [json.dumps(one).encode() for one in asked]


def _per_s(
    path: str, asked: Sequence[dict[str, object]], clients: int, seconds: float, server: Server
) -> float:
    found = load(server, path, _bodies(asked), clients, seconds)
    assert found.answers and not found.errors, f"{found.errors} errors"
    return found.per_s


def _alone_ms(
    path: str, asked: Sequence[dict[str, object]], seconds: float, server: Server
) -> float:
    return 1000 * median(load(server, path, _bodies(asked), 1, seconds).latencies_s)


def _tokens_per_s(asked: Sequence[dict[str, object]], tokens: int, server: Server) -> float:
    """Each client asks once, all at the same time."""
    shots = [Shot(0.0, dict(one)) for one in asked]
    begun_s = time.perf_counter()
    fire(server, "/v1/generate", shots, patience_s=120.0)
    taken_s = time.perf_counter() - begun_s
    written: list[int] = [
        shot.read["usage"]["completion_tokens"] for shot in shots if shot.status == 200
    ]
    assert len(written) == len(shots), [shot.status for shot in shots]
    return sum(written) / taken_s


def _in_time(name: str, rate: float, seconds: float, server: Server) -> float:
    """The share of requests that come by chance."""
    chance = random.Random(7)
    body = {"model": name, "deadline_ms": 1000 * DEADLINE_S}
    shots = [
        Shot(due_s, body | {"input": chance.choice(PARAGRAPHS)})
        for due_s in arrivals(rate, seconds, chance)
    ]
    fire(server, "/v1/classify", shots, patience_s=4 * DEADLINE_S)
    good = sum(shot.status == 200 and shot.latency_s <= DEADLINE_S for shot in shots)
    return 100 * good / len(shots)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
