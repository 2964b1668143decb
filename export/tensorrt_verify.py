"""Engines against the same graphs on the CPU, on random rows of every size that matters.

Knows what a classifier, a decoder and a translator take; not how the engines were made.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from serve.bundle import (
    Bundle,
    BundleError,
    ImageInput,
    Manifest,
    PointsInput,
    steps_in_words,
)
from serve.runtime import OpenedModel, open_model
from serve.runtime.protocol import FloatArray, IntArray, RowArray
from serve.runtime.trt_manifest import Precision
from serve.runtime.trt_model import TrtModel

# The largest error of a logit over the largest logit: 8 and 11 bits of mantissa are 4e-3 and 5e-4
# a product, which grow over the products of a rung.
TOLERANCES: dict[Precision, float] = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}
_SEED = 0


def verify_engines(bundle: Bundle, folder: Path, say: Callable[[str], None]) -> None:
    """BundleError, naming the rung, when engines and CPU are further apart than they may be."""
    engines, reference = TrtModel(bundle, folder), open_model(bundle)
    tolerance = TOLERANCES[engines.precision]
    try:
        for steps in bundle.manifest.steps:
            count, error = steps_in_words(steps), largest_error(engines, reference, steps)
            if not error <= tolerance:
                raise BundleError(
                    f"the engine of {count} is off by {error:.2g} of the largest logit, more "
                    f"than {tolerance:g}: build it with more bits, for example fp32"
                )
            say(f"{count}: off by {error:.1e} of the largest logit, at most {tolerance:g}")
    finally:
        engines.close()


def largest_error(found: OpenedModel, reference: OpenedModel, steps: int) -> float:
    """Over rows of several sizes: the largest difference, over the largest logit."""
    manifest = reference.bundle.manifest
    random = np.random.default_rng(_SEED)
    worst = 0.0
    for rows in sample_rows(manifest, random):
        wanted = _logits(reference, steps, rows)
        scale = max(float(np.abs(wanted).max()), 1e-6)
        # The second time captures a graph, which the third one runs.
        for _ in range(3):
            error = float(np.abs(_logits(found, steps, rows) - wanted).max())
            worst = max(worst, error / scale if np.isfinite(error) else float("inf"))
    return worst


def sample_rows(manifest: Manifest, random: np.random.Generator) -> Iterator[RowArray]:
    """One row and some rows, of the least, a middling and the greatest length."""
    for rows in (1, 3):
        match manifest.input:
            case ImageInput(channels=channels, height=height, width=width):
                yield random.standard_normal((rows, channels, height, width)).astype(np.float32)
            case PointsInput(max_points=most, dimensions=dimensions):
                for count in _lengths(most):
                    yield random.standard_normal((rows, count, dimensions)).astype(np.float32)
            case text:
                for length in _lengths(text.max_tokens):
                    yield sample_tokens(manifest, random, (rows, length))


def sample_tokens(
    manifest: Manifest, random: np.random.Generator, shape: tuple[int, int]
) -> IntArray:
    """Tokens that texts turn into."""
    tokenizer = manifest.text_tokenizer
    usable = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.special_ids)
    tokens: IntArray = random.choice(usable, shape).astype(np.int64)
    return tokens


def _lengths(most: int) -> list[int]:
    return sorted({1, max(1, most // 2), most})


def _logits(model: OpenedModel, steps: int, rows: RowArray) -> FloatArray:
    manifest = model.bundle.manifest
    if manifest.task != "translate":
        return model.unrolled(steps).forward(rows)
    assert manifest.target_max_tokens is not None
    source = rows.astype(np.int64)
    # What the answers say means nothing, so they are the sources themselves.
    answers = source[:, : manifest.target_max_tokens]
    return model.translator(steps).forward(source, answers)
