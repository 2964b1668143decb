"""Speculative decoding beside plain decoding: milliseconds a token, and whether answers differ.

    python -m benchmarks.ahead [--bundles zoo/shakespeare ...]

One client asks the engine, without HTTP, for answers at full steps. Plain decoding is the same
engine with drafts switched off. Both answer the same prompts, in turn.
"""

import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from statistics import median

from benchmarks.generations import generation
from benchmarks.lab import (
    Cell,
    Options,
    Provenance,
    Result,
    Table,
    Target,
    interleave,
    median_ratio,
    options,
    parser,
    run,
)
from serve.bundle import Bundle
from serve.catalog import Catalog, Served
from serve.engine.engine import Engine
from serve.engine.job import Event, GeneratedEvent, Limits, TokenEvent
from serve.engine.writing import Sampling
from serve.metrics import Metrics
from serve.runtime import open_model
from serve.runtime.session import usable_cores

NAME = "ahead"
TOKENS, PROMPTS, LEAST = 200, 1000, {"fp32": 1.5, "int8": 1.0}
PROMPT_TOKENS, CHECKED_TOKENS = 24, 40


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    threads = usable_cores()  # as a server has
    return run(NAME, arguments, parsed, partial(measure, options(parsed), threads))


class Writer:
    """One client of an engine of its own."""

    def __init__(self, bundle: Bundle, threads: int, ahead: bool) -> None:
        model = open_model(bundle, threads=threads)
        model.warm_up()  # as a server does, which finds what suits the machine
        self.served = Served.open(bundle, model)
        self.metrics = Metrics()
        self.engine = Engine(Catalog([self.served]), Limits(speculate=ahead), self.metrics)
        self.engine.start()

    def write(self, prompt: Sequence[int], tokens: int, temperature: float, seed: int) -> str:
        """The answer at full steps."""
        over = threading.Event()
        ends: list[Event] = []

        def deliver(event: Event) -> None:
            if not isinstance(event, TokenEvent):
                ends.append(event)
                over.set()

        sampling = Sampling(temperature=temperature, seed=seed)
        full = self.served.manifest.full_steps
        self.engine.submit(generation(self.served, full, prompt, tokens, sampling, deliver))
        over.wait()
        (end,) = ends
        assert isinstance(end, GeneratedEvent), end
        return end.text

    def ms_a_token(
        self, prompts: Iterator[Sequence[int]], tokens: int, temperature: float
    ) -> float:
        """Of the answer to the next prompt."""
        begun_s = time.perf_counter()
        self.write(next(prompts), tokens, temperature, seed=1)
        return (time.perf_counter() - begun_s) * 1000 / tokens

    def counted(self, what: str) -> float:
        labels = {"model": self.served.name}
        name = f"stepdial_speculative_{what}_total"
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def prompts_of(writer: Writer, count: int) -> list[list[int]]:
    """Texts that the model itself began, so that they are like what it has seen."""
    draw = random.Random(0)
    vocabulary = range(1, writer.served.manifest.text_tokenizer.vocab_size)
    begun = [[draw.choice(vocabulary)] for _ in range(count)]
    codec = writer.served.codec
    return [
        codec.encode_prompt(writer.write(one, PROMPT_TOKENS, 1.0, seed))
        for seed, one in enumerate(begun)
    ]


def measure(chosen: Options, threads: int, provenance: Provenance) -> Result:
    rows: list[Sequence[Cell]] = []
    targets: list[Target] = []
    for bundle in chosen.read("generate"):
        if bundle.manifest.method != "euler" or not bundle.manifest.keeps_caches:
            continue
        found = _measure(bundle, threads, chosen.quick)
        rows += found[0]
        targets += found[1]
    columns = (
        *("model", "temperature", "plain, ms", "with drafts, ms"),
        *("plain over drafts", "accepted", "same answers"),
    )
    return provenance.result(
        NAME,
        "Speculative decoding beside plain decoding",
        f"One client, {TOKENS} tokens an answer at full steps, {threads} thread(s) a call. "
        "Medians; the ratio is the median of the ratios within each round. Accepted: drafts that "
        "the full steps confirmed.",
        [Table("", columns, rows)],
        targets,
    )


def _measure(
    bundle: Bundle, threads: int, quick: bool
) -> tuple[list[Sequence[Cell]], list[Target]]:
    plain, ahead = Writer(bundle, threads, ahead=False), Writer(bundle, threads, ahead=True)
    count, tokens = (5, 20) if quick else (PROMPTS, TOKENS)
    prompts = prompts_of(plain, count)
    precision = bundle.manifest.precision
    name = f"{bundle.manifest.name}, {precision}"
    rows: list[Sequence[Cell]] = []
    targets: list[Target] = []
    for temperature in (0.0, 1.0):
        before = ahead.counted("drafted"), ahead.counted("accepted")
        same = sum(
            plain.write(prompt, CHECKED_TOKENS, temperature, seed)
            == ahead.write(prompt, CHECKED_TOKENS, temperature, seed)
            for seed, prompt in enumerate(prompts)
        )
        # Each goes through the prompts on its own, so that a round has one prompt.
        times = interleave(
            {
                name: partial(writer.ms_a_token, cycle(prompts), tokens, temperature)
                for name, writer in (("plain", plain), ("ahead", ahead))
            },
            seconds=0,
            least=1 if quick else 40,
            most=40,
        )
        gain = median_ratio(times["plain"], times["ahead"])
        drafted = ahead.counted("drafted") - before[0]
        accepted = (ahead.counted("accepted") - before[1]) / max(1.0, drafted)
        plain_ms, ahead_ms = median(times["plain"]), median(times["ahead"])
        rows.append([name, temperature, plain_ms, ahead_ms, gain, accepted, f"{same} of {count}"])
        what = f"{name}, temperature {temperature:g}"
        targets.append(Target(f"{what}: the same answers", same, "==", count))
        targets.append(Target(f"{what}: tokens a second", gain, ">=", LEAST[precision], "x"))
    for writer in (plain, ahead):
        writer.engine.stop()
    return rows, targets


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
