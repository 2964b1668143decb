"""Cached generation beside recomputing the whole context for each token.

Recomputing is how small samplers work: crop the tokens to the window, run them all, take the
scores of the last position. It is measured at every few tokens, since it depends on nothing but
their number. Both use the same graph in the same runtime; recomputing in torch is measured too
where a run is named. It deliberately knows nothing of HTTP.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.options import Options, options, parser, run
from benchmarks.result import Cell, Provenance, Result, Table, Target
from benchmarks.rounds import interleave, median
from benchmarks.texts import PROMPT, answer_tokens
from serve.bundle import Bundle
from serve.runtime import Decoder, open_model
from serve.runtime.ort_session import usable_cores
from serve.runtime.protocol import FloatArray, IntArray
from serve.text import TextCodec

NAME = "cached_decode"
ANSWER_TOKENS, LAST_TOKENS, AT_STEPS, WANTED_TIMES = 200, 20, 8, 10.0

CACHED = "cached"
FORWARD = "recomputed, scores at every position"
PREFILL = "recomputed, scores at the last position"
TORCH = "recomputed in torch"

STRIDE_TOKENS = 5

Times = dict[int, float]  # milliseconds of a token, by its number in the answer
LastLogits = Callable[[IntArray], FloatArray]  # tokens (S,) to the logits (V,) of the last


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument(
        "--run",
        type=Path,
        metavar="FOLDER",
        help="the training run that the bundle was made of, to recompute in torch too",
    )
    parsed = made.parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed), parsed.run))


def measure(chosen: Options, run_folder: Path | None, provenance: Provenance) -> Result:
    rows: list[Sequence[Cell]] = []
    targets = []
    bundles = chosen.read("generate")
    in_torch = _torch_last(run_folder, bundles) if run_folder is not None else {}
    for bundle in bundles:
        name = bundle.manifest.name
        steps = AT_STEPS if AT_STEPS in bundle.manifest.steps else bundle.manifest.full_steps
        decoder = open_model(bundle).decoder(steps)
        prompt = np.array(TextCodec(bundle).encode_prompt(PROMPT), dtype=np.int64)  # (S,)
        tokens = 12 if chosen.quick else answer_tokens(bundle, ANSWER_TOKENS)
        sequence = _answer(decoder, prompt, tokens)
        ways: dict[str, LastLogits] = {
            FORWARD: partial(_forward_last, decoder),
            PREFILL: partial(_prefill_last, decoder),
        }
        if name in in_torch:
            ways[TORCH] = partial(in_torch[name], steps)
        calls: dict[str, Callable[[], Times]] = {
            way: partial(_recomputed, last, sequence, len(prompt)) for way, last in ways.items()
        }
        calls[CACHED] = partial(_cached, decoder, sequence, len(prompt))
        seconds, least = (0.1, 1) if chosen.quick else (30.0, 3)
        samples = interleave(calls, seconds, least, most=9)
        mean_ms = {way: _mean_ms(runs, 0) for way, runs in samples.items()}
        late_ms = {way: _mean_ms(runs, tokens - LAST_TOKENS) for way, runs in samples.items()}
        for way in (CACHED, *ways):
            rows.append(
                [
                    f"{name}, {steps} steps: {way}",
                    mean_ms[way],
                    mean_ms[way] / mean_ms[CACHED],
                    late_ms[way],
                    late_ms[way] / late_ms[CACHED],
                    len(samples[way]),
                ]
            )
        ratio = min(mean_ms[FORWARD], mean_ms[PREFILL]) / mean_ms[CACHED]
        what = f"{name}, {steps} steps, {tokens} tokens: recomputed, of cached"
        targets.append(Target(what, ratio, ">=", WANTED_TIMES, "times"))
        same = _agreeing(decoder, sequence, len(prompt))
        what = f"{name}, {steps} steps: tokens that recomputing chooses too"
        targets.append(Target(what, same, "==", tokens))
    columns = ("way", "ms a token", "times cached", "ms at the end", "times cached there", "runs")
    caption = (
        f"Greedy, one row, {ANSWER_TOKENS} tokens or as many as the window holds behind the "
        f"prompt; the end is the last {LAST_TOKENS}. For each token the median over the runs, "
        f"then the mean over the tokens (recomputed: over every {STRIDE_TOKENS}th); reading the "
        "prompt is counted as the first token."
    )
    return provenance.result(
        NAME,
        "Cached generation",
        "The same answer written with the cache, and by recomputing the context for each token.",
        [Table(caption, columns, rows)],
        targets,
    )


def _answer(decoder: Decoder, prompt: IntArray, tokens: int) -> IntArray:
    """The prompt and its greedy continuation, which every way is then given token by token."""
    batch = decoder.open_batch()
    logits = batch.add(prompt)
    sequence = prompt.tolist()
    for _ in range(tokens):
        sequence.append(int(logits.argmax()))
        if len(sequence) < len(prompt) + tokens:
            logits = batch.step(np.array(sequence[-1:], dtype=np.int64))[0]
    return np.array(sequence, dtype=np.int64)


def _cached(decoder: Decoder, sequence: IntArray, start: int) -> Times:
    batch = decoder.open_batch()
    spent: Times = {}
    for end in range(start, len(sequence)):
        begun_s = time.perf_counter()
        if end == start:
            batch.add(sequence[:start]).argmax()
        else:
            batch.step(sequence[end - 1 : end])[0].argmax()
        spent[end - start] = (time.perf_counter() - begun_s) * 1000
    return spent


def _recomputed(last_logits: LastLogits, sequence: IntArray, start: int) -> Times:
    spent: Times = {}
    # From the middle of the first stride, so that the mean is that of all tokens.
    for end in range(start + STRIDE_TOKENS // 2, len(sequence), STRIDE_TOKENS):
        begun_s = time.perf_counter()
        last_logits(sequence[:end]).argmax()
        spent[end - start] = (time.perf_counter() - begun_s) * 1000
    return spent


def _forward_last(decoder: Decoder, tokens: IntArray) -> FloatArray:
    last: FloatArray = decoder.forward(tokens[None])[0, -1]
    return last


def _prefill_last(decoder: Decoder, tokens: IntArray) -> FloatArray:
    return decoder.open_batch().add(tokens)


def _torch_last(
    run_folder: Path, bundles: Sequence[Bundle]
) -> dict[str, Callable[[int, IntArray], FloatArray]]:
    """Recomputing in torch, by the name of the bundle that was made of this run."""
    try:
        import torch

        from train.checkpoint import RunError, load_run
        from train.model import count_parameters
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"--run needs {error.name}, which is not installed: pip install -e '.[train]'"
        ) from None
    try:
        model, recipe, *_ = load_run(run_folder)
    except RunError as error:
        raise SystemExit(f"--run: {error}") from None
    torch.set_num_threads(usable_cores())
    size = count_parameters(model)
    made = [one for one in bundles if one.manifest.shape.parameters == size]
    if len(made) != 1:
        raise SystemExit(
            f"--run {run_folder} has {size} parameters, and not exactly one of the bundles has "
            "as many: name the bundle that was made of it with --bundles"
        )
    window, method = recipe.model.window, made[0].manifest.method

    def last(steps: int, tokens: IntArray) -> FloatArray:
        with torch.inference_mode():
            given = torch.from_numpy(tokens[-window:])[None]
            logits: FloatArray = model(given, steps, method).logits[0, -1].numpy()
        return logits

    return {made[0].manifest.name: last}


def _mean_ms(runs: Sequence[Times], first: int) -> float:
    """The mean over the tokens from this one on, of each the median over the runs."""
    numbers = [number for number in runs[0] if number >= first]
    return statistics.fmean(median([times[number] for times in runs]) for number in numbers)


def _agreeing(decoder: Decoder, sequence: IntArray, start: int) -> int:
    """How many tokens of the cached answer are what recomputing chooses at that place."""
    logits = decoder.forward(sequence[None, :-1])[0]  # (S, V)
    return int((logits[start - 1 :].argmax(axis=1) == sequence[start:]).sum())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
