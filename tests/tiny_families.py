"""Tiny bundles of the other families: images, points, decoders without caches, translation.

Like tests.tiny_bundles, nothing here is trained; weights follow from the seed alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from serve.bundle import (
    Bundle,
    Calibration,
    ImageInput,
    InputSpec,
    Manifest,
    PointsInput,
    Shape,
    TextInput,
    TokenizerSpec,
    Truncation,
)
from tests import family_graphs
from tests.tiny_bundles import (
    CHARACTERS,
    CLASSIFY_SHAPE,
    GENERATE_SHAPE,
    PAD,
    STEPS,
    Weights,
    bpe_tokenizer,
    chars_tokenizer,
    classify_weights,
    generate_weights,
    graph_file,
    random_weights,
    rungs,
    seal,
    trunk,
)
from tests.tiny_graphs import classify_graph
from tests.tiny_steps import FILES, image_steps, points_steps, text_steps

BEGIN, END = "<s>", "</s>"
PUZZLE = ".123456"
LABELS = ("zero", "one", "two", "three")
TRANSLATE_SHAPE = Shape(layers=1, heads=2, head_width=8, width=16, parameters=10_000)
_WIDTH = 16


def build_image(
    folder: Path, *, channels: int = 1, height: int = 6, width: int = 5, name: str = "tiny-image"
) -> Bundle:
    """A classifier of small images."""
    size = (channels, height, width)
    spec = ImageInput(
        channels=channels,
        height=height,
        width=width,
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
    )
    graphs = {
        graph_file(steps): family_graphs.image_graph(size, len(LABELS), steps) for steps in STEPS
    } | image_steps(size, _WIDTH, len(LABELS))
    return _seal_classifier(folder, name, spec, channels * height * width, graphs)


def build_points(folder: Path, *, max_points: int = 32, dimensions: int = 3) -> Bundle:
    """A classifier of clouds of points."""
    spec = PointsInput(max_points=max_points, dimensions=dimensions)
    graphs = {
        graph_file(steps): family_graphs.points_graph(dimensions, len(LABELS), steps)
        for steps in STEPS
    } | points_steps(dimensions, _WIDTH, len(LABELS))
    return _seal_classifier(folder, "tiny-points", spec, dimensions, graphs)


def build_tag(
    folder: Path,
    *,
    name: str = "tiny-tag",
    words: bool = False,
    steps: Sequence[int] = (1, 2, 4, 8),
    grid_steps: int = 4,
    max_tokens: int = 24,
    calibration: Calibration | None = None,
    seed: int = 3,
) -> Bundle:
    """A model that labels each position, with the dial of time: 8 steps go beyond its grid of 4.

    Of characters, whose labels are the digits of a puzzle; or of words, with kinds of names.
    """
    tokenizer = bpe_tokenizer() if words else puzzle_tokenizer()
    labels = ("other", "person", "place") if words else tuple(PUZZLE[1:])
    vocab_size, shape, T = tokenizer.get_vocab_size(), CLASSIFY_SHAPE, float(grid_steps)
    graphs = {
        graph_file(count): classify_graph(shape, len(labels), count, T / grid_steps, tags=True)
        for count in steps
    } | text_steps(shape, len(labels), tags=True)
    manifest = Manifest(
        name=name,
        task="tag",
        method="euler",
        T=T,
        full_steps=max(steps),
        default_steps=max(steps),
        dial="time",
        grid_steps=grid_steps,
        cache="none",
        input=TextInput(max_tokens=max_tokens, truncation=Truncation(max_tokens - 4, 4)),
        labels=labels,
        tokenizer=TokenizerSpec(
            "bpe" if words else "chars", "tokenizer.json", pad_id=0, vocab_size=vocab_size
        ),
        shape=shape,
        weights="weights.bin",
        rungs=tuple(
            replace(rung, quality=replace(rung.quality, exact=0.1 * index))
            for index, rung in enumerate(rungs(steps, "accuracy"))
        ),
        step=FILES,
        calibration=calibration,
        card={"title": "A tiny tagger", "examples": ["a good film"] if words else ["12.4..3."]},
    )
    weights = classify_weights(shape, vocab_size, max_tokens, len(labels), seed)
    return seal(folder, manifest, tokenizer, weights, graphs, ("classify",))


def puzzle_tokenizer() -> Tokenizer:
    """One token a character: a gap or a digit; id 0 is padding."""
    vocab = {PAD: 0} | {character: 1 + index for index, character in enumerate(PUZZLE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD])
    return tokenizer


def build_prefix(folder: Path, *, max_tokens: int = 40, seed: int = 0) -> Bundle:
    """A decoder without caches whose weights differ by depth: one rung."""
    tokenizer = chars_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    graph = family_graphs.prefix_graph(GENERATE_SHAPE, vocab_size, 1)
    manifest = Manifest(
        name="tiny-prefix",
        task="generate",
        method="euler",
        T=1.0,
        full_steps=1,
        default_steps=1,
        depth="fixed",
        cache="none",
        input=TextInput(max_tokens=max_tokens),
        labels=None,
        tokenizer=TokenizerSpec("chars", "tokenizer.json", pad_id=0, vocab_size=vocab_size),
        shape=GENERATE_SHAPE,
        weights="weights.bin",
        rungs=rungs((1,), "loss"),
    )
    weights = generate_weights(GENERATE_SHAPE, vocab_size, max_tokens, seed)
    return seal(folder, manifest, tokenizer, weights, {graph_file(1): graph}, ())


def build_translate(
    folder: Path,
    *,
    steps: Sequence[int] = (1, 2),
    max_tokens: int = 40,
    target_max_tokens: int = 24,
    seed: int = 5,
) -> Bundle:
    """A translator of characters whose answers mean nothing, but end."""
    tokenizer = _translating_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    shape = TRANSLATE_SHAPE
    graphs = {}
    made = []
    for rung in rungs(steps, "loss"):
        encoder = f"encoder-{rung.steps}.onnx"
        made.append(replace(rung, nfe=2 * rung.steps, encoder=encoder))
        graphs[encoder] = family_graphs.encoder_graph(shape, rung.steps)
        graphs[rung.graph] = family_graphs.translate_graph(shape, vocab_size, 2, rung.steps)
    manifest = Manifest(
        name="tiny-translate",
        task="translate",
        method="euler",
        T=1.0,
        full_steps=max(steps),
        default_steps=max(steps),
        cache="none",
        input=TextInput(max_tokens=max_tokens),
        target_max_tokens=target_max_tokens,
        labels=None,
        tokenizer=TokenizerSpec("chars", "tokenizer.json", 0, vocab_size, bos_id=1, eos_id=2),
        shape=shape,
        weights="weights.bin",
        rungs=tuple(made),
        card={"title": "A tiny translator", "examples": ["Ein Hund", "Zwei"]},
    )
    inner = shape.heads * shape.head_width
    sizes = trunk(shape, inner, vocab_size, max(max_tokens, target_max_tokens))
    sizes |= {"cross_q": (shape.width, inner), "cross_kv": (shape.width, 2 * inner)}
    sizes |= {"cross_mix": (inner, shape.width), "head": (shape.width, vocab_size)}
    weights = random_weights(seed, sizes)
    return seal(folder, manifest, tokenizer, weights, graphs, ("prefill", "decode"))


def _translating_tokenizer() -> Tokenizer:
    """One token a character, behind padding, the beginning and the end."""
    special = [PAD, BEGIN, END]
    vocab = {token: index for index, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    return tokenizer


def _seal_classifier(
    folder: Path, name: str, spec: InputSpec, inputs: int, graphs: dict[str, onnx.GraphProto]
) -> Bundle:
    manifest = Manifest(
        name=name,
        task="classify",
        method="euler",
        T=1.0,
        full_steps=max(STEPS),
        default_steps=max(STEPS),
        cache="none",
        input=spec,
        labels=LABELS,
        tokenizer=None,
        shape=Shape(layers=1, heads=1, head_width=_WIDTH, width=_WIDTH, parameters=1000),
        weights="weights.bin",
        rungs=rungs(STEPS, "accuracy"),
        step=FILES,
    )
    weights: Weights = random_weights(
        0,
        {
            "embed": (inputs, _WIDTH),
            "up": (_WIDTH, 2 * _WIDTH),
            "down": (2 * _WIDTH, _WIDTH),
            "head": (_WIDTH, len(LABELS)),
        },
    )
    return seal(folder, manifest, None, weights, graphs, ("classify",))
