"""Errors, memory, latency and gauges of the server under many clients, for minutes or hours.

    python -m benchmarks.soak                                       # two minutes, a closed loop
    python -m benchmarks.soak --hours 2 --load 0.7 --keep FILE      # an open loop

Each client mixes texts and answers, whole and streamed, checks every answer, and sometimes leaves.
"""

import itertools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks.client import Answered, Client, Crowd, UnexpectedAnswer, arrivals
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
from benchmarks.server import READY_LINE, Memory, Server, running_server
from benchmarks.texts import PROMPT, text_of, window_of
from serve.bundle import Bundle, Manifest
from serve.inputs.text import TextCodec
from train.tally import t95

# One client of the soak: asks again and again, checks every answer, and sometimes leaves.


LEFT = "left on purpose"
_LEAVE = 0.05
_MAX_TEXTS, _MAX_TOKENS = 4, 64


@dataclass(frozen=True, slots=True)
class Asked:
    """A model, and the words of the longest text that it reads without cutting it."""

    manifest: Manifest
    words: tuple[str, ...]

    @classmethod
    def of(cls, bundle: Bundle) -> Self:
        if bundle.manifest.task == "generate":
            return cls(bundle.manifest, ())
        longest = text_of(TextCodec(bundle), window_of(bundle.manifest))
        return cls(bundle.manifest, tuple(longest.split(" ")))


def asked_of(bundles: Iterable[Bundle]) -> list[Asked]:
    """Those that read any words. Others of the zoo are served, and not asked."""
    return [Asked.of(one) for one in bundles if one.manifest.task in ("classify", "generate")]


class Caller:
    """What one client asks, drawn by chance, and whether the answer is right."""

    def __init__(self, models: Sequence[Asked], seed: int) -> None:
        self._models = models
        self._random = random.Random(seed)

    def ask(self, client: Client) -> str:
        """One request; the name of what came of it. UnexpectedAnswer if that is wrong."""
        model = self._random.choice(self._models)
        steps = self._random.choice(model.manifest.steps)
        leave = self._random.random() < _LEAVE
        if model.manifest.task == "classify":
            return self._classify(client, model, steps, leave)
        return self._generate(client, model.manifest, steps, leave)

    def _classify(self, client: Client, model: Asked, steps: int, leave: bool) -> str:
        manifest, count = model.manifest, self._random.randint(1, _MAX_TEXTS)
        texts = [self._text(model.words) for _ in range(count)]
        body = {"model": manifest.name, "input": texts, "steps": steps}
        if leave:
            return self._leave(client, "/v1/classify", body)
        results = client.post("/v1/classify", body).body["results"]
        _expect(len(results) == count, f"{len(results)} results for {count} texts")
        for result in results:
            _expect_steps(result["budget"]["steps"], steps)
            _expect(result["label"] in (manifest.labels or ()), "an unknown label")
        return "classify"

    def _generate(self, client: Client, manifest: Manifest, steps: int, leave: bool) -> str:
        tokens = self._random.randint(1, _MAX_TOKENS)
        body = {
            "model": manifest.name,
            "prompt": PROMPT * self._random.randint(1, 4),
            "max_tokens": tokens,
            "steps": steps,
            "stream": self._random.random() < 0.5,
        }
        if body["stream"]:
            return self._stream(client, body, steps, tokens, leave)
        if leave:
            return self._leave(client, "/v1/generate", body)
        answer = client.post("/v1/generate", body).body
        _expect_done(answer, steps, tokens)
        return "generate"

    def _stream(
        self, client: Client, body: dict[str, Any], steps: int, tokens: int, leave: bool
    ) -> str:
        leave_at = self._random.randrange(tokens) if leave else None
        seen, done = 0, False
        for event in client.stream("/v1/generate", body):
            _expect(not done, "an event after the last")
            if event.name:
                _expect(event.name == "done", f"the event {event.name}: {event.data}")
                _expect_done(event.data, steps, tokens)
                done = True
                continue
            _expect(event.data["index"] == seen, f"token {event.data['index']}, not {seen}")
            _expect_steps(event.data["steps"], steps)
            if seen == leave_at:
                client.close()
                return LEFT
            seen += 1
        _expect(done and seen == tokens, f"{seen} of {tokens} tokens, done: {done}")
        return "generate, streamed"

    def _leave(self, client: Client, path: str, body: dict[str, Any]) -> str:
        client.send_only(path, body)
        time.sleep(self._random.uniform(0.0, 0.1))
        client.close()
        return LEFT

    def _text(self, words: Sequence[str]) -> str:
        return " ".join(words[: self._random.randint(1, len(words))])


def _expect_done(answer: dict[str, Any], steps: int, tokens: int) -> None:
    _expect_steps(answer["budget"]["steps"], steps)
    written = answer["usage"]["completion_tokens"]
    _expect(written == tokens, f"{written} tokens instead of {tokens}")


def _expect_steps(found: int, asked: int) -> None:
    _expect(found == asked, f"{found} steps instead of {asked}")


def _expect(right: bool, otherwise: str) -> None:
    if not right:
        raise UnexpectedAnswer(otherwise)


# What a server holds while it runs: memory, files, threads, and what its gauges say.


GAUGES = ("stepdial_queue_depth", "stepdial_in_flight", "stepdial_cache_bytes")
GAUGES_S = 15.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a server holds at a time."""

    at_s: float
    held_mb: float
    pss_mb: float
    files: int
    threads: int
    queue_depth: float
    in_flight: float
    cache_mb: float

    @classmethod
    def of(cls, server: Server, at_s: float) -> Self:
        memory, process = server.memory(), Path(f"/proc/{server.pid}")
        with Client.of(server) as client:
            gauges = read_gauges(client.get("/metrics"))
        return cls(
            at_s,
            held_mb(memory),
            memory.pss / 1e6,
            len(list((process / "fd").iterdir())) - 1,  # less the connection that asks
            len(list((process / "task").iterdir())),
            gauges["stepdial_queue_depth"],
            gauges["stepdial_in_flight"],
            gauges["stepdial_cache_bytes"] / 1e6,
        )

    def to_json(self) -> dict[str, Any]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


def held_mb(memory: Memory) -> float:
    """RSS, with what the machine swapped out: it would be in RSS on another one."""
    return (memory.rss + memory.swapped) / 1e6


def settled_gauges(server: Server) -> dict[str, float]:
    """The gauges once they are zero, or as they are when they take too long for that."""
    end_s = time.perf_counter() + GAUGES_S
    with Client.of(server) as client:
        while True:
            found = read_gauges(client.get("/metrics"))
            if not any(found.values()) or time.perf_counter() > end_s:
                return found
            time.sleep(0.1)


def read_gauges(exposition: str) -> dict[str, float]:
    """The gauges in what /metrics says; SystemExit if one is missing."""
    lines = (line.split(" ") for line in exposition.splitlines())
    values = {parts[0]: float(parts[1]) for parts in lines if parts[0] in GAUGES}
    missing = set(GAUGES) - set(values)
    if missing:
        raise SystemExit(f"/metrics has no {', '.join(sorted(missing))}")
    return values


# The slope of a straight line through measured values, with its 95 % interval. Neighbouring
# values depend on each other, so the line goes through the means of blocks of them.


BLOCKS = 20


class Trend(NamedTuple):
    """How much more it is after an hour."""

    per_hour: float
    low: float | None
    high: float | None


def floors(values: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The least of each block, and when it was: what stays, without what comes and goes."""
    return [min(block, key=lambda one: one[1]) for block in _blocks(values)]


def trend(values: Sequence[tuple[float, float]]) -> Trend:
    """Of values at seconds; fewer than three of them have no interval."""
    blocks = _blocks(values)
    hours = [statistics.fmean(at_s for at_s, _ in block) / 3600 for block in blocks]
    means = [statistics.fmean(value for _, value in block) for block in blocks]
    if len(blocks) < 3:
        return Trend(0.0, None, None)
    slope, intercept = statistics.linear_regression(hours, means)
    pairs = zip(hours, means, strict=True)
    off = sum((value - intercept - slope * hour) ** 2 for hour, value in pairs)
    centre = statistics.fmean(hours)
    spread = sum((hour - centre) ** 2 for hour in hours)
    free = len(blocks) - 2
    wide = t95(free) * math.sqrt(off / free / spread)
    return Trend(slope, slope - wide, slope + wide)


def _blocks(values: Sequence[tuple[float, float]]) -> list[Sequence[tuple[float, float]]]:
    size = max(1, math.ceil(len(values) / BLOCKS))
    return [values[at : at + size] for at in range(0, len(values), size)]


# Hours at a share of the measured capacity: does memory grow, does latency, does anything fail?
# An open loop: requests are due at random moments, and latency counts from when they were due.
# Every answer is checked. A line a minute is kept as it comes, so that one that is cut short has
# its data.


LONG_NAME = "long_soak"
LONG_CLIENTS, LOAD, CAPACITY_S, SNAPSHOT_S, MINUTE_S = 64, 0.7, 30.0, 10.0, 60.0
WARM_SHARE, WARM_S = 0.1, 600.0  # of the whole, and at most: left out of all trends
WANTED_MB_PER_HOUR, WANTED_P99_RATIO, WANTED_MORE = 1.0, 1.2, 2
KINDS = ("classify", "generate", "generate, streamed")


@dataclass(slots=True)
class Run:
    """What was seen, and where each minute of it is kept."""

    keep: Path
    snapshots: list[Snapshot] = field(default_factory=list)
    minutes: list[dict[str, Any]] = field(default_factory=list)

    def look(self, server: Server, at_s: float) -> None:
        self.snapshots.append(Snapshot.of(server, at_s))

    def end_minute(self, number: int, crowd: Crowd) -> None:
        """Sum up the answers that were due in a minute, and write it down."""
        answered = [*crowd.answered]
        within = [one for one in answered if number <= one.due_s / MINUTE_S < number + 1]
        line: dict[str, Any] = {"minute": number, "errors": len(crowd.errors)}
        for kind in KINDS:
            ms = [1000 * one.latency_s for one in within if one.what == kind]
            line[kind] = [len(ms), *(round(percentile(ms, p), 2) for p in (0.5, 0.99) if ms)]
        line["snapshot"] = self.snapshots[-1].to_json()
        self.minutes.append(line)
        with self.keep.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def measure_long(
    chosen: Options, seconds: float, load: float, keep: Path, provenance: Provenance
) -> Result:
    models = asked_of(chosen.read())
    keep.write_text("", encoding="utf-8")
    print(f"a line a minute is kept in {keep}", flush=True)
    with running_server(chosen.bundles) as server:
        capacity_s = min(CAPACITY_S, seconds / 4)
        capacity = _capacity(server, models, capacity_s)
        settled_gauges(server)
        before = Snapshot.of(server, 0.0)
        rate = load * capacity
        print(f"{capacity:.1f} answers a second at most; now {rate:.1f} are asked", flush=True)
        run, crowd = _long_load(server, models, rate, seconds, keep)
        gauges = settled_gauges(server)
        after = Snapshot.of(server, time.perf_counter() - crowd.begun_s)
        logged = server.logged().partition(READY_LINE)[2].strip().splitlines()
    wrong = [*_said(crowd.errors[:8]), *(f"the server logged: {line}" for line in logged[:8])]
    lasted_s = run.snapshots[-1].at_s if run.snapshots else 0.0
    warm_s = min(WARM_S, WARM_SHARE * lasted_s)
    held = [(one.at_s, one.held_mb) for one in run.snapshots if one.at_s >= warm_s]
    memory = trend(floors(held))
    slow = {kind: _halves(crowd.answered, kind, warm_s) for kind in KINDS}
    tables = [
        Table("The load.", ("what", "measured"), _long_load_rows(capacity, rate, lasted_s, crowd)),
        Table(
            "Held by the server, every 10 s; what comes first, as long as caches fill, is left "
            f"out of the slopes ({warm_s:.0f} s). Intervals are of 95 %. Caches come and go with "
            "requests, so the slope that counts is that of the least in each twentieth.",
            ("what", "idle, before", "median", "most", "idle, after", "an hour", "from", "to"),
            [*_held_rows(before, run.snapshots, after, warm_s), _least_row(held, memory)],
        ),
        Table(
            "Milliseconds from when a request was due; the halves are medians of the p99 of "
            "their minutes.",
            ("request", "p50", "p99, first half", "p99, second half", "ratio"),
            [[kind, *cells] for kind, cells in slow.items()],
        ),
    ]
    if wrong:
        tables.append(Table("What went wrong first.", ("what",), [[one] for one in wrong]))
    return provenance.result(
        LONG_NAME,
        f"{lasted_s / 3600:.2g} hours at {load:.0%} of capacity",
        "An open loop of texts and answers, whole and streamed, of all lengths, at every rung; "
        "every twentieth request is left by its client before it is answered.",
        tables,
        _targets(crowd, logged, memory, slow, before, after, gauges),
    )


def _targets(
    crowd: Crowd,
    logged: Sequence[str],
    memory: Trend,
    slow: dict[str, list[float]],
    before: Snapshot,
    after: Snapshot,
    gauges: dict[str, float],
) -> list[Target]:
    more = "more than before"
    return [
        Target("errors", len(crowd.errors), "==", 0),
        Target("warnings and errors in the server's log", len(logged), "==", 0),
        Target(
            "memory, slope of the least", memory.per_hour, "<=", WANTED_MB_PER_HOUR, "MB an hour"
        ),
        *(
            Target(f"p99 of {kind}, second half over first", cells[3], "<=", WANTED_P99_RATIO)
            for kind, cells in slow.items()
        ),
        Target(f"files, {more}", after.files - before.files, "<=", WANTED_MORE),
        Target(f"threads, {more}", after.threads - before.threads, "<=", WANTED_MORE),
        *(Target(f"{name} afterwards", value, "==", 0) for name, value in gauges.items()),
    ]


def _capacity(server: Server, models: Sequence[Asked], seconds: float) -> float:
    """Answers a second when all clients ask again as soon as they are answered."""
    begun_s = time.perf_counter()
    asks = [Caller(models, 1000 + seed).ask for seed in range(LONG_CLIENTS // 2)]
    with Crowd(server, asks, seconds=seconds) as crowd:
        pass
    if crowd.errors:
        raise SystemExit(f"while the capacity was measured: {_said(crowd.errors)[0]}")
    return _answers(crowd) / (time.perf_counter() - begun_s)


def _answers(crowd: Crowd) -> int:
    """Those that nobody left."""
    return crowd.kinds.total() - crowd.kinds[LEFT]


def _said(errors: Sequence[Exception]) -> list[str]:
    return [f"{type(error).__name__}: {error}" for error in errors]


def _long_load(
    server: Server, models: Sequence[Asked], rate: float, seconds: float, keep: Path
) -> tuple[Run, Crowd]:
    """Load the server until the time is over, or somebody presses Ctrl-C."""
    run, due = Run(keep), arrivals(rate, seconds, random.Random(1))
    with Crowd(
        server, [Caller(models, seed).ask for seed in range(LONG_CLIENTS)], due=due
    ) as crowd:
        try:
            _watch(server, crowd, run, min(SNAPSHOT_S, seconds / 40))
        except KeyboardInterrupt:
            print("stopped; the result is that of the time until now", file=sys.stderr)
            crowd.stop()
    return run, crowd


def _watch(server: Server, crowd: Crowd, run: Run, every_s: float) -> None:
    """Look at the server again and again, and end minutes once their answers have come."""
    looks = minutes = 0
    while crowd.asking:
        run.look(server, time.perf_counter() - crowd.begun_s)
        looks += 1
        if run.snapshots[-1].at_s >= (minutes + 1.5) * MINUTE_S:
            run.end_minute(minutes, crowd)
            minutes += 1
        time.sleep(max(0.0, crowd.begun_s + looks * every_s - time.perf_counter()))
    run.end_minute(minutes, crowd)


def _long_load_rows(
    capacity: float, rate: float, lasted_s: float, crowd: Crowd
) -> list[Sequence[Cell]]:
    rows: list[Sequence[Cell]] = [
        ["answers a second, closed loop: the capacity", capacity],
        ["requests a second, asked", rate],
        ["seconds", lasted_s],
        ["answers a second", _answers(crowd) / lasted_s if lasted_s else None],
    ]
    return rows + [[f"... {kind}", count] for kind, count in sorted(crowd.kinds.items())]


def _held_rows(
    before: Snapshot, snapshots: Sequence[Snapshot], after: Snapshot, warm_s: float
) -> list[Sequence[Cell]]:
    names = {"held_mb": "RSS, MB", "pss_mb": "PSS, MB", "files": "files", "threads": "threads"}
    names |= {"in_flight": "requests", "queue_depth": "waiting", "cache_mb": "caches, MB"}
    rows: list[Sequence[Cell]] = []
    for name, shown in names.items():
        values = [(one.at_s, float(getattr(one, name))) for one in snapshots if one.at_s >= warm_s]
        found = trend(values)
        middle, most = statistics.median(v for _, v in values), max(v for _, v in values)
        cells = (getattr(before, name), middle, most, getattr(after, name))
        rows.append([shown, *cells, found.per_hour, found.low, found.high])
    return rows


def _least_row(held: Sequence[tuple[float, float]], memory: Trend) -> Sequence[Cell]:
    least = [value for _, value in floors(held)]
    cells = (None, statistics.median(least), max(least), None)
    return ["RSS, least of each twentieth, MB", *cells, memory.per_hour, memory.low, memory.high]


def _halves(answered: Sequence[Answered], kind: str, warm_s: float) -> list[float]:
    """The p50 of all, the p99 of each half, and the second over the first."""
    served = [one for one in answered if one.what == kind and one.due_s >= warm_s]
    ms = [1000 * one.latency_s for one in served]
    middle_s = (warm_s + max((one.due_s for one in served), default=0.0)) / 2
    halves = []
    for half in (False, True):
        by_minute: dict[int, list[float]] = {}
        for one in served:
            if (one.due_s >= middle_s) == half:
                by_minute.setdefault(int(one.due_s // MINUTE_S), []).append(1000 * one.latency_s)
        each = [percentile(latencies, 0.99) for latencies in by_minute.values()]
        halves.append(statistics.median(each) if each else 0.0)
    return [
        percentile(ms, 0.5) if ms else 0.0,
        *halves,
        halves[1] / halves[0] if halves[0] else 0.0,
    ]


NAME = "soak"
CLIENTS, SECONDS, SETTLE_S = 64, 120.0, 5.0
WANTED_IDLE_MB, WANTED_LOADED_MB, WANTED_GROWTH_MB = 400, 600, 10


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--hours", type=float, default=0.0, help="so long, in an open loop")
    made.add_argument("--load", type=float, default=LOAD, help=f"of the capacity ({LOAD:g})")
    made.add_argument("--keep", type=Path, metavar="FILE", help="a line a minute, as it comes")
    parsed = made.parse_args(arguments)
    if parsed.hours:
        keep = parsed.keep or Path(tempfile.gettempdir()) / f"{LONG_NAME}.jsonl"
        long = partial(measure_long, options(parsed), 3600 * parsed.hours, parsed.load, keep)
        return run(NAME, arguments, parsed, long)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    clients, seconds = (8, 2.0) if chosen.quick else (CLIENTS, SECONDS)
    models = asked_of(chosen.read())
    settle_s = 0.2 if chosen.quick else SETTLE_S
    with running_server(chosen.bundles) as server:
        time.sleep(settle_s)
        idle = server.memory()
        # What a first load leaves behind is kept for the next one; only what a second one adds
        # to it would grow for ever.
        warming, _ = _load(server, models, clients, seconds / 2)
        warming_gauges = settled_gauges(server)
        time.sleep(settle_s)
        between = server.memory()
        begun_s = time.perf_counter()
        crowd, samples = _load(server, models, clients, seconds)
        elapsed_s = time.perf_counter() - begun_s
        gauges = settled_gauges(server)
        time.sleep(settle_s)
        after = server.memory()
        logged = server.logged().partition(READY_LINE)[2].strip().splitlines()
    most = max((memory for _, memory in samples), key=lambda memory: memory.rss)
    errors = _said(warming.errors + crowd.errors)
    tables = [
        Table("The load.", ("what", "measured"), _load_rows(crowd, elapsed_s, samples)),
        Table(
            f"Memory of the server; a load of {seconds / 2:g} s comes first, so that what the "
            "second one leaves behind can be compared. Peak: the largest RSS since the start.",
            ("when", "RSS MB", "PSS MB", "swapped MB", "peak RSS MB"),
            [
                _memory_row("idle, before", idle),
                _memory_row("idle, after the first load", between),
                _memory_row("most under load", most),
                _memory_row("idle, after the second load", after),
            ],
        ),
    ]
    wrong = [*errors, *(f"the server logged: {line}" for line in logged)]
    if wrong:
        tables.append(Table("What went wrong first.", ("what",), [[one] for one in wrong[:10]]))
    growth_mb = held_mb(after) - held_mb(between)
    targets = [
        Target("errors", len(errors), "==", 0),
        Target("requests answered", _answers(crowd), ">=", clients),
        Target("warnings and errors in the server's log", len(logged), "==", 0),
        Target("RSS idle", held_mb(idle), "<=", WANTED_IDLE_MB, "MB"),
        Target("RSS under load", held_mb(most), "<=", WANTED_LOADED_MB, "MB"),
        Target("RSS added by the second load", growth_mb, "<=", WANTED_GROWTH_MB, "MB"),
        *(
            Target(f"{name} after a load", max(value, warming_gauges[name]), "==", 0)
            for name, value in gauges.items()
        ),
    ]
    return provenance.result(
        NAME,
        f"{clients} clients for {seconds:g} seconds",
        "Texts of all lengths and answers, whole and streamed, at every rung; every twentieth "
        "request is left by its client before it is answered.",
        tables,
        targets,
    )


def _load(
    server: Server, models: Sequence[Asked], clients: int, seconds: float
) -> tuple[Crowd, list[tuple[float, Memory]]]:
    """Load the server; what came of it, and its memory meanwhile, after so many seconds."""
    samples = []
    asks = [Caller(models, seed).ask for seed in range(clients)]
    with Crowd(server, asks, seconds=seconds) as crowd:
        for count in itertools.count(1):
            samples.append((time.perf_counter() - crowd.begun_s, server.memory()))
            if not crowd.asking:
                break
            due_s = crowd.begun_s + count * min(1.0, seconds / 10)
            time.sleep(max(0.0, due_s - time.perf_counter()))
    return crowd, [(at_s, memory) for at_s, memory in samples if at_s <= seconds]


def _load_rows(
    crowd: Crowd, elapsed_s: float, samples: Sequence[tuple[float, Memory]]
) -> list[Sequence[Cell]]:
    second_half = samples[len(samples) // 2 :]
    slope = statistics.linear_regression(
        [at_s for at_s, _ in second_half], [held_mb(memory) for _, memory in second_half]
    ).slope
    rows: list[Sequence[Cell]] = [["requests answered", _answers(crowd)]]
    rows += [[f"... {kind}", count] for kind, count in sorted(crowd.kinds.items())]
    rows += [
        ["errors", len(crowd.errors)],
        ["seconds, the last answers included", elapsed_s],
        ["answers a second", _answers(crowd) / elapsed_s],
        ["RSS slope over the second half, MB a minute", 60 * slope],
    ]
    return rows


def _memory_row(when: str, memory: Memory) -> list[Cell]:
    sizes = (memory.rss, memory.pss, memory.swapped, memory.peak)
    return [when, *(size / 1e6 for size in sizes)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
