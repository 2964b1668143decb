"""The wait that `Retry-After` tells, beside the true one.

    python -m benchmarks.refusals [--bundles FOLDER ...]

Bursts fill the queue. The wait that a refused request was told is compared with the time until it
would have had its turn in a queue with a place for it: behind all that had been taken in before,
and behind those refused before, who were told to come back first.
"""

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Self

from benchmarks.client import Shot, fire
from benchmarks.lab import (
    Cell,
    Options,
    Provenance,
    Result,
    Table,
    Target,
    awake,
    options,
    parser,
    percentile,
    run,
)
from benchmarks.server import Server, running_server
from benchmarks.texts import PROMPT, answer_tokens, text_of
from serve.bundle import Bundle
from serve.inputs.text import TextCodec

NAME = "refusals"
PLACES, BURST, WANTED = 64, 128, 0.25
DECODING = 16  # generations beside those that wait
_BETWEEN_S = 0.0002
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


@dataclass(frozen=True, slots=True)
class Taken:
    """One request that was answered: when it came to the queue, and when it was over with it.

    A generation was when it began, a classification when it had been answered: the next one can
    begin then.
    """

    queued_s: float
    turn_s: float

    @classmethod
    def of(cls, shot: Shot) -> Self:
        answer, ended_s = shot.read, _ended_s(shot)
        begun_s = ended_s - answer["timing"]["compute_ms"] / 1000
        queued_s = begun_s - answer["timing"]["queue_ms"] / 1000
        return cls(queued_s, begun_s if "text" in answer else ended_s)


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    rows: list[Sequence[Cell]] = []
    targets = []
    flags = ("--queue-limit", str(PLACES), "--no-degrade")
    with awake(), running_server(chosen.bundles, *flags) as server:
        for bundle in chosen.read():
            for steps in (bundle.manifest.steps[0], bundle.manifest.full_steps):
                found = _bursts(server, bundle, steps, 2 if chosen.quick else 6)
                name = bundle.manifest.name
                rows.append([name, steps, len(found), *_cells(found)])
                if found:
                    error = median([one.error for one in found])
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
        "Retry-After beside the true wait",
        f"Bursts of {BURST} requests for a queue of {PLACES}. The true wait of a refused request "
        "is the time until all that had been taken in before was answered, of generations had "
        "begun; and for each that was refused before, the time that one of those took. "
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
        told = _told(shots)
        found += told if burst else []
        # Nobody comes back here; a server that still waits for them tells others to come later.
        time.sleep(max((one.told_s for one in told), default=0.0))
    return found


def _cells(found: Sequence[Told]) -> list[Cell]:
    if not found:  # a server this quick, or senders this slow, that nobody was refused
        return [None] * 4
    return [
        median([one.told_s for one in found]),
        median([one.true_s for one in found]),
        median([one.error for one in found]),
        1000 * percentile([one.answered_s for one in found], 0.99),
    ]


def _told(shots: Sequence[Shot]) -> list[Told]:
    taken = [Taken.of(shot) for shot in shots if shot.status == 200]
    wrong = [shot for shot in shots if shot.status not in (200, 429)]
    if wrong:
        raise SystemExit(f"{wrong[0].status}: {wrong[0].answer[:300]!r}")
    turns = sorted(one.turn_s for one in taken)[DECODING - 1 :]
    each_s = (turns[-1] - turns[0]) / (len(turns) - 1)
    found = []
    refused = [shot for shot in shots if shot.status == 429]
    for before, shot in enumerate(sorted(refused, key=_ended_s)):
        ended_s = _ended_s(shot)
        last_s = max(one.turn_s for one in taken if one.queued_s <= ended_s)
        retry = _RETRY_MS.search(shot.head)
        if retry is None:
            raise SystemExit(f"a 429 without retry-after-ms: {shot.head!r}")
        true_s = last_s + before * each_s - ended_s
        found.append(Told(int(retry[1]) / 1000, true_s, ended_s - shot.sent_s))
    return found


def _ended_s(shot: Shot) -> float:
    return shot.ended_s or 0.0


def _request(bundle: Bundle, steps: int) -> tuple[str, dict[str, object]]:
    name = bundle.manifest.name
    if bundle.manifest.task == "classify":
        text = text_of(TextCodec(bundle), min(100, bundle.manifest.text_input.max_tokens))
        return "/v1/classify", {"model": name, "input": text, "steps": steps}
    tokens = answer_tokens(bundle, 32)
    fields = {"model": name, "prompt": PROMPT, "max_tokens": tokens, "steps": steps, "seed": 1}
    return "/v1/generate", fields


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
