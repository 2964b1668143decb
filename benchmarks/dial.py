"""Milliseconds of an answer at each rung, beside those at the largest.

    python -m benchmarks.dial [--bundles FOLDER ...]

Asks the real server for the same answers at every rung in turn, and counts whether each says that
it took the steps it was asked for. A model takes turns with its plain models, which are named
MODEL-plain and so on.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.client import Client
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
from benchmarks.server import running_server
from benchmarks.texts import PROMPT, answer_tokens, text_of, window_of
from serve.bundle import Bundle, ImageInput
from serve.inputs.text import TextCodec

NAME = "dial"
TEXT_TOKENS, ANSWER_TOKENS = 100, 200
WANTED_RATIO, OF_STEPS, TO_STEPS = 0.35, 1, 8


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer."""

    compute_ms: float
    wall_ms: float
    as_asked: bool


Rung = tuple[str, int]  # a model and its steps


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    bundles = chosen.read()
    seconds, least = (0.2, 2) if chosen.quick else (12.0, 9)
    rows: list[Sequence[Cell]] = []
    targets = []
    answers = as_asked = 0
    with running_server(chosen.bundles) as server, Client.of(server) as client:
        for request, calls in _in_turn(bundles, client, chosen.quick).items():
            names = dict.fromkeys(name for name, _ in calls)
            samples = interleave(calls, seconds * len(names), least)
            answers += sum(map(len, samples.values()))
            as_asked += sum(one.as_asked for column in samples.values() for one in column)
            for name in names:
                of_one = {steps: found for (one, steps), found in samples.items() if one == name}
                rows += _rows(f"{name}, {request[1]}", of_one)
                if OF_STEPS in of_one and TO_STEPS in of_one:
                    ratio = _compute_ratio(of_one, OF_STEPS, TO_STEPS)
                    what = f"compute time at {OF_STEPS} step, of that at {TO_STEPS}"
                    what = f"{name}, {request[1]}: {what}"
                    targets.append(Target(what, ratio, "<=", WANTED_RATIO))
    what = "answers that took the steps they were asked for"
    targets.append(Target(what, as_asked, "==", answers))
    columns = ("request", "steps", "compute ms", "of the largest", "client ms", "answers")
    caption = (
        "compute: as the server reports it, from its first call of the model to the end of the "
        "last; client: from asking to having read the answer, at one client. Medians; the ratio "
        "is the median of the ratios within each round."
    )
    return provenance.result(
        NAME,
        "The dial: time at each rung",
        "The same answers at every rung, and of the plain models of the same task, in turn, from "
        "the real server over HTTP.",
        [Table(caption, columns, rows)],
        targets,
    )


def _in_turn(
    bundles: Sequence[Bundle], client: Client, quick: bool
) -> dict[tuple[str, str], dict[Rung, Callable[[], Sample]]]:
    """By model and kind of request: the calls of it and of its plain models, MODEL-plain..."""
    tagged = _tagged_text(bundles)
    found: dict[tuple[str, str], dict[Rung, Callable[[], Sample]]] = {}
    for bundle in bundles:
        name = bundle.manifest.name
        for request, call in _requests(bundle, client, quick, tagged).items():
            calls = found.setdefault((name.partition("-plain")[0], request), {})
            calls |= {(name, steps): partial(call, steps) for steps in bundle.manifest.steps}
    return found


def _requests(
    bundle: Bundle, client: Client, quick: bool, tagged: str
) -> dict[str, Callable[[int], Sample]]:
    """What a model is asked, and calls that ask it at so many steps."""
    name = bundle.manifest.name
    classify = partial(_classify, client, name)
    if bundle.manifest.task == "generate":
        tokens = 16 if quick else answer_tokens(bundle, ANSWER_TOKENS)
        return {f"a token of an answer of {tokens}": partial(_generate, client, name, tokens)}
    if isinstance(bundle.manifest.input, ImageInput):
        return {"an image": partial(classify, {"image": _blank(bundle.manifest.input)})}
    codec = TextCodec(bundle)
    if bundle.manifest.task == "tag":  # of one alphabet: the paragraphs are not in it
        count = len(codec.encode_input(tagged, truncate=True).tokens)
        return {f"a text of {count} tokens": partial(classify, tagged)}
    window = window_of(bundle.manifest)
    found: dict[str, Callable[[int], Sample]] = {}
    for length in sorted({min(TEXT_TOKENS, window), window}):
        text = text_of(codec, length)
        count = len(codec.encode_input(text, truncate=True).tokens)
        found[f"a text of {count} tokens"] = partial(classify, text)
    return found


def _tagged_text(bundles: Sequence[Bundle]) -> str:
    """The first example on a tagger's card, which plain models of the same data read as well."""
    for bundle in bundles:
        examples = bundle.manifest.card.get("examples")
        if bundle.manifest.task == "tag" and isinstance(examples, Sequence) and examples:
            return str(examples[0])
    return ""


def _blank(shape: ImageInput) -> list[Any]:
    """What is in a picture does not change its time."""
    pixel: Any = 0 if shape.channels == 1 else [0] * shape.channels
    return [[pixel] * shape.width] * shape.height


def _classify(client: Client, model: str, given: Any, steps: int) -> Sample:
    reply = client.post("/v1/classify", {"model": model, "input": given, "steps": steps})
    budgets = [result["budget"] for result in reply.body["results"]]
    return _sample(reply.body, reply.wall_ms, budgets, steps, 1)


def _generate(client: Client, model: str, tokens: int, steps: int) -> Sample:
    asked = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0.0,
        "steps": steps,
    }
    reply = client.post("/v1/generate", asked)
    written = reply.body["usage"]["completion_tokens"]
    assert written == tokens, "without a stop string every answer has max_tokens"
    return _sample(reply.body, reply.wall_ms, [reply.body["budget"]], steps, tokens)


def _sample(
    body: dict[str, Any], wall_ms: float, budgets: list[dict[str, Any]], steps: int, parts: int
) -> Sample:
    return Sample(
        compute_ms=body["timing"]["compute_ms"] / parts,
        wall_ms=wall_ms / parts,
        as_asked=all(budget["steps"] == steps for budget in budgets),
    )


def _rows(request: str, samples: dict[int, list[Sample]]) -> list[Sequence[Cell]]:
    largest = max(samples)
    return [
        [
            request,
            steps,
            median([one.compute_ms for one in column]),
            _compute_ratio(samples, steps, largest),
            median([one.wall_ms for one in column]),
            len(column),
        ]
        for steps, column in samples.items()
    ]


def _compute_ratio(samples: dict[int, list[Sample]], steps: int, others: int) -> float:
    return median_ratio(
        [one.compute_ms for one in samples[steps]], [one.compute_ms for one in samples[others]]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
