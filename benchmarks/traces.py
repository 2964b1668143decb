"""A recorded trace of arrivals, replayed against a model that writes: who is answered in time.

    python -m benchmarks.traces --trace FILE

The trace's own rhythm, stretched to 0.8 and 1.5 times the rate that the server sustains at full
steps, which is measured first. Two servers: Stepdial, which chooses the steps for the deadline, and
the same, told to take full steps. Knows HTTP and traces, not how the server decides.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.open_loop import Shot, fire
from benchmarks.options import NOTHING_TO_MEASURE, options, parser, run
from benchmarks.result import Cell, Provenance, Result, Table, Target
from benchmarks.server import Server, running_server
from benchmarks.texts import text_of
from loadtest.arrivals import Entry, TraceError, read_trace
from serve.bundle import Bundle
from serve.inputs.text import TextCodec

NAME = "traces"
PATH = "/v1/generate"
LOADS = (0.8, 1.5)
WANTED = 0.999  # of those admitted at the lower load
LENGTHS = 1 / 8  # of the trace, so that most fit the window of a small model
_COLUMNS = (
    *("server", "load", "requests", "requests/s", "in time", "refused", "admitted, in time"),
    *("goodput/s", "tokens in time/s", "p50 ms", "p99 ms", "steps: answers"),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of the server."""

    requests: int
    given_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one replay."""

    shots: Sequence[Shot]
    given_s: float

    @property
    def answered(self) -> list[Shot]:
        return [shot for shot in self.shots if shot.status == 200]

    @property
    def refused(self) -> int:
        return sum(shot.status in (422, 429) for shot in self.shots)

    @property
    def in_time(self) -> list[Shot]:
        return [shot for shot in self.answered if shot.latency_s <= self.given_s]

    @property
    def admitted_in_time(self) -> float:
        return len(self.in_time) / max(1, len(self.shots) - self.refused)

    @property
    def seconds(self) -> float:
        """From the first to the last that was due."""
        return max(self.shots[-1].due_s, 1e-9)

    @property
    def tokens(self) -> int:
        """Written in time."""
        return sum(int(shot.read["usage"]["completion_tokens"]) for shot in self.in_time)

    @property
    def steps(self) -> str:
        taken = Counter(shot.read["budget"]["steps"] for shot in self.answered)
        return ", ".join(f"{steps}: {taken[steps]}" for steps in sorted(taken)) or "none"


def main(arguments: Sequence[str]) -> int:
    read = parser(__doc__.partition("\n")[0])
    read.add_argument("--trace", type=Path, metavar="FILE", help="CSV of time and lengths")
    read.add_argument("--deadline-ms", type=float, default=2000.0)
    read.add_argument("--requests", type=int, default=1200, help="in each replay")
    parsed = read.parse_args(arguments)
    if parsed.trace is None:
        print("there is no trace to replay: name one with --trace FILE", file=sys.stderr)
        return NOTHING_TO_MEASURE
    try:
        entries = read_trace(parsed.trace)
    except TraceError as error:
        raise SystemExit(str(error)) from None
    asked = Asked(40 if parsed.quick else parsed.requests, parsed.deadline_ms / 1000)
    if len(entries) < asked.requests:
        raise SystemExit(
            f"{parsed.trace} holds {len(entries)} requests: lower --requests {asked.requests}"
        )
    bundle = options(parsed).read("generate")[0]
    return run(NAME, arguments, parsed, partial(measure, bundle, entries, asked))


def measure(
    bundle: Bundle, entries: Sequence[Entry], asked: Asked, provenance: Provenance
) -> Result:
    full = {"steps": bundle.manifest.full_steps}
    deadline = {"deadline_ms": asked.given_s * 1000}
    codec = TextCodec(bundle)
    bodies = [_body(bundle, codec, one) for one in entries[: asked.requests]]
    rows: list[Sequence[Cell]] = []
    targets: list[Target] = []
    rate = 0.0
    for arm, fields in (("Stepdial", deadline), ("full steps", full | deadline)):
        with running_server([bundle.folder]) as server:
            measured = _capacity(server, bodies, full)
            rate = rate or measured  # the same for both
            for load in LOADS:
                outcome = _replay(server, entries, bodies, fields, load * rate, asked)
                rows.append(_row(arm, load, outcome))
                if (arm, load) == ("Stepdial", LOADS[0]):
                    what = f"{load} x: admitted, in time"
                    targets.append(Target(what, outcome.admitted_in_time, ">=", WANTED))
    caption = (
        f"Deadline {asked.given_s * 1000:g} ms, counted from when a request was due; {rate:.1f} "
        f"requests a second are what the server sustains at {bundle.manifest.full_steps} steps. "
        "`in time`: of all requests; `goodput`: answers in time."
    )
    return provenance.result(
        NAME,
        "A recorded trace, replayed",
        f"Requests to `{bundle.manifest.name}` that come as those of the trace did, in another "
        f"time; prompts and answers have {LENGTHS:g} of its tokens, and at most about half of the "
        "model's window each.",
        [Table(caption, _COLUMNS, rows)],
        targets,
    )


def _body(bundle: Bundle, codec: TextCodec, entry: Entry) -> dict[str, Any]:
    half = bundle.manifest.text_input.max_tokens // 2
    prompt = max(1, min(half, round(LENGTHS * entry.prompt_tokens)))
    tokens = max(1, min(half * 7 // 8, round(LENGTHS * entry.output_tokens)))
    fields = {"model": bundle.manifest.name, "max_tokens": tokens, "seed": 1}
    return {**fields, "prompt": text_of(codec, prompt)}


def _replay(
    server: Server,
    entries: Sequence[Entry],
    bodies: Sequence[dict[str, Any]],
    fields: dict[str, Any],
    rate: float,
    asked: Asked,
) -> Outcome:
    """The begin of the trace, at this mean rate."""
    stretch = (asked.requests - 1) / rate / entries[asked.requests - 1].at_s
    shots = [
        Shot(entry.at_s * stretch, body | fields)
        for entry, body in zip(entries, bodies, strict=False)
    ]
    fire(server, PATH, shots, patience_s=4 * asked.given_s)
    return Outcome(shots, asked.given_s)


def _capacity(server: Server, bodies: Sequence[dict[str, Any]], full: dict[str, Any]) -> float:
    """Answers a second at full steps, with always more to do."""
    rates = []
    for first in range(3):
        shots = [Shot(0.0, body | full) for body in bodies[first::3][:80]]
        begun_s = time.perf_counter()
        fire(server, PATH, shots, patience_s=120.0)
        answered = sum(shot.status == 200 for shot in shots)
        rates.append(answered / (time.perf_counter() - begun_s))
    return statistics.median(rates)


def _row(arm: str, load: float, outcome: Outcome) -> list[Cell]:
    times = sorted(1000 * shot.latency_s for shot in outcome.answered)
    asked = len(outcome.shots)
    return [
        *(arm, f"{load:g} x", asked, asked / outcome.seconds),
        _percent(len(outcome.in_time) / asked),
        _percent(outcome.refused / asked),
        _percent(outcome.admitted_in_time, 2),
        *(len(outcome.in_time) / outcome.seconds, outcome.tokens / outcome.seconds),
        times[len(times) // 2] if times else None,
        times[int(len(times) * 0.99)] if times else None,
        outcome.steps,
    ]


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
