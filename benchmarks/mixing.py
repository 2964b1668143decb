"""Tokens a second of requests of different steps in one batch, beside a graph and batch a rung.

    python -m benchmarks.mixing

16 clients ask in a closed loop, 4 for each of 1, 2, 4 and 8 steps, for 200 tokens each, of the
reference decoder with random weights. Ours is the engine, without HTTP. The other way is a plain
loop over four sessions, each with its graph, its weights and its batch of 4, one token of each in
turn; it has no engine, no scheduler and no sampling but the argmax. It runs with one thread a call
and with all, as onnxruntime uses them unless told otherwise; what is faster counts. All in turn in
one process.
"""

import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from benchmarks import reference
from benchmarks.generations import generation
from benchmarks.lab import (
    Cell,
    Provenance,
    Result,
    Table,
    Target,
    awake,
    interleave,
    median_ratio,
    parser,
    run,
)
from serve.bundle import Bundle, Precision
from serve.catalog import Catalog, Served
from serve.engine.engine import Engine
from serve.engine.job import Event, FailedEvent, Job, Limits, TokenEvent
from serve.engine.writing import Sampling
from serve.metrics import Metrics
from serve.runtime import open_model
from serve.runtime.cache import CacheLayout, RowCaches
from serve.runtime.device import HOST
from serve.runtime.protocol import FloatArray, IntArray
from serve.runtime.session import cache_names, usable_cores

# Clients that ask an engine again as soon as they have their answer, without HTTP.


CACHE_BYTES = 1 << 30  # what all rows need at their longest
_SOON_S = 0.01


class ClosedLoop:
    """One client for each entry of `clients`, which are step counts.

    The engine stays between two runs, as that of a server does that has been up for a while.
    """

    def __init__(
        self, served: Served, clients: Sequence[int], prompt: Sequence[int], tokens: int
    ) -> None:
        self._served, self._clients = served, clients
        self._prompt, self._tokens = list(prompt), tokens
        self._counts: Counter[int] = Counter()
        self._jobs: dict[int, Job] = {}  # by client: what it waits for
        limits = Limits(cache_bytes=CACHE_BYTES, decode_rows=len(clients))
        self._engine = Engine(Catalog([served]), limits, Metrics())
        self._engine.start()
        self._lock = threading.Lock()
        self._stopping = False

    def run(self, warm_s: float, seconds: float) -> dict[int, float]:
        """Tokens a second of each step count, once all have begun."""
        self._stopping = False
        for client in range(len(self._clients)):
            self._ask(client)
        time.sleep(warm_s)
        with self._lock:
            self._counts.clear()
        begun_s = time.perf_counter()
        time.sleep(seconds)
        with self._lock:
            counts, spent_s = dict(self._counts), time.perf_counter() - begun_s
        self._stopping = True
        for job in list(self._jobs.values()):
            self._engine.cancel(job)
        while self._engine.running:
            time.sleep(_SOON_S)
        return {steps: counts.get(steps, 0) / spent_s for steps in set(self._clients)}

    def stop(self) -> None:
        """No run follows."""
        self._engine.stop()

    def _ask(self, client: int) -> None:
        steps = self._clients[client]

        def deliver(event: Event) -> None:
            if isinstance(event, TokenEvent):
                with self._lock:
                    self._counts[steps] += 1
            elif not self._stopping:
                assert not isinstance(event, FailedEvent), event
                self._ask(client)

        greedy = Sampling(temperature=0.0)
        self._jobs[client] = generation(
            self._served, steps, self._prompt, self._tokens, greedy, deliver, stream=True
        )
        self._engine.submit(self._jobs[client])


# A rung as one graph with caches: what a server runs that has a graph and a batch per step count.
# Made from the graphs of one step, with the same operators and the same bytes of weights, so that
# only the way of running differs.


def open_unrolled(bundle: Bundle, steps: int, folder: Path, threads: int) -> ort.InferenceSession:
    """A session of its own for one rung, as its graph stands in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(bundle.folder / bundle.manifest.weights, folder)
    path = folder / f"cached-{steps}.onnx"
    onnx.save(unrolled(bundle, steps), path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def unrolled(bundle: Bundle, steps: int) -> onnx.ModelProto:
    """Embed, so many copies of the step, head; every step has caches of its own."""
    files = bundle.manifest.step
    assert files is not None and bundle.manifest.method == "euler"
    embed, step, head = (
        onnx.load(bundle.folder / name, load_external_data=False)
        for name in (files.embed, files.step, files.head)
    )
    size = np.array([bundle.manifest.T / steps], dtype=np.float32)
    weights = {"h": numpy_helper.from_array(size, "h")}
    nodes = _copied(embed, "embed", {})
    inputs = list(embed.graph.input)
    outputs: list[onnx.ValueInfoProto] = []
    x = "embed/x"
    for index in range(steps):
        here = f"step{index}"
        own = {value.name for value in step.graph.input if value.name.startswith(("k_", "v_"))}
        names = {"x": x, "h": "h", "seqlens": "embed/seqlens", "total": "embed/total"}
        nodes += _copied(step, here, names | {name: f"{name}_{index}" for name in own})
        inputs += [_renamed(one, index) for one in step.graph.input if one.name in own]
        given = [one for one in step.graph.output if one.name != "y"]
        outputs += [_renamed(one, index, f"{here}/{one.name}") for one in given]
        x = f"{here}/y"
    nodes += _copied(head, "head", {"x": x})
    inputs += [one for one in head.graph.input if one.name == "keep"]
    outputs.append(helper.make_tensor_value_info("head/logits", TensorProto.FLOAT, None))
    for model in (embed, step, head):
        weights |= {tensor.name: tensor for tensor in model.graph.initializer}
    graph = helper.make_graph(nodes, "cached", inputs, outputs, list(weights.values()))
    return helper.make_model(graph, opset_imports=step.opset_import, ir_version=step.ir_version)


def _copied(model: onnx.ModelProto, prefix: str, names: dict[str, str]) -> list[onnx.NodeProto]:
    """The nodes; values that they make get the prefix, weights keep their names."""
    made = {value for node in model.graph.node for value in node.output}
    copies = []
    for node in model.graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = ""  # two nodes must not have one name
        for values in (copy.input, copy.output):
            for at, value in enumerate(values):
                values[at] = f"{prefix}/{value}" if value in made else names.get(value, value)
        copies.append(copy)
    return copies


def _renamed(value: onnx.ValueInfoProto, index: int, name: str = "") -> onnx.ValueInfoProto:
    renamed = onnx.ValueInfoProto()
    renamed.CopyFrom(value)
    renamed.name = name or f"{value.name}_{index}"
    return renamed


class UnrolledRows:
    """Rows of one rung on a graph of its own, with caches that grow like those of the server."""

    def __init__(
        self, session: ort.InferenceSession, bundle: Bundle, steps: int, rows: int
    ) -> None:
        manifest = bundle.manifest
        self._session, self._rows = session, rows
        names = cache_names(1, manifest.shape.layers)
        self._slots = [
            (f"{name}_{s}", f"step{s}/{name}_out") for s in range(steps) for name in names
        ]
        self._caches = RowCaches(CacheLayout.of(manifest, manifest.rung(steps)))
        self._tokens = np.zeros((rows, 1), dtype=np.int64)  # (B, 1)
        self.past = np.zeros(rows, dtype=np.int32)  # (B,)
        self._logits = np.empty(
            (rows, 1, manifest.text_tokenizer.vocab_size), dtype=np.float32
        )  # (B, 1, V)
        self._binding: ort.IOBinding | None = None

    def read(self, prompt: IntArray) -> FloatArray:
        """All rows begin anew with this prompt (S,), one after the other; logits (B, V)."""
        self._caches.shrink(0, 0, 0)
        self._caches.reserve(0, 0, self._rows, len(prompt) + 1)
        self._binding = None
        found = []
        for row in range(self._rows):
            last = np.array([len(prompt) - 1], dtype=np.int64)
            logits = np.empty((1, 1, self._logits.shape[2]), dtype=np.float32)
            past = np.zeros(1, dtype=np.int32)
            binding = self._bound(prompt[None], past, last, logits, row, row + 1)
            self._session.run_with_iobinding(binding)
            found.append(logits[0, 0])
        self.past[:] = len(prompt)
        return np.stack(found)

    def step(self, tokens: IntArray) -> FloatArray:
        """One token a row (B,) to its logits (B, V)."""
        longest = int(self.past.max())
        if self._caches.reserve(self._rows, longest, self._rows, longest + 1):
            self._binding = None
        if self._binding is None:
            first = np.zeros(1, dtype=np.int64)
            self._binding = self._bound(self._tokens, self.past, first, self._logits, 0, self._rows)
        self._tokens[:, 0] = tokens
        self._session.run_with_iobinding(self._binding)
        self.past += 1
        return self._logits[:, 0]

    def _bound(
        self,
        tokens: IntArray,
        past: np.ndarray,
        keep: IntArray,
        logits: FloatArray,
        first: int,
        end: int,
    ) -> ort.IOBinding:
        binding = self._session.io_binding()
        self._kept = (tokens, past, keep, logits)  # bound by address
        for name, array in (("tokens", tokens), ("past", past), ("keep", keep)):
            HOST.bind_input(binding, name, array)
        for (taken, given), array in zip(self._slots, self._caches.arrays, strict=True):
            HOST.bind_input(binding, taken, array[first:end])
            HOST.bind_output(binding, given, array[first:end])
        HOST.bind_output(binding, "head/logits", logits)
        return binding


NAME = "mixing"
STEPS, QUICK_STEPS = (1, 2, 4, 8), (1, 2)
ROWS_A_RUNG, TOKENS, PROMPT_TOKENS = 4, 200, 16
MIXED, UNROLLED, UNIFORM = "rungs mixed", "a graph and batch per rung", "16 of the same rung"
OURS, ONE, ALL = "ours", "unrolled, 1 thread", "unrolled, all threads"
_REST_S = 0.1  # threads of the other way that look for more to do have given up by then: 40 ms
LEAST: dict[Precision, float] = {"fp32": 1.5, "int8": 1.3}
Rates = dict[int, float]  # tokens a second, by steps


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, parsed.quick, usable_cores()))


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
