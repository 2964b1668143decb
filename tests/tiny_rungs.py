"""A tiny decoder of many rungs, and what its rows get when they are alone."""

from pathlib import Path

import numpy as np

from serve.bundle import Cache
from serve.runtime import OpenedModel, open_model
from serve.runtime.protocol import FloatArray, IntArray
from tests.tiny_bundles import build_generate

STEPS = (1, 2, 3, 4, 6, 8)
MAX_TOKENS = 160
KINDS: tuple[tuple[Cache, int, int | None], ...] = (
    # and threads, and the grid of a dial of time: two of the rungs go beyond it
    ("kv", 1, None),
    ("kv_int8", 1, None),
    ("kv", 3, None),
    ("kv", 1, 4),
)


def open_rungs(folder: Path, kind: tuple[Cache, int, int | None]) -> OpenedModel:
    cache, threads, grid_steps = kind
    bundle = build_generate(
        folder / "g", steps=STEPS, max_tokens=MAX_TOKENS, cache=cache, grid_steps=grid_steps
    )
    return open_model(bundle, threads=threads)


def prompt(model: OpenedModel, length: int, seed: int = 0) -> IntArray:
    vocab_size = model.bundle.manifest.text_tokenizer.vocab_size
    return np.random.default_rng(seed).integers(1, vocab_size, length)


def best(logits: list[FloatArray]) -> IntArray:
    return np.array([row.argmax() for row in logits])


def alone(model: OpenedModel, steps: int, tokens: IntArray, count: int) -> list[FloatArray]:
    """The logits of the prompt and of so many tokens behind it, greedy."""
    batch = model.decoder(steps).open_batch()
    found = [batch.add(tokens)]
    for _ in range(count):
        found.append(batch.step(best(found[-1:]))[0])
    return found
