"""What HTTP adds: the time of a request less that of the same call of the runtime, made bare.

Bare means in this process, with the tokens ready and nothing done with the scores; the request
adds the client, the socket, JSON, the tokenizer, the queue, the sampling and the answer. Both are
made in turn.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.client import Client, UnexpectedAnswer
from benchmarks.lab import (
    Cell,
    Options,
    Provenance,
    Result,
    Table,
    Target,
    interleave,
    median,
    options,
    parser,
    run,
)
from benchmarks.server import running_server
from benchmarks.texts import PROMPT, answer_tokens, text_of, window_of
from serve.bundle import Bundle
from serve.inputs.text import TextCodec
from serve.runtime import Model, open_model
from serve.runtime.protocol import IntArray

NAME = "overhead"
TEXT_TOKENS, ANSWER_TOKENS = 100, 64
WANTED_MS = 2.0


@dataclass(frozen=True, slots=True)
class Case:
    """One input: bare and over HTTP, each returning milliseconds."""

    what: str
    steps: int
    calls: int  # of the runtime
    bare: Callable[[], float]
    over_http: Callable[[], float]


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    bundles = chosen.read()
    seconds, least = (0.1, 2) if chosen.quick else (4.0, 15)
    rows: list[Sequence[Cell]] = []
    targets = []
    with running_server(chosen.bundles) as server, Client.of(server) as client:
        for case in [case for bundle in bundles for case in _cases(bundle, client, chosen.quick)]:
            calls = {"bare": case.bare, "http": case.over_http}
            samples = interleave(calls, seconds, least, most=1000)
            bare_ms, http_ms = median(samples["bare"]), median(samples["http"])
            added_ms = http_ms - bare_ms
            per_call_ms = added_ms / case.calls
            rows.append(
                [
                    *(case.what, case.steps, bare_ms, http_ms, added_ms, per_call_ms),
                    len(samples["http"]),
                ]
            )
            what = f"{case.what}, steps {case.steps}: added to a call"
            targets.append(Target(what, per_call_ms, "<=", WANTED_MS, "ms"))
    columns = ("what", "steps", "bare ms", "HTTP ms", "added ms", "to each call", "times")
    caption = (
        "Medians at one client, bare calls and requests in turn. A text is one call of the "
        "runtime, an answer one for each token; the target is for what is added to a call."
    )
    return provenance.result(
        NAME,
        "What HTTP adds",
        "Requests to the real server beside the same calls of the runtime without it.",
        [Table(caption, columns, rows)],
        targets,
    )


def _cases(bundle: Bundle, client: Client, quick: bool) -> list[Case]:
    model = open_model(bundle)
    ends = sorted({bundle.manifest.steps[0], bundle.manifest.full_steps})
    make = _classify_cases if bundle.manifest.task == "classify" else _generate_cases
    return [case for steps in ends for case in make(model, client, steps, quick)]


def _classify_cases(model: Model, client: Client, steps: int, quick: bool) -> list[Case]:
    bundle = model.bundle
    codec = TextCodec(bundle)
    text = text_of(codec, min(TEXT_TOKENS, window_of(bundle.manifest)))
    encoded = codec.encode_input(text, truncate=True).tokens
    tokens = np.array([encoded], dtype=np.int64)  # (1, N)
    body = {"model": bundle.manifest.name, "input": text, "steps": steps}

    def bare() -> float:
        begun_s = time.perf_counter()
        model.classifier(steps).run(tokens)
        return (time.perf_counter() - begun_s) * 1000

    def over_http() -> float:
        return client.post("/v1/classify", body).wall_ms

    what = f"{bundle.manifest.name}: a text of {len(encoded)} tokens"
    return [Case(what, steps, 1, bare, over_http)]


def _generate_cases(model: Model, client: Client, steps: int, quick: bool) -> list[Case]:
    bundle = model.bundle
    name = bundle.manifest.name
    prompt = np.array(TextCodec(bundle).encode_prompt(PROMPT), dtype=np.int64)  # (S,)
    many = 8 if quick else answer_tokens(bundle, ANSWER_TOKENS)
    body = {"model": name, "prompt": PROMPT, "temperature": 0.0, "steps": steps}

    def bare(tokens: int) -> float:
        return _bare_answer_ms(model, steps, prompt, tokens)

    def whole(tokens: int) -> float:
        return client.post("/v1/generate", body | {"max_tokens": tokens}).wall_ms

    def streamed() -> float:
        asked = body | {"max_tokens": many, "stream": True}
        *_, last = client.stream("/v1/generate", asked)
        if last.name != "done":
            raise UnexpectedAnswer(f"the stream ended with {last.name}: {last.data}")
        return last.at_ms

    every = partial(bare, many)
    return [
        Case(f"{name}: an answer of 1 token", steps, 1, partial(bare, 1), partial(whole, 1)),
        Case(f"{name}: an answer of {many} tokens", steps, many, every, partial(whole, many)),
        Case(f"{name}: a stream of {many} tokens", steps, many, every, streamed),
    ]


def _bare_answer_ms(model: Model, steps: int, prompt: IntArray, tokens: int) -> float:
    """The time in the calls that write an answer, choosing its tokens left out."""
    batch = model.decoder(steps).open_batch()
    begun_s = time.perf_counter()
    logits = batch.add(prompt)  # (V,)
    spent_s = time.perf_counter() - begun_s
    for _ in range(tokens - 1):
        following = np.array([logits.argmax()], dtype=np.int64)
        begun_s = time.perf_counter()
        logits = batch.step(following)[0]
        spent_s += time.perf_counter() - begun_s
    return spent_s * 1000


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
