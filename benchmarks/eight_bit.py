"""Decoding with 8-bit weights beside float32: the time of a token, and how many stay the same.

The model is the reference decoder with random weights, on which time does not depend; what 8 bits
cost a trained model is measured when it is exported. Both precisions take the same tokens through
the graphs of one step and the bindings of the server, in one thread, turn by turn. Time is that of
the processor, so that other load on the machine counts less.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch

from benchmarks.options import parser, run
from benchmarks.result import Cell, Provenance, Result, Table, Target
from benchmarks.rounds import interleave, median, median_ratio
from export.parts import trace
from export.quantise import quantise
from export.step_graphs import StepGraphs, stitch_step
from serve.runtime.interface import cache_names
from serve.runtime.ort_crossing import OrtCrossing
from serve.runtime.ort_steps import StepSessions
from train.batch import Sizes
from train.build import build_model
from train.config import ModelConfig

NAME = "eight_bit"
VOCABULARY, WIDTH, HEADS, LAYERS, STEPS = 65, 320, 5, 5, 10
CONTEXT_TOKENS = 128
ROWS, COMPARED_ROWS = (1, 4, 32), 4
WANTED_RATIO = 2.3
FP32, INT8 = "fp32", "int8"


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, parsed.quick))


def measure(quick: bool, provenance: Provenance) -> Result:
    layers, steps, batches = (1, 2, ROWS[:1]) if quick else (LAYERS, STEPS, ROWS)
    opened = _reference(layers)
    rows: list[Sequence[Cell]] = []
    for batch in batches:
        calls = {
            precision: partial(_token_ms, _crossing(sessions, layers, steps, batch, CONTEXT_TOKENS))
            for precision, sessions in opened.items()
        }
        timed = interleave(calls, seconds=0 if quick else 20, least=1 if quick else 20)
        fp32, int8 = timed[FP32], timed[INT8]
        ratio = median_ratio(fp32, int8)
        rows.append([batch, median(fp32), median(int8), ratio, len(fp32)])
    what = f"{steps} steps, batch 1: time of a token in float32 over 8-bit"
    alone = next(row for row in rows if row[0] == 1)
    same = _agreement(opened, layers, steps)
    columns = ("rows", "fp32, ms a token", "8-bit, ms a token", "fp32 over 8-bit", "rounds")
    caption = (
        f"{layers} layers, {HEADS} heads, width {WIDTH}, {steps} Euler steps, "
        f"{CONTEXT_TOKENS} positions of context. This processor has {_dot_products()}. "
        f"Of these random weights' {COMPARED_ROWS * CONTEXT_TOKENS} likeliest tokens, {same:.1%} "
        "are the same in 8 bits."
    )
    return provenance.result(
        NAME,
        "Decoding with 8-bit weights",
        "Processor time of one token of all rows, one thread; the ratio is the median of those "
        "within each round.",
        [Table(caption, columns, rows)],
        [Target(what, float(alone[3] or 0), ">=", WANTED_RATIO, "times")],
    )


def _reference(layers: int) -> dict[str, StepSessions]:
    """The graphs of one step of the model in each precision."""
    torch.manual_seed(0)
    config = ModelConfig(
        "decoder",
        layers=layers,
        heads=HEADS,
        width=WIDTH,
        hidden=4 * WIDTH,
        window=2 * CONTEXT_TOKENS,
        norm="none",
        final_norm="none",
        bias=False,
    )
    model = build_model(config, Sizes(vocabulary=VOCABULARY)).eval()
    small, large = (torch.zeros(size, dtype=torch.int64) for size in ((2, 3), (3, 5)))
    traced = trace(model, [small], [large])
    assert traced.step is not None
    graphs = stitch_step(traced.graph, traced.step, "euler")
    opened = {FP32: _opened(graphs, config.T)}
    for graph in graphs:
        quantise(graph, plain=False)
    opened[INT8] = _opened(graphs, config.T)
    return opened


def _opened(graphs: StepGraphs, T: float) -> StepSessions:
    embed, step, head = map(_session, graphs)
    return StepSessions(
        embed,
        step,
        head,
        timed=False,
        sized=True,
        history=False,
        stages=1,
        T=T,
        contexts=(),
        head_contexts=(),
    )


def _session(graph: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(graph.SerializeToString(), options)


def _crossing(
    sessions: StepSessions, layers: int, steps: int, rows: int, positions: int, length: int = 1
) -> OrtCrossing:
    """The last `length` of so many positions, with scores for each."""
    size = (rows, HEADS, positions, WIDTH // HEADS)
    draw = np.random.default_rng(0)
    names = cache_names(sessions.stages, layers)
    return OrtCrossing(
        sessions,
        names,
        [draw.standard_normal(size, dtype=np.float32) for _ in range(steps * len(names))],
        draw.integers(0, VOCABULARY, (rows, length)),
        np.full(rows, positions - length, dtype=np.int32),
        np.arange(length),
        WIDTH,
        VOCABULARY,
    )


def _token_ms(crossing: OrtCrossing) -> float:
    begun_s = time.thread_time()
    crossing.run()
    return (time.thread_time() - begun_s) * 1000


def _agreement(opened: Mapping[str, StepSessions], layers: int, steps: int) -> float:
    """Share of positions with the same likeliest token."""
    chosen = [
        _crossing(opened[precision], layers, steps, COMPARED_ROWS, CONTEXT_TOKENS, CONTEXT_TOKENS)
        .run()
        .argmax(axis=-1)
        for precision in (FP32, INT8)
    ]
    return float((chosen[0] == chosen[1]).mean())


def _dot_products() -> str:
    """Whether the processor multiplies bytes fast: what the gain depends on most."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return "unknown instructions for dot products of bytes"
    words = set(info.read_text(encoding="utf-8", errors="replace").split())
    found = sorted(words & {"avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm"})
    return f"{' and '.join(found) or 'no instructions'} for dot products of bytes"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
