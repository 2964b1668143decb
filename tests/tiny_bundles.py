"""Tiny bundles with random weights, built by hand, for every test that needs a real one.

Nothing here is trained or exported: the graphs are written node by node, so that the tests of
`serve` need neither torch nor `export`. Weights follow from the seed alone.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
import onnx
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from export.int8_cache import cache_bytes
from serve.bundle import (
    EFFORTS,
    AgainstFp32,
    Bundle,
    Cache,
    Calibration,
    Effort,
    Latency,
    LatencyEntry,
    Machine,
    Manifest,
    Metric,
    Quality,
    Rung,
    Shape,
    TextInput,
    TokenizerSpec,
    Truncation,
    Verified,
    open_staging,
    read_bundle,
    seal_bundle,
    write_latency,
)
from tests.family_graphs import prefix_graph
from tests.tiny_graphs import classify_graph, write_graphs
from tests.tiny_steps import FILES, decoder_steps, text_steps

Weights = dict[str, npt.NDArray[np.float32]]

PAD = "<pad>"
CallKind = Literal["classify", "prefill", "decode"]
STEPS = (1, 2, 4)
CHARACTERS = "\n !'(),-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
CORPUS = (
    "a good film is a good evening and a bad film is a long one",
    "the story was thin, the acting was thick, and nobody laughed",
    "wonderful! I would watch it again, and again, and again.",
    "the market rose while the team lost the final by two points",
)
TRUNCATION = Truncation(head=16, tail=32)
GENERATE_SHAPE = Shape(layers=2, heads=2, head_width=16, width=32, parameters=20_000)
CLASSIFY_SHAPE = Shape(layers=1, heads=2, head_width=8, width=16, parameters=10_000)


def build_generate(
    folder: Path,
    *,
    name: str = "tiny-generate",
    steps: Sequence[int] = STEPS,
    max_tokens: int = 160,
    shape: Shape = GENERATE_SHAPE,
    seed: int = 0,
    latency: bool = True,
    cache: Cache = "kv",
    grid_steps: int | None = None,
) -> Bundle:
    """A character-level decoder; its caches pass two boundaries of 64 positions by default."""
    tokenizer = chars_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    weights = generate_weights(shape, vocab_size, max_tokens, seed)
    graphs = {
        graph_file(count): prefix_graph(shape, vocab_size, count, 1 / (grid_steps or count))
        for count in steps
    }
    graphs |= decoder_steps(shape, vocab_size)
    against = None
    if cache == "kv_int8":
        cache_bytes(
            graphs[FILES.step],
            np.full((shape.layers, 2, shape.heads, shape.head_width), 0.02, np.float32),
        )
        against = AgainstFp32(1.0, 0.0, 1)
    manifest = Manifest(
        name=name,
        task="generate",
        method="euler",
        T=1.0,
        full_steps=max(steps),
        default_steps=max(steps),
        dial="time" if grid_steps else "resolution",
        grid_steps=grid_steps,
        cache=cache,
        input=TextInput(max_tokens=max_tokens),
        labels=None,
        tokenizer=TokenizerSpec("chars", "tokenizer.json", pad_id=0, vocab_size=vocab_size),
        shape=shape,
        weights="weights.bin",
        rungs=tuple(replace(rung, against_fp32=against) for rung in rungs(steps, "loss")),
        step=FILES,
        card={"title": "A tiny decoder", "examples": ["To be, or not", "Once"]},
        provenance={"seed": seed},
    )
    kinds: Sequence[CallKind] = ("prefill", "decode")
    return seal(folder, manifest, tokenizer, weights, graphs, kinds if latency else ())


def build_classify(
    folder: Path,
    *,
    name: str = "tiny-classify",
    labels: Sequence[str] = ("negative", "positive"),
    steps: Sequence[int] = STEPS,
    max_tokens: int = 48,
    truncation: Truncation | None = TRUNCATION,
    calibration: Calibration | None = None,
    shape: Shape = CLASSIFY_SHAPE,
    seed: int = 0,
    latency: bool = True,
) -> Bundle:
    """A classifier of BPE tokens."""
    tokenizer = bpe_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    weights = classify_weights(shape, vocab_size, max_tokens, len(labels), seed)
    graphs = {graph_file(count): classify_graph(shape, len(labels), count) for count in steps}
    graphs |= text_steps(shape, len(labels))
    manifest = Manifest(
        name=name,
        task="classify",
        method="euler",
        T=1.0,
        full_steps=max(steps),
        default_steps=max(steps),
        cache="none",
        input=TextInput(max_tokens=max_tokens, truncation=truncation),
        labels=tuple(labels),
        tokenizer=TokenizerSpec("bpe", "tokenizer.json", pad_id=0, vocab_size=vocab_size),
        shape=shape,
        weights="weights.bin",
        rungs=rungs(steps, "accuracy"),
        step=FILES,
        calibration=calibration,
        card={"title": "A tiny classifier", "examples": list(CORPUS[:2])},
        provenance={"seed": seed},
    )
    return seal(folder, manifest, tokenizer, weights, graphs, ("classify",) if latency else ())


def restage(bundle: Bundle, staging: Path) -> None:
    """Fill a staging folder with the files of a bundle, as an exporter would."""
    for name in bundle.manifest.files:
        shutil.copy(bundle.folder / name, staging / name)


def chars_tokenizer() -> Tokenizer:
    """One token a character; id 0 is padding."""
    vocab = {PAD: 0} | {character: 1 + index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD])
    return tokenizer


def bpe_tokenizer() -> Tokenizer:
    """Byte-level BPE learnt from a few sentences, so that every text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def generate_weights(shape: Shape, vocab_size: int, max_tokens: int, seed: int) -> Weights:
    """Weights of a decoder, of a size at which its answers depend on position and steps."""
    inner = shape.heads * shape.head_width
    return random_weights(
        seed,
        trunk(shape, inner, vocab_size, max_tokens)
        | {
            "head": (shape.width, vocab_size),
        },
    )


def classify_weights(
    shape: Shape, vocab_size: int, max_tokens: int, classes: int, seed: int
) -> Weights:
    """Weights of a classifier."""
    inner = shape.heads * shape.head_width
    return random_weights(
        seed,
        trunk(shape, inner, vocab_size, max_tokens)
        | {
            "head": (shape.width, classes),
        },
    )


def trunk(shape: Shape, inner: int, vocab_size: int, max_tokens: int) -> dict[str, tuple[int, int]]:
    sizes = {"embed": (vocab_size, shape.width), "positions": (max_tokens, shape.width)}
    for layer in range(shape.layers):
        sizes[f"qkv_{layer}"] = (shape.width, 3 * inner)
        sizes[f"mix_{layer}"] = (inner, shape.width)
        sizes[f"up_{layer}"] = (shape.width, 2 * shape.width)
        sizes[f"down_{layer}"] = (2 * shape.width, shape.width)
    return sizes


def random_weights(seed: int, sizes: Mapping[str, tuple[int, int]]) -> Weights:
    generator = np.random.default_rng(seed)
    weights = {}
    for name, size in sizes.items():
        # Small maps: rounding does not grow over the steps, yet every rung answers differently.
        scale = 1.0 if name in ("embed", "positions") else 0.5 / math.sqrt(size[0])
        weights[name] = (scale * generator.standard_normal(size)).astype(np.float32)
    return weights


def graph_file(steps: int) -> str:
    return f"steps-{steps}.onnx"


def rungs(steps: Sequence[int], metric: Metric) -> tuple[Rung, ...]:
    """A rung for each of these counts of Euler steps, of made-up quality."""
    counts = sorted(steps)
    efforts: list[str | None] = [None] * len(counts)
    words = EFFORTS[: min(len(counts), 4) - 1] if len(counts) > 1 else ()
    efforts[: len(words)] = words
    efforts[-1] = "max"
    made = []
    for index, count in enumerate(counts):
        value = 0.8 + 0.02 * index if metric == "accuracy" else 2.0 - 0.1 * index
        made.append(
            Rung(
                steps=count,
                method="euler",
                nfe=count,
                effort=cast("Effort | None", efforts[index]),
                graph=graph_file(count),
                quality=Quality(metric, value, low=value - 0.01, high=value + 0.01, samples=1000),
                verified=Verified(max_abs_error=1e-6, tolerance=1e-4, float32_error=1e-6),
            )
        )
    return tuple(made)


def seal(
    folder: Path,
    manifest: Manifest,
    tokenizer: Tokenizer | None,
    weights: Weights,
    graphs: Mapping[str, onnx.GraphProto],
    kinds: Sequence[CallKind],
) -> Bundle:
    """Write a bundle of graphs by file name, with made-up latencies of these kinds."""
    with open_staging(folder) as staging:
        write_graphs(staging, manifest.weights, weights, graphs)
        if tokenizer is not None:
            tokenizer.save(str(staging / manifest.text_tokenizer.file))
        (staging / "README.md").write_text(f"# {manifest.name}\n", encoding="utf-8")
        seal_bundle(staging, manifest, folder)
    if kinds:
        write_latency(folder, _latency(manifest, kinds))
    return read_bundle(folder)


def _latency(manifest: Manifest, kinds: Sequence[CallKind]) -> Latency:
    """Made-up times, proportional to steps and rows; tests of predictions rely on that alone."""
    longest = manifest.input.max_tokens if isinstance(manifest.input, TextInput) else 1
    entries = [
        LatencyEntry(steps, kind, batch, length, 0.1 * steps * batch, 0.15 * steps * batch)
        for steps in manifest.steps
        for kind in kinds
        for batch in (1, 4)
        for length in sorted({1, longest})
    ]
    return Latency(
        machine=Machine(cpu="made up", cores=2, threads=2, runtime="none"),
        measured_at="2026-01-01T00:00:00+00:00",
        entries=tuple(entries),
    )
