"""The model as every other server runs it: one graph of a bundle, its tokenizer, texts to labels.

Runs in the environment of each server, so it needs only numpy, onnxruntime and tokenizers, and
nothing of ours. What it is told stands in the environment. Every call leaves a line, so that
work done for nobody can be counted.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

BUNDLE, STEPS, CALLS, PORT = "PEER_BUNDLE", "PEER_STEPS", "PEER_CALLS", "PEER_PORT"
MAX_BATCH = 16


def port() -> int:
    """Where the server is to listen."""
    return int(os.environ[PORT])


class Labeller:
    """Labels texts. A call is one call of the runtime, in the thread that makes it."""

    def __init__(self) -> None:
        folder = Path(os.environ[BUNDLE])
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text("utf-8"))
        steps = int(os.environ[STEPS])
        (graph,) = (one["graph"] for one in manifest["rungs"] if one["steps"] == steps)
        self._labels: list[str] = manifest["labels"]
        self._most_tokens: int = manifest["input"]["max_tokens"]
        self._pad: int = manifest["tokenizer"]["pad_id"]
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._tokenizer = Tokenizer.from_file(str(folder / manifest["tokenizer"]["file"]))
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = ort.InferenceSession(
            folder / graph, options, providers=["CPUExecutionProvider"]
        )
        self._calls = os.open(os.environ[CALLS], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def label(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """A label and its score for each text."""
        encoded = [one.ids[: self._most_tokens] for one in self._tokenizer.encode_batch(texts)]
        longest = max(map(len, encoded))
        tokens = np.full((len(texts), longest), self._pad, dtype=np.int64)  # (B, N)
        for row, ids in zip(tokens, encoded, strict=True):
            row[: len(ids)] = ids
        begun_s = time.perf_counter()
        (logits,) = self._session.run(["logits"], {"tokens": tokens})  # (B, C)
        spent_s = time.perf_counter() - begun_s
        os.write(self._calls, f"{len(texts)} {spent_s:.6f}\n".encode())
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        best = shares.argmax(axis=1)  # (B,)
        return [
            {"label": self._labels[label], "score": float(row[label])}
            for label, row in zip(best.tolist(), shares, strict=True)
        ]
