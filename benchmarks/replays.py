"""Whether an answer depends on what else is in its batch: the same requests, alone and together.

    python -m benchmarks.replays

Requests of every rung, greedy and sampled, with prompts of all lengths. Each is answered once
alone. Then they are asked again and again, in random order and at random moments, some cancelled
on the way. Every token must be the same.
"""

import random
import sys
import threading
from collections.abc import Sequence
from functools import partial

from benchmarks.generations import generation
from benchmarks.lab import Cell, Options, Provenance, Result, Table, Target, options, parser, run
from serve.bundle import Bundle
from serve.catalog import Catalog, Served
from serve.engine.engine import Engine
from serve.engine.job import Event, GeneratedEvent, Job, Limits, TokenEvent
from serve.engine.writing import Sampling
from serve.metrics import Metrics
from serve.runtime import open_model

NAME = "replays"
REQUESTS, REPLAYS, AT_ONCE = 200, 10_000, 24
LEFT_SHARE = 0.05  # of the replays whose client goes away


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


class Asker:
    """Asks one engine, a bounded number of requests at a time."""

    def __init__(self, bundle: Bundle) -> None:
        self.served = Served.open(bundle, open_model(bundle))
        self.engine = Engine(Catalog([self.served]), Limits(), Metrics())
        self.engine.start()
        self.room = threading.Semaphore(AT_ONCE)
        self._draw = random.Random(0)
        manifest = bundle.manifest
        vocabulary = range(1, manifest.text_tokenizer.vocab_size)
        window = manifest.text_input.max_tokens
        self.requests: list[tuple[int, list[int], int, Sampling]] = []
        for seed in range(REQUESTS):
            length = self._draw.randint(1, window) if seed % 4 == 0 else self._draw.randint(1, 40)
            prompt = [self._draw.choice(vocabulary) for _ in range(length)]
            sampling = Sampling(temperature=float(seed % 2), seed=seed)
            tokens = self._draw.randint(1, 24)
            steps = self._draw.choice(manifest.steps)
            self.requests.append((steps, prompt, tokens, sampling))

    def ask(self, number: int, ends: dict[int, list[str]], left: bool = False) -> None:
        """Put the answer to request `number` into `ends`, unless the client leaves."""

        def deliver(event: Event) -> None:
            if isinstance(event, TokenEvent):
                return
            assert isinstance(event, GeneratedEvent), event
            ends[number].append(event.text)
            self.room.release()

        job = generation(self.served, *self.requests[number], deliver)
        self.room.acquire()
        self.engine.submit(job)
        if left:
            threading.Timer(self._draw.random() / 100, self._leave, (job,)).start()

    def _leave(self, job: Job) -> None:
        if self.engine.cancel(job):
            self.room.release()

    def settle(self) -> None:
        """Wait until every request has ended."""
        for _ in range(AT_ONCE):
            self.room.acquire()
        for _ in range(AT_ONCE):
            self.room.release()


def measure(chosen: Options, provenance: Provenance) -> Result:
    replays = 200 if chosen.quick else REPLAYS
    rows: list[Sequence[Cell]] = []
    targets: list[Target] = []
    for bundle in chosen.read("generate"):
        asker = Asker(bundle)
        alone: dict[int, list[str]] = {number: [] for number in range(REQUESTS)}
        for number in alone:
            asker.ask(number, alone)
            asker.settle()
        again: dict[int, list[str]] = {number: [] for number in range(REQUESTS)}
        draw = random.Random(1)
        for _ in range(replays):
            asker.ask(draw.randrange(REQUESTS), again, left=draw.random() < LEFT_SHARE)
        asker.settle()
        asker.engine.stop()
        answers = sum(map(len, again.values()))
        same = sum(text == alone[number][0] for number, texts in again.items() for text in texts)
        name, precision = bundle.manifest.name, bundle.manifest.precision
        rows.append([name, precision, replays, answers, same])
        targets.append(Target(f"{name}: other answers than alone", answers - same, "==", 0))
        targets.append(Target(f"{name}: replays answered", answers, ">=", 0.9 * replays))
    columns = ("model", "precision", "replays", "answered", "the same as alone")
    return provenance.result(
        NAME,
        "The same answers, alone and in batches",
        f"{REQUESTS} requests of all rungs, greedy and sampled, asked {AT_ONCE} at a time; "
        f"{LEFT_SHARE:.0%} of the clients leave on the way.",
        [Table("", columns, rows)],
        targets,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
