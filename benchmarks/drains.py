"""SIGTERM under streaming load: streams that are cut off, and when clients are told.

    python -m benchmarks.drains [--times 100]

Each time a server is started, clients stream, and the signal comes. Half of the servers have time
for all answers to finish, the others have not. What is measured begins with the signal.
"""

import os
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.client import Client, Crowd, UnexpectedAnswer
from benchmarks.lab import Cell, Options, Provenance, Result, Table, Target, options, parser, run
from benchmarks.server import Server, running_server
from benchmarks.texts import PROMPT
from serve.bundle import Manifest

NAME = "drains"
TIMES, STREAMS = 100, 8
TOKENS, ENDLESS_TOKENS, SHORT_GRACE_S = 96, 100_000, 0.3
WANTED_MS = 100
_PROBE_S, _PROBES_BEFORE = 0.002, 3
_GONE_S = 45.0


@dataclass(slots=True)
class Seen:
    """What came of the streams and of the probes, over all servers."""

    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    ready_ms: list[float] = field(default_factory=list)  # when readiness was asked and still on
    off_ms: list[float] = field(default_factory=list)  # when it was first seen to be off
    gone_s: list[float] = field(default_factory=list)
    not_live: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # requests after the signal


class Stream:
    """One stream, read to its end."""

    def __init__(self, model: str, steps: int, tokens: int) -> None:
        self.begun = threading.Event()
        self.end = ""  # the name of its last event, or the code of its error
        self._tokens = tokens
        self._body = {"model": model, "prompt": PROMPT, "steps": steps, "stream": True}
        self._body |= {"max_tokens": tokens}

    def read(self, client: Client) -> str:
        try:
            self.end = self._read(client)
        except Exception as error:
            self.end = f"{type(error).__name__}: {error}"
        self.begun.set()
        return self.end

    def _read(self, client: Client) -> str:
        seen, end = 0, ""
        for event in client.stream("/v1/generate", self._body):
            if end:
                raise UnexpectedAnswer("an event after the last")
            if event.name == "error":
                end = str(event.data["error"]["code"])
            elif event.name:
                end = event.name
            elif event.data["index"] != seen:
                raise UnexpectedAnswer(f"token {event.data['index']}, not {seen}")
            else:
                seen += 1
                self.begun.set()
        if end == "done" and seen != self._tokens:
            raise UnexpectedAnswer(f"{seen} of {self._tokens} tokens")
        return end


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--times", type=int, default=None, help=f"(default: {TIMES})")
    parsed = made.parse_args(arguments)
    times = parsed.times or (2 if parsed.quick else TIMES)
    return run(NAME, arguments, parsed, partial(measure, options(parsed), times))


def measure(chosen: Options, times: int, provenance: Provenance) -> Result:
    bundle = chosen.read("generate")[0]
    streams = 3 if chosen.quick else STREAMS
    finish, cut = Seen(), Seen()
    for number in range(times):
        if number % 2 == 0:
            with running_server([bundle.folder]) as server:
                _drain(server, bundle.manifest, streams, TOKENS, finish)
        else:
            flags = ("--drain-s", str(SHORT_GRACE_S), "--max-tokens", str(ENDLESS_TOKENS))
            with running_server([bundle.folder], *flags) as server:
                _drain(server, bundle.manifest, streams, ENDLESS_TOKENS, cut)
    for problem in (*finish.problems, *cut.problems)[:5]:
        print(problem, file=sys.stderr)
    both = (finish, cut)
    return provenance.result(
        NAME,
        "SIGTERM under streaming load",
        f"{times} servers, each with {streams} streams of {bundle.manifest.name} when the signal "
        f"comes: half of them of {TOKENS} tokens, with the usual grace of 30 s, half without end, "
        f"with a grace of {SHORT_GRACE_S:g} s. Readiness and liveness are asked every few "
        "milliseconds, and new requests are sent after the signal.",
        [_ends_table(finish, cut), _probe_table(finish, cut)],
        [
            Target("streams with time that did not finish", _others(finish, "done"), "==", 0),
            Target("streams without that ended otherwise", _others(cut, "draining"), "==", 0),
            Target("new requests not told to go elsewhere", _others_told(both), "==", 0),
            Target("readiness seen to be off, at most after", _most(both), "<=", WANTED_MS, "ms"),
            Target("liveness that was not 200", sum(one.not_live for one in both), "==", 0),
            Target("complaints and broken streams", _problems(both), "==", 0),
        ],
    )


def _drain(server: Server, manifest: Manifest, streams: int, tokens: int, seen: Seen) -> None:
    rungs = manifest.steps
    readers = [
        Stream(manifest.name, rungs[number % len(rungs)], tokens) for number in range(streams)
    ]
    with Crowd(server, [one.read for one in readers], once=True), Client.of(server) as probe:
        for reader in readers:
            reader.begun.wait(60)
        for _ in range(_PROBES_BEFORE):
            probe.status("/health/ready")
        os.kill(server.pid, signal.SIGTERM)
        _watch(server, probe, manifest, seen)
    for reader in readers:
        seen.ends[reader.end] += 1
        if reader.end not in ("done", "draining"):
            seen.problems.append(reader.end)
    seen.problems += server.complaints()


def _watch(server: Server, probe: Client, manifest: Manifest, seen: Seen) -> None:
    """Ask probes, and for an answer now and then, until the server has gone."""
    sent_s = time.perf_counter()
    last_on_ms, off_ms, number = 0.0, None, 0
    while True:
        asked_ms = (time.perf_counter() - sent_s) * 1000
        try:
            if probe.status("/health/ready") == 200:
                last_on_ms = asked_ms
            elif off_ms is None:
                off_ms = (time.perf_counter() - sent_s) * 1000
            seen.not_live += probe.status("/health/live") != 200
            if off_ms is not None and number % 20 == 0:
                seen.refused[_asked(server, manifest)] += 1
        except OSError:
            break
        number += 1
        if asked_ms > _GONE_S * 1000:
            seen.problems.append("the server went on")
            break
        time.sleep(_PROBE_S)
    seen.ready_ms.append(last_on_ms)
    if off_ms is not None:
        seen.off_ms.append(off_ms)
    seen.gone_s.append(time.perf_counter() - sent_s)


def _asked(server: Server, manifest: Manifest) -> str:
    """What becomes of a request that comes too late."""
    body: dict[str, Any] = {"model": manifest.name, "prompt": PROMPT, "max_tokens": 1}
    with Client.of(server) as client:
        try:
            client.post("/v1/generate", body)
        except UnexpectedAnswer as refusal:
            return "draining" if '"code": "draining"' in str(refusal) else str(refusal)
    return "answered"


def _others(seen: Seen, wanted: str) -> int:
    return seen.ends.total() - seen.ends[wanted]


def _others_told(both: Iterable[Seen]) -> int:
    return sum(one.refused.total() - one.refused["draining"] for one in both)


def _most(both: Iterable[Seen]) -> float:
    return max((ms for one in both for ms in one.off_ms), default=0.0)


def _problems(both: Iterable[Seen]) -> int:
    return sum(len(one.problems) for one in both)


def _ends_table(finish: Seen, cut: Seen) -> Table:
    rows: list[list[Cell]] = [
        [
            name,
            len(seen.gone_s),
            seen.ends.total(),
            seen.ends["done"],
            seen.ends["draining"],
            seen.refused.total(),
            statistics.median(seen.gone_s) if seen.gone_s else None,
        ]
        for name, seen in (("time to finish", finish), ("no time to finish", cut))
    ]
    columns = ("servers with", "signals", "streams", "whole", "ended by an error", "refused")
    return Table("How streams ended.", (*columns, "s until it had gone"), rows)


def _probe_table(finish: Seen, cut: Seen) -> Table:
    rows: list[list[Cell]] = []
    for name, seen in (("time to finish", finish), ("no time to finish", cut)):
        off = sorted(seen.off_ms)
        rows.append(
            [
                name,
                statistics.median(off) if off else None,
                off[-1] if off else None,
                max(seen.ready_ms, default=None),
            ]
        )
    columns = ("servers with", "off, median ms", "off, longest ms", "last asked while on, ms")
    return Table("Readiness after the signal, as one client that asks sees it.", columns, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
