"""Texts a second of a converted encoder at each rung, beside its whole original.

    python -m benchmarks.converted --bundles zoo/topics zoo/sentiment --original FOLDER

The original runs in two ways: all its layers as one graph in onnxruntime, and in torch as
sentence-transformers encodes (batches of 32 sorted by length, padded to their longest, the mean of
the states). Every way reads the same texts, cut to the same window, and tokenising is part of its
time. What is measured is speed alone: `stepdial evaluate` measures the answers.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime as ort
import torch
from transformers import AutoModel

from benchmarks.lab import (
    NOTHING_TO_MEASURE,
    Cell,
    Provenance,
    Result,
    Table,
    interleave,
    median_ratio,
    parser,
    run,
)
from benchmarks.texts import PARAGRAPHS
from export.graph import Ladder, write_graphs
from export.trace import trace
from serve.bundle import Bundle, read_bundle
from serve.inputs.text import TextCodec
from serve.runtime import open_model
from serve.runtime.protocol import FloatArray, IntArray
from serve.runtime.session import usable_cores
from train.pretrained import Original, converted, read_original

NAME = "converted"
BATCH, TEXTS = 32, 256
GRAPH, TORCH = "the original in onnxruntime", "the original in torch"
Call = Callable[[list[str]], int]  # the rows that it answered


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument(
        "--original",
        type=Path,
        metavar="FOLDER",
        help="the encoder that the bundles were converted from, as the Hub has it",
    )
    parsed = made.parse_args(arguments)
    if parsed.original is None or not parsed.bundles:
        print("name the bundles with --bundles and what they were with --original", file=sys.stderr)
        return NOTHING_TO_MEASURE
    bundles = [read_bundle(folder) for folder in parsed.bundles]
    measured = partial(measure, bundles, parsed.original, parsed.quick)
    return run(NAME, arguments, parsed, measured)


def measure(bundles: Sequence[Bundle], source: Path, quick: bool, provenance: Provenance) -> Result:
    threads = usable_cores()
    torch.set_num_threads(threads)
    original = read_original(source)
    texts = some_texts(BATCH if quick else TEXTS)
    manifest = bundles[0].manifest
    window, classes = manifest.text_input.max_tokens, len(manifest.labels or ())
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[tuple[str, int | str], Call] = {
            (GRAPH, ""): _as_a_graph(original, Path(folder), window, classes, threads),
            (TORCH, ""): _in_torch(original, source, window),
        }
        for bundle in bundles:
            model, codec = open_model(bundle, threads), TextCodec(bundle)
            pad_id = bundle.manifest.text_tokenizer.pad_id
            for steps in bundle.manifest.steps:
                rung = model.classifier(steps).run
                ways[bundle.manifest.name, steps] = partial(_classify, codec, pad_id, rung)
        timed = interleave(
            {way: partial(_seconds, call, texts) for way, call in ways.items()},
            seconds=0 if quick else 60,
            least=1 if quick else 7,
        )
    rows: list[list[Cell]] = [
        [
            name,
            steps,
            len(texts) / median(taken_s),
            median_ratio(timed[GRAPH, ""], taken_s),
            median_ratio(timed[TORCH, ""], taken_s),
            len(taken_s),
        ]
        for (name, steps), taken_s in timed.items()
    ]
    columns = ("way", "steps", "rows a second", "of its graph", "of torch", "rounds")
    caption = (
        "Medians. Of its graph and of torch: how many times as fast as the original in that way, "
        "the median of the rounds."
    )
    sizes = original.encoder
    return provenance.result(
        NAME,
        "Converted encoders beside their original",
        f"{len(texts)} texts, at most {window} tokens each, {threads} threads. The original is "
        f"{original.name}, {sizes.layers} layers of width {sizes.width}.",
        [Table(caption, columns, rows)],
        targets=(),
    )


def some_texts(count: int) -> list[str]:
    """Pieces of the paragraphs, of 4 to 60 words."""
    words = " ".join(PARAGRAPHS).split(" ")
    starts = np.random.default_rng(0).integers(0, len(words) - 60, (count, 2))
    return [" ".join(words[start : start + 4 + other % 57]) for start, other in starts.tolist()]


def _seconds(call: Call, texts: list[str]) -> float:
    begun_s = time.perf_counter()
    assert call(texts) == len(texts)
    return time.perf_counter() - begun_s


def _batches(rows: list[list[int]], pad_id: int) -> Iterator[IntArray]:
    """Rows sorted by length, padded to the longest of each batch."""
    ordered = sorted(rows, key=len, reverse=True)
    for first in range(0, len(ordered), BATCH):
        some = ordered[first : first + BATCH]
        tokens = np.full((len(some), len(some[0])), pad_id, dtype=np.int64)  # (B, N)
        for place, row in enumerate(some):
            tokens[place, : len(row)] = row
        yield tokens


def _classify(
    codec: TextCodec,
    pad_id: int,
    classify: Callable[[IntArray], FloatArray],
    texts: list[str],
) -> int:
    rows = [codec.encode_input(text, truncate=True).tokens for text in texts]
    return sum(len(classify(batch)) for batch in _batches(rows, pad_id))


def _cut(original: Original, window: int, texts: list[str]) -> list[list[int]]:
    """The tokens of texts; the last special token of a long one stays."""
    found = [one.ids for one in original.tokenizer.encode_batch(texts)]
    return [ids if len(ids) <= window else [*ids[: window - 1], ids[-1]] for ids in found]


def _as_a_graph(original: Original, folder: Path, window: int, classes: int, threads: int) -> Call:
    model = converted(original, classes, window).eval()
    small, large = (torch.full(shape, 1 + original.encoder.pad_id) for shape in ((2, 3), (3, 5)))
    traced = trace(model, (small,), (large,), labelled=True)
    write_graphs(folder, traced, Ladder((1,), "euler"), "fp32")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    graph = str(folder / "steps-1.onnx")
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def call(texts: list[str]) -> int:
        rows = _cut(original, window, texts)
        batches = _batches(rows, original.encoder.pad_id)
        return sum(len(session.run(["logits"], {"tokens": batch})[0]) for batch in batches)

    return call


def _in_torch(original: Original, folder: Path, window: int) -> Call:
    model = AutoModel.from_pretrained(folder).eval()
    pad_id = original.encoder.pad_id

    @torch.inference_mode()
    def call(texts: list[str]) -> int:
        answered = 0
        for batch in _batches(_cut(original, window, texts), pad_id):
            tokens = torch.from_numpy(batch)  # (B, N)
            present = tokens.ne(pad_id).long()
            states = model(input_ids=tokens, attention_mask=present).last_hidden_state
            weights = present[..., None].to(states.dtype)
            pooled = (states * weights).sum(1) / weights.sum(1)  # (B, D)
            answered += len(pooled)
        return answered

    return call


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
