"""Milliseconds a token on one core: our runtime beside eager PyTorch and the machine's limit.

    python -m benchmarks.decode

The model is the reference decoder with random weights. Every way writes the next token behind the
same number of positions, turn by turn in one thread. Ours are the graphs of one step and the
bindings that the server runs. The limit is the time to read the weights that a token needs from
the processor's cache, at the rate at which this core reads so large an array.
"""

import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import cast

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import helper
from torch import Tensor

from benchmarks import reference
from benchmarks.lab import (
    Cell,
    Provenance,
    Result,
    Table,
    Target,
    Times,
    clocked,
    interleave,
    median_ratio,
    parser,
    run,
)
from export.run import Origin
from serve.bundle import Bundle
from serve.runtime import open_model
from serve.runtime.decoder import BoundPass, OrtPasses
from serve.runtime.protocol import CacheArray, FloatArray, IntArray
from serve.runtime.session import open_steps
from train.blocks import Block, BlockVelocity
from train.model import Embedding, OTTransformer, Stepped

# The reference decoder in eager PyTorch with caches, as one would write it by hand. Keys and
# values of every step and layer lie in tensors that are allocated once and written in place; all
# rows are equally long.


class TorchDecoder:
    """So many Euler steps of rows that decode together."""

    def __init__(self, model: Stepped, steps: int, rows: int, positions: int) -> None:
        assert isinstance(model, OTTransformer)
        assert isinstance(model.embed, Embedding) and isinstance(model.velocity, BlockVelocity)
        self.embed, self.head, self.norm = model.embed, model.head, model.velocity.norm
        self.blocks = [cast(Block, block) for block in model.velocity.blocks]
        self.steps, self.h = steps, model.T / steps
        attention = self.blocks[0].attention
        size = (steps, len(self.blocks), rows, attention.heads, positions, attention.head_width)
        self.keys, self.values = torch.randn(size), torch.randn(size)

    @torch.inference_mode()
    def token(self, tokens: Tensor, past: int) -> Tensor:
        """Logits (B, V) after one token a row (B,), behind so many positions."""
        x = self.embed.tokens(tokens[:, None]) * self.embed.scale  # (B, 1, D)
        assert self.embed.positions is not None
        x = x + self.embed.positions(past + 1)[past]
        for step in range(self.steps):
            v = x
            for layer, block in enumerate(self.blocks):
                v = v + self._attend(block, block.norm1(v), step, layer, past)
                if block.feedforward is not None:
                    v = v + block.feedforward(block.norm2(v))
            x = x + self.h * self.norm(v)
        logits: Tensor = self.head(x)[:, 0]
        return logits

    def _attend(self, block: Block, x: Tensor, step: int, layer: int, past: int) -> Tensor:
        attention = block.attention
        parts = attention.qkv(x).view(len(x), 1, 3, attention.heads, attention.head_width)
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # (B, H, 1, D/H) each
        keys, values = self.keys[step, layer], self.values[step, layer]  # (B, H, N, D/H)
        keys[:, :, past : past + 1], values[:, :, past : past + 1] = k, v
        y = F.scaled_dot_product_attention(q, keys[:, :, : past + 1], values[:, :, : past + 1])
        out: Tensor = attention.out(y.transpose(1, 2).flatten(2))  # (B, 1, D)
        return out


NAME = "decode"
CONTEXT_TOKENS, BATCHES = 128, (1, 4, 32)
CACHED_TORCH, WHOLE_TORCH = "torch, with caches", "torch, recomputing the window"
WHOLE_FP32, WHOLE_INT8 = "fp32, recomputing the window", "int8, recomputing the window"
SERIAL_FP32, SERIAL_INT8 = "fp32, row after row", "int8, row after row"
FP32, INT8, LIMIT = "fp32", "int8", "limit: reading the float32 weights"
SMALL = "int8, 8-bit caches"
LEAST_MS = 40.0

Way = tuple[str, int]  # what, and its rows
Calls = dict[Way, Callable[[], object]]


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, parsed.quick))


def measure(quick: bool, provenance: Provenance) -> Result:
    torch.set_num_threads(1)
    origin = reference.decoder(quick)
    steps = reference.QUICK_STEPS[-1] if quick else reference.STEPS[-1]
    context, batches = (24, (1, 2)) if quick else (CONTEXT_TOKENS, BATCHES)
    with tempfile.TemporaryDirectory() as folder:
        made = reference.bundles(origin, Path(folder), (steps,))
        fp32, int8 = made["fp32"], made["int8"]
        small = reference.bundles(origin, Path(folder), (steps,), small_caches=True)["int8"]
        calls = _torch_calls(origin.model, steps, context, batches, origin.recipe.model.window)
        ways = ((fp32, FP32, SERIAL_FP32), (int8, INT8, SERIAL_INT8), (small, SMALL, None))
        for bundle, together, serial in ways:
            calls |= _our_calls(bundle, context, batches, together, serial)
        for bundle, whole in ((fp32, WHOLE_FP32), (int8, WHOLE_INT8)):
            calls[whole, 1] = _recomputing(bundle)
        read_bytes = {FP32: _bytes_read(fp32), INT8: _bytes_read(int8)}
        calls[LIMIT, 1] = _fastest_reading(read_bytes[FP32] // steps)
        difference = _largest_difference(origin, fp32, steps, context)
        timed = interleave(
            {way: partial(_sample, call, 0 if quick else LEAST_MS) for way, call in calls.items()},
            seconds=0 if quick else 60,
            least=1 if quick else 12,
        )
    # The limit was the time to read one step's weights.
    timed[LIMIT, 1] = [Times(*(steps * each for each in one)) for one in timed[LIMIT, 1]]
    return provenance.result(
        NAME,
        "Decoding on one core",
        f"The next token behind {context} positions at {steps} Euler steps, in one thread. "
        "cpu: time of the thread on the processor; the same as wall on a machine at rest.",
        [_table(timed, read_bytes)],
        _targets(timed, batches[-1], difference),
    )


def _torch_calls(
    model: Stepped, steps: int, context: int, batches: tuple[int, ...], window: int
) -> Calls:
    calls: Calls = {}
    for rows in batches:
        cached = TorchDecoder(model, steps, rows, context)
        tokens = torch.ones(rows, dtype=torch.int64)  # (B,)
        calls[CACHED_TORCH, rows] = partial(cached.token, tokens, context - 1)
    whole = torch.ones(1, window, dtype=torch.int64)  # (1, N)
    calls[WHOLE_TORCH, 1] = torch.inference_mode()(partial(model, whole, steps=steps))
    return calls


def _our_calls(
    bundle: Bundle, context: int, batches: tuple[int, ...], together: str, serial: str | None
) -> Calls:
    """Ours of one precision: a batch, and row after row."""
    manifest, sessions = bundle.manifest, open_steps(bundle, threads=1)
    shape, passes = manifest.shape, OrtPasses(sessions, manifest)
    most, steps = batches[-1], manifest.full_steps
    draw = np.random.default_rng(0)
    size = (most, shape.heads, context, shape.head_width)
    floats = [
        draw.standard_normal(size, dtype=np.float32) for _ in range(steps * len(passes.names))
    ]
    caches: list[CacheArray] = [*floats]
    if manifest.cache == "kv_int8":
        caches = [(20 * each).astype(np.int8) for each in floats]

    def bound_pass(first: int, rows: int) -> BoundPass:
        return passes.open(
            [array[first : first + rows] for array in caches],
            np.ones((rows, 1), dtype=np.int64),
            np.full(rows, context - 1, dtype=np.int32),
            np.zeros(1, dtype=np.int64),
        )

    alone = [bound_pass(row, 1) for row in range(most)]
    calls: Calls = {(together, rows): bound_pass(0, rows).run for rows in batches}
    if serial is not None:
        calls[serial, most] = lambda: [one.run() for one in alone]
    return calls


def _recomputing(bundle: Bundle) -> Callable[[], object]:
    """The whole window of a rung without caches."""
    manifest = bundle.manifest
    window = np.ones((1, manifest.text_input.max_tokens), dtype=np.int64)  # (1, N)
    rung = open_model(bundle, threads=1).unrolled(manifest.full_steps)
    return partial(rung.forward, window)


def _sample(call: Callable[[], object], least_ms: float) -> Times:
    call()  # what ran before has emptied the caches of the processor
    return clocked(call, least_ms)


def _bytes_read(bundle: Bundle) -> int:
    """Weights that one token of one row multiplies with: those of all steps, and of the head."""
    files = bundle.manifest.step
    assert files is not None
    step, head = (_weight_bytes(bundle.folder / name) for name in (files.step, files.head))
    return bundle.manifest.full_steps * step + head


def _weight_bytes(graph: Path) -> int:
    tensors = onnx.load(graph, load_external_data=False).graph.initializer
    return sum(
        math.prod(one.dims) * helper.tensor_dtype_to_np_dtype(one.data_type).itemsize
        for one in tensors
    )


def _fastest_reading(size_bytes: int) -> Callable[[], object]:
    """Of several ways to read an array of that size once, the one that takes the least time."""
    columns = 256
    matrix = torch.ones(size_bytes // 4 // columns, columns)
    turned, right, left = matrix.t(), torch.ones(columns), torch.ones(len(matrix))
    ways: list[Callable[[], object]] = [
        matrix.sum,
        partial(torch.mv, matrix, right),
        partial(torch.mv, turned, left),
    ]
    return min(ways, key=lambda way: min(_sample(way, 0).cpu_ms for _ in range(20)))


def _largest_difference(origin: Origin, bundle: Bundle, steps: int, context: int) -> float:
    """Of the logits that ours and torch with caches give from those of torch without any."""
    tokens = origin.dataset.batch(0, 1, seed=0).inputs[0][0, :context]  # (N,)
    with torch.inference_mode():
        expected = origin.model(tokens[None], steps=steps).logits[0, -1].numpy()  # (V,)
    cached = TorchDecoder(origin.model, steps, 1, context)
    for past in range(context):
        in_torch = cached.token(tokens[past : past + 1], past)[0].numpy()  # (V,)
    ours = _served(bundle, tokens.numpy())
    found = max(float(np.abs(each - expected).max()) for each in (in_torch, ours))
    return found / float(np.abs(expected).max())


def _served(bundle: Bundle, tokens: IntArray) -> FloatArray:
    batch = open_model(bundle, threads=1).decoder(bundle.manifest.full_steps).open_batch()
    batch.add(tokens[:-1])
    logits: FloatArray = batch.step(tokens[-1:])[0]  # (V,)
    return logits


def _table(timed: Mapping[Way, list[Times]], read_bytes: Mapping[str, int]) -> Table:
    limit_ms = median([one.cpu_ms for one in timed[LIMIT, 1]])
    rows: list[Sequence[Cell]] = []
    for (what, count), samples in timed.items():
        cpu_ms = median([one.cpu_ms for one in samples])
        wall_ms = median([one.wall_ms for one in samples])
        alone = read_bytes.get(what) if count == 1 else None
        of_limit = cpu_ms / limit_ms * read_bytes[FP32] / alone if alone else None
        rows.append([what, count, cpu_ms, wall_ms, cpu_ms / count, of_limit, len(samples)])
    rate = read_bytes[FP32] / limit_ms / 1e6
    caption = (
        f"A token of one row multiplies with {read_bytes[FP32] / 1e6:.0f} MB of weights in float32 "
        f"and {read_bytes[INT8] / 1e6:.0f} MB in 8 bits; this core reads {rate:.0f} GB/s from "
        f"an array as large as one step's. This processor has {_dot_products()}. Medians."
    )
    columns = ("way", "rows", "cpu ms", "wall ms", "cpu ms a row", "of its limit", "rounds")
    return Table(caption, columns, rows)


def _targets(timed: Mapping[Way, list[Times]], most: int, difference: float) -> list[Target]:
    cpu_ms = {way: [one.cpu_ms for one in samples] for way, samples in timed.items()}

    def ratio(way: str, other: str, rows: int = 1) -> float:
        return median_ratio(cpu_ms[way, rows], cpu_ms[other, rows])

    serial = ratio(SERIAL_FP32, FP32, most)
    return [
        Target("fp32 at batch 1, of the limit", ratio(FP32, LIMIT), "<=", 2.0, "times"),
        Target("torch with caches, of fp32", ratio(CACHED_TORCH, FP32), ">=", 2.5, "times"),
        Target("torch recomputing, of fp32", ratio(WHOLE_TORCH, FP32), ">=", 25, "times"),
        Target("ours recomputing, of fp32", ratio(WHOLE_FP32, FP32), ">=", 25, "times"),
        Target("fp32 of int8 at batch 1", ratio(FP32, INT8), ">=", 2.3, "times"),
        Target("fp32 of int8 with 8-bit caches at batch 1", ratio(FP32, SMALL), ">=", 2.3, "times"),
        Target("torch with caches, of int8", ratio(CACHED_TORCH, INT8), ">=", 2.5, "times"),
        Target(f"{most} rows in turn, of a batch", serial, ">=", 3, "times"),
        Target("largest difference of a logit from torch", difference, "<=", 1e-4),
    ]


def _dot_products() -> str:
    """Whether the processor multiplies bytes fast: what the gain of 8 bits depends on most."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return "unknown instructions for dot products of bytes"
    words = set(info.read_text(encoding="utf-8", errors="replace").split())
    found = sorted(words & {"avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm"})
    return f"{' and '.join(found) or 'no instructions'} for dot products of bytes"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
