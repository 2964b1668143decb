"""The official OpenAI client against a full queue: how often its own retries bring an answer.

Far more clients ask at once than the queue has places, each with the client's defaults: two
retries, each after the time that `retry-after-ms` told. Knows nothing of how that is predicted.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from functools import partial

from openai import AsyncOpenAI, RateLimitError

from benchmarks.options import Options, options, parser, run
from benchmarks.result import Cell, Provenance, Result, Table, Target
from benchmarks.rounds import median
from benchmarks.server import Server, running_server
from benchmarks.texts import PROMPT

NAME = "retries"
PLACES, CLIENTS, TOKENS, WANTED = 32, 96, 32, 0.95


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    rows: list[Sequence[Cell]] = []
    targets = []
    rounds = 1 if chosen.quick else 5
    for bundle in chosen.read("generate"):
        name = bundle.manifest.name
        flags = ("--queue-limit", str(PLACES), "--no-degrade")
        with running_server([bundle.folder], *flags) as server:
            for steps in (bundle.manifest.steps[0], bundle.manifest.full_steps):
                served, first, waits = [], [], []
                for _ in range(rounds):
                    took = asyncio.run(_burst(server, name, steps))
                    served.append(sum(one is not None for one, _ in took) / CLIENTS)
                    first.append(sum(one is not None and not n for one, n in took) / CLIENTS)
                    waits += [one for one, retries in took if one is not None and retries]
                share = median(served)
                rows.append([name, steps, median(first), share, median(waits or [0.0])])
                what = f"{name} at {steps} steps: clients served"
                targets.append(Target(what, share, ">=", WANTED))
    columns = ("model", "steps", "served at once", "served in the end", "median wait of others, s")
    return provenance.result(
        NAME,
        "The OpenAI client's own retries",
        f"{CLIENTS} clients ask for {TOKENS} tokens at the same moment of a server whose queue has "
        f"{PLACES} places beside the 16 that decode. Medians of {rounds} rounds.",
        [Table("", columns, rows)],
        targets,
    )


async def _burst(server: Server, name: str, steps: int) -> list[tuple[float | None, int]]:
    """Of each client: the seconds until it was served, None if never; and its retries."""
    base = f"http://{server.host}:{server.port}/v1"
    async with AsyncOpenAI(base_url=base, api_key="none", timeout=120) as client:
        return await asyncio.gather(*(_ask(client, name, steps, seed) for seed in range(CLIENTS)))


async def _ask(client: AsyncOpenAI, name: str, steps: int, seed: int) -> tuple[float | None, int]:
    begun_s = time.perf_counter()
    try:
        answer = await client.completions.with_raw_response.create(
            model=name, prompt=PROMPT, max_tokens=TOKENS, seed=seed, extra_body={"steps": steps}
        )
    except RateLimitError:
        return None, client.max_retries
    return time.perf_counter() - begun_s, answer.retries_taken


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
