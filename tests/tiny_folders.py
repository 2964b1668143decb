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
