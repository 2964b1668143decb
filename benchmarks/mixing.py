"""Rungs that share calls, beside one unrolled graph and batch per step count.

16 clients ask in a closed loop, 4 for each of 1, 2, 4 and 8 steps, for 200 tokens each, of the
reference decoder with random weights. Ours is the engine, without HTTP. The other way is a bare
loop over four sessions, each with its graph, its weights and its batch of 4, one token of each in
turn; it has no engine, no scheduler and no sampling but the argmax. It runs with one thread a call
and with all, as onnxruntime uses them unless told otherwise; what is faster counts. All in turn in
one process.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import reference
from benchmarks.awake import awake
from benchmarks.closed_loop import ClosedLoop
from benchmarks.options import parser, run
from benchmarks.result import Cell, Provenance, Result, Table, Target
from benchmarks.rounds import interleave, median, median_ratio
from benchmarks.unrolled import UnrolledRows, open_unrolled
from serve.bundle import Bundle, Precision
from serve.catalog import Served
from serve.runtime import open_model
from serve.runtime.protocol import FloatArray, IntArray
from serve.runtime.session import usable_cores

NAME = "mixing"
STEPS, QUICK_STEPS = (1, 2, 4, 8), (1, 2)
ROWS_A_RUNG, TOKENS, PROMPT_TOKENS = 4, 200, 16
MIXED, UNROLLED, UNIFORM = "rungs mixed", "a graph and batch per rung", "16 of the same rung"
OURS, ONE, ALL = "ours", "unrolled, 1 thread", "unrolled, all threads"
_REST_S = 0.1  # threads of the other way that look for more to do have given up by then: 40 ms
LEAST: dict[Precision, float] = {"fp32": 1.5, "int8": 1.3}
Rates = dict[int, float]  # tokens a second, by steps


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--threads", type=int, help="of a call (default: every core)")
    parsed = made.parse_args(arguments)
    threads = parsed.threads or usable_cores()
    return run(NAME, arguments, parsed, partial(measure, parsed.quick, threads))


def measure(quick: bool, threads: int, provenance: Provenance) -> Result:
    steps = QUICK_STEPS if quick else STEPS
    tables: list[Table] = []
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as folder:
        origin = reference.decoder(quick)
        for small_caches in (False, True):
            made = reference.bundles(origin, Path(folder), steps, small_caches)
            for precision, bundle in made.items():
                kind, unrolled = bundle.manifest.precision_in_words, Path(folder) / "unrolled"
                rates, pairs = _measure(bundle, steps, unrolled, threads, quick)
                tables += [_table(kind, rates), _pairs_table(kind, pairs)]
                targets += _targets(kind, LEAST[precision], steps, rates, pairs)
    return provenance.result(
        NAME,
        "Requests of different steps in one batch",
        f"{ROWS_A_RUNG} clients for each step count, {TOKENS} tokens an answer, {threads} "
        "thread(s) a call at most. An evaluation is one row's pass through the velocity.",
        tables,
        targets,
    )


def _measure(
    bundle: Bundle, steps: tuple[int, ...], folder: Path, threads: int, quick: bool
) -> tuple[dict[str, list[Rates]], dict[tuple[int, str], list[float]]]:
    model = open_model(bundle, threads=threads)
    model.warm_up()  # as a server does, which finds what suits the machine
    served = Served.open(bundle, model)
    prompt = list(range(1, 1 + PROMPT_TOKENS))
    middle = steps[len(steps) // 2]
    clients = [each for each in steps for _ in range(ROWS_A_RUNG)]
    tokens, seconds = (8, 0.3) if quick else (TOKENS, 4.0)
    sessions = {
        (way, each): open_unrolled(bundle, each, folder, count)
        for way, count in _ways(threads).items()
        for each in steps
    }
    loops = {
        MIXED: ClosedLoop(served, clients, prompt, tokens),
        UNIFORM: ClosedLoop(served, [middle] * len(clients), prompt, tokens),
    }
    arms: dict[str, Callable[[], Rates]] = {
        way: partial(loop.run, seconds / 3, seconds) for way, loop in loops.items()
    }
    for way in _ways(threads):
        lanes = {
            each: UnrolledRows(sessions[way, each], bundle, each, ROWS_A_RUNG) for each in steps
        }
        arms[f"{UNROLLED}: {way}"] = partial(_loop, lanes, np.array(prompt), tokens, seconds)
    rates = interleave(arms, seconds=0, least=1 if quick else 5)
    for loop in loops.values():
        loop.stop()
    calls: dict[tuple[int, str], Callable[[], float]] = {}
    asked = np.arange(1, 1 + PROMPT_TOKENS * (1 if quick else 4))
    for rows in (1, ROWS_A_RUNG, len(clients)):
        ours = model.decoder(middle).open_batch()
        for _ in range(rows):
            ours.add(asked)
        calls[rows, OURS] = partial(_token_ms, ours.step, rows)
        for way in _ways(threads):
            other = UnrolledRows(sessions[way, middle], bundle, middle, rows)
            other.read(asked)
            calls[rows, way] = partial(_token_ms, other.step, rows)
    with awake():  # they rest in between; the loops never do
        pairs = interleave(calls, seconds=0, least=1 if quick else 40, most=40)
    return rates, pairs


def _ways(threads: int) -> dict[str, int]:
    """The threads of a graph and batch per rung."""
    return {ONE: 1} | ({ALL: threads} if threads > 1 else {})


def _loop(
    lanes: Mapping[int, UnrolledRows], prompt: IntArray, tokens: int, seconds: float
) -> Rates:
    """One token of each batch in turn; rows that are done begin anew."""
    left = dict.fromkeys(lanes, 0)
    last: dict[int, IntArray] = {}
    counts = dict.fromkeys(lanes, 0)
    begun_s = time.perf_counter()
    while time.perf_counter() - begun_s < seconds:
        for steps, rows in lanes.items():
            logits = rows.step(last[steps]) if left[steps] else rows.read(prompt)  # (B, V)
            left[steps] = left[steps] - 1 if left[steps] else tokens - 1
            last[steps] = logits.argmax(axis=1)
            counts[steps] += len(logits)
    spent_s = time.perf_counter() - begun_s
    return {steps: count / spent_s for steps, count in counts.items()}


def _token_ms(step: Callable[[IntArray], FloatArray], rows: int) -> float:
    tokens = np.ones(rows, dtype=np.int64)
    time.sleep(_REST_S)
    step(tokens)
    begun_s = time.perf_counter()
    step(tokens)
    step(tokens)
    return (time.perf_counter() - begun_s) * 500


def _evaluations(rates: Rates) -> float:
    return sum(steps * rate for steps, rate in rates.items())


def _table(kind: str, rates: Mapping[str, list[Rates]]) -> Table:
    rows: list[Sequence[Cell]] = []
    for way, samples in rates.items():
        rows.append([way, "all", None, median([_evaluations(one) for one in samples])])
        for steps in sorted(samples[0]):
            tokens = median([one[steps] for one in samples])
            rows.append([way, steps, tokens, tokens * steps])
    return Table(
        f"{kind}: medians of {len(rates[MIXED])} rounds.",
        ("way", "steps", "tokens a second", "evaluations a second"),
        rows,
    )


def _pairs_table(kind: str, pairs: Mapping[tuple[int, str], list[float]]) -> Table:
    ways = dict.fromkeys(way for _, way in pairs)
    rows: list[Sequence[Cell]] = [
        [count, *(median(pairs[count, way]) for way in ways), _of_unrolled(pairs, count)]
        for count in dict.fromkeys(rows for rows, _ in pairs)
    ]
    return Table(
        f"{kind}: a token of rows that all have the same budget, in ms.",
        ("rows", *ways, "ratio"),
        rows,
    )


def _of_unrolled(pairs: Mapping[tuple[int, str], list[float]], rows: int) -> float:
    """Of the faster way."""
    others = [times for (count, way), times in pairs.items() if count == rows and way != OURS]
    return max(median_ratio(pairs[rows, OURS], other) for other in others)


def _targets(
    kind: str,
    least: float,
    steps: Sequence[int],
    rates: Mapping[str, list[Rates]],
    pairs: Mapping[tuple[int, str], list[float]],
) -> list[Target]:
    evaluations = {way: [_evaluations(one) for one in samples] for way, samples in rates.items()}
    unrolled = [way for way in rates if way.startswith(UNROLLED)]
    gain = min(median_ratio(evaluations[MIXED], evaluations[way]) for way in unrolled)
    uniform = median_ratio(evaluations[MIXED], evaluations[UNIFORM])
    slowest = min(
        median_ratio([one[each] for one in rates[MIXED]], [one[each] for one in rates[way]])
        for each in steps
        for way in unrolled
    )
    alike = max(_of_unrolled(pairs, rows) for rows, way in pairs if way == OURS)
    return [
        Target(f"{kind}: evaluations of a graph per rung", gain, ">=", least, "x"),
        Target(f"{kind}: tokens of the slowest rung there", slowest, ">=", 1.0, "x"),
        Target(f"{kind}: evaluations of a uniform batch", uniform, ">=", 0.9, "x"),
        Target(f"{kind}: a uniform token, of the unrolled graph", alike, "<=", 1.05, "x"),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
