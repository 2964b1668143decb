"""How true `Retry-After` is: bursts that fill the queue, and what became of those in it.

The wait that a refused request was told is compared with the time that passed until it would have
had its turn: until all classifications taken in before it had been answered, or all generations had
begun. Knows the wire; nothing of how the wait is predicted.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.open_loop import Shot, fire
from benchmarks.options import Options, options, parser, run
from benchmarks.result import Cell, Provenance, Result, Table, Target
from benchmarks.rounds import median
from benchmarks.server import Server, running_server
from benchmarks.texts import PROMPT, answer_tokens, text_of
from serve.bundle import Bundle
from serve.inputs.text import TextCodec

NAME = "refusals"
PLACES, BURST, WANTED = 64, 128, 0.25
_BETWEEN_S = 0.0005
_RETRY_MS = re.compile(rb"\r\nretry-after-ms: (\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Told:
    """What one refused request was told, and what was true."""

    told_s: float
    true_s: float
    answered_s: float  # until it was refused

    @property
    def error(self) -> float:
        return abs(self.told_s / self.true_s - 1)


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    rows: list[Sequence[Cell]] = []
    targets = []
    flags = ("--queue-limit", str(PLACES), "--no-degrade")
    with running_server(chosen.bundles, *flags) as server:
        for bundle in chosen.read():
            for steps in (bundle.manifest.steps[0], bundle.manifest.full_steps):
                found = _bursts(server, bundle, steps, 2 if chosen.quick else 6)
                error = median([one.error for one in found])
                name = bundle.manifest.name
                rows.append(
                    [
                        *(name, steps, len(found)),
                        median([one.told_s for one in found]),
                        median([one.true_s for one in found]),
                        error,
                        1000 * _p99([one.answered_s for one in found]),
                    ]
                )
                what = f"{name} at {steps} steps: error of Retry-After"
                targets.append(Target(what, error, "<=", WANTED))
    columns = (
        "model",
        "steps",
        "refused",
        "told s",
        "true s",
        "median error",
        "refused in, ms p99",
    )
    return provenance.result(
        NAME,
        "How true Retry-After is",
        f"Bursts of {BURST} requests for a queue of {PLACES}. The true wait is the time until all "
        "that had been taken in before was answered, of generations until the last had begun. "
        "The first burst of each is not counted.",
        [Table("", columns, rows)],
        targets,
    )


def _bursts(server: Server, bundle: Bundle, steps: int, count: int) -> list[Told]:
    path, body = _request(bundle, steps)
    found: list[Told] = []
    for burst in range(count):
        shots = [Shot(_BETWEEN_S * number, body) for number in range(BURST)]
        fire(server, path, shots, patience_s=120, connections=BURST)
        if burst:
            found += _told(shots)
    return found


def _told(shots: Sequence[Shot]) -> list[Told]:
    taken = [shot for shot in shots if shot.status == 200]
    wrong = [shot for shot in shots if shot.status not in (200, 429)]
    if wrong:
        raise SystemExit(f"{wrong[0].status}: {wrong[0].answer[:300]!r}")
    found = []
    for shot in shots:
        if shot.status != 429 or shot.ended_s is None:
            continue
        # Connections are not read in the order in which they sent.
        ends_s = max(_place_s(one) for one in taken if one.sent_s <= shot.ended_s)
        retry = _RETRY_MS.search(shot.head)
        if retry is None:
            raise SystemExit(f"a 429 without retry-after-ms: {shot.head!r}")
        told_s = int(retry[1]) / 1000
        found.append(Told(told_s, ends_s - shot.ended_s, shot.ended_s - shot.sent_s))
    return found


def _place_s(shot: Shot) -> float:
    """When its place was free again: a generation's in the queue, a classification's in a call."""
    answer = shot.read
    if "text" in answer:
        return shot.sent_s + float(answer["timing"]["queue_ms"]) / 1000
    return shot.ended_s or 0.0


def _request(bundle: Bundle, steps: int) -> tuple[str, dict[str, object]]:
    name = bundle.manifest.name
    if bundle.manifest.task == "classify":
        text = text_of(TextCodec(bundle), min(100, bundle.manifest.text_input.max_tokens))
        return "/v1/classify", {"model": name, "input": text, "steps": steps}
    tokens = answer_tokens(bundle, 32)
    fields = {"model": name, "prompt": PROMPT, "max_tokens": tokens, "steps": steps, "seed": 1}
    return "/v1/generate", fields


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
