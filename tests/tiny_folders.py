"""Folders with the tiny bundles, made once for a whole test run.

Knows where they are; what is in them is tests.tiny_bundles' business.
"""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from serve.bundle import Bundle
from tests.tiny_bundles import build_classify, build_generate
from tests.tiny_families import (
    build_image,
    build_points,
    build_prefix,
    build_tag,
    build_translate,
)


@cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="stepdial-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@cache
def classify_bundle() -> Bundle:
    """A classifier of BPE tokens: steps 1, 2, 4; 48 tokens; two labels."""
    return build_classify(_root() / "tiny-classify")


@cache
def generate_bundle() -> Bundle:
    """A generator of characters: steps 1, 2, 4; a window of 160 tokens."""
    return build_generate(_root() / "tiny-generate")


@cache
def image_bundle() -> Bundle:
    """A classifier of grey images of 6 x 5: steps 1, 2, 4; four labels."""
    return build_image(_root() / "tiny-image")


@cache
def points_bundle() -> Bundle:
    """A classifier of up to 32 points in space: steps 1, 2, 4; four labels."""
    return build_points(_root() / "tiny-points")


@cache
def prefix_bundle() -> Bundle:
    """A generator of characters without caches, one rung; a window of 40 tokens."""
    return build_prefix(_root() / "tiny-prefix")


@cache
def tag_bundle() -> Bundle:
    """A tagger of puzzles with the dial of time: steps 1, 2, 4, 8 of a grid of 4; 24 tokens."""
    return build_tag(_root() / "tiny-tag")


@cache
def words_tag_bundle() -> Bundle:
    """The same of BPE tokens, with three kinds of names."""
    return build_tag(_root() / "tiny-tag-words", name="tiny-tag-words", words=True)


@cache
def translate_bundle() -> Bundle:
    """A translator of characters: steps 1, 2; 40 tokens in, 24 out."""
    return build_translate(_root() / "tiny-translate")
