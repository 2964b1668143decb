"""Writing: our server beside transformers and CTranslate2, a decoder of the same size each.

One velocity evaluation of ours is one pass through as many layers, heads and as wide as theirs, so
ours takes one step a token. Ours answers over HTTP, one request a row; theirs are called without a
server, all rows at once from the first token to the last.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import reference
from benchmarks.client import load
from benchmarks.lab import ROOT, interleave
from benchmarks.peers.servers import STEPDIAL, Cores, Environments
from benchmarks.server import Server, running_server
from serve.bundle import Bundle, Precision
from serve.inputs.text import TextCodec
from serve.runtime import Model, open_model

PACKAGES = (
    *("torch==2.13.0", "transformers==5.23.0", "ctranslate2==4.8.5"),
    *("tokenizers==0.23.3", "numpy==2.4.6"),
)
ROWS = (1, 16)
STEPS = 1
SERVED, ALONE = ", over HTTP", ", the runtime alone"
_ANSWER_TOKENS, _QUICK_TOKENS = 64, 8
_ROUND_S, _ROUNDS = 2.5, 2
_PROMPT = "ABCDEFGHIJKLMNOPQRST"  # the model of random characters knows them all

Way = tuple[str, int]  # what writes, and its rows or clients


def measure_generation(
    environments: Environments, cores: Cores, quick: bool, peers: bool = True
) -> dict[Way, float]:
    """Tokens a second of every way, the median of rounds in which all take turns.

    NotInstalled where theirs cannot be; without `peers`, only ours is measured.
    """
    python = None
    if peers:
        python = environments.python("generation", PACKAGES, Path(sys.executable))
    origin = reference.decoder(quick)
    answer = _QUICK_TOKENS if quick else _ANSWER_TOKENS
    round_s = 0.2 if quick else _ROUND_S
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bundles = reference.bundles(origin, Path(folder), (STEPS,))
        with cores.of_server():
            folders = [one.folder for one in bundles.values()]
            server = stack.enter_context(running_server(folders))
        calls = {
            (f"{STEPDIAL} {precision}{SERVED}", rows): partial(
                _ours, server, bundle, rows, answer, round_s
            )
            for precision, bundle in bundles.items()
            for rows in ROWS
        }
        calls |= {
            (f"{STEPDIAL} {precision}{ALONE}", rows): partial(
                _alone, cores, open_model(bundle, threads=1), rows, answer, round_s
            )
            for precision, bundle in bundles.items()
            for rows in ROWS
        }
        if python is not None:
            shape = _shape(bundles, answer)
            with cores.of_server():
                child = stack.enter_context(_writer(python, shape))
            calls |= {
                (way, rows): partial(_theirs, child, way, rows, round_s)
                for way in _read(child)
                for rows in ROWS
            }
        found = interleave(calls, seconds=0, least=1 if quick else _ROUNDS)
    return {way: median(rates) for way, rates in found.items()}


def _ours(server: Server, bundle: Bundle, clients: int, answer: int, seconds: float) -> float:
    body = {
        "model": bundle.manifest.name,
        "prompt": _PROMPT,
        "max_tokens": answer,
        "temperature": 0,
        "steps": STEPS,
    }
    found = load(server, "/v1/generate", [json.dumps(body).encode()], clients, seconds)
    if found.errors or not found.answers:
        raise SystemExit(f"{found.errors} of {found.answers + found.errors} generations failed")
    # Answers of many clients come in waves: counting them in a few seconds would be coarse.
    return clients * answer * len(found.latencies_s) / sum(found.latencies_s)


def _alone(cores: Cores, model: Model, rows: int, answer: int, seconds: float) -> float:
    """Our runtime in this process, without engine and server, on the core of the server."""
    prompt = np.array(TextCodec(model.bundle).encode_prompt(_PROMPT), dtype=np.int64)  # (S,)
    decoder = model.decoder(STEPS)
    with cores.of_server():
        tokens, begun_s = 0, time.perf_counter()
        while not tokens or time.perf_counter() - begun_s < seconds:
            batch = decoder.open_batch()
            following = np.array([batch.add(prompt).argmax() for _ in range(rows)])  # (B,)
            for _ in range(answer - 1):
                following = batch.step(following).argmax(axis=1)  # (B,)
            tokens += rows * answer
        return tokens / (time.perf_counter() - begun_s)


@contextmanager
def _writer(python: Path, shape: Mapping[str, int]) -> Iterator["subprocess.Popen[str]"]:
    """The process that writes with the others; it has been told the shape."""
    child = subprocess.Popen(
        [str(python), "-m", "benchmarks.peers.generation_app"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert child.stdin is not None
        child.stdin.write(json.dumps(shape) + "\n")
        child.stdin.flush()
        yield child
    finally:
        child.terminate()
        child.communicate()


def _theirs(child: "subprocess.Popen[str]", way: str, rows: int, seconds: float) -> float:
    assert child.stdin is not None
    child.stdin.write(json.dumps({"way": way, "rows": rows, "seconds": seconds}) + "\n")
    child.stdin.flush()
    return float(_read(child))


def _read(child: "subprocess.Popen[str]") -> Any:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"the process of transformers ended with status {child.wait()}")
    return json.loads(line)


def _shape(bundles: Mapping[Precision, Bundle], answer: int) -> Mapping[str, int]:
    manifest = bundles["fp32"].manifest
    return {
        "layers": manifest.shape.layers,
        "heads": manifest.shape.heads,
        "width": manifest.shape.width,
        "window": manifest.text_input.max_tokens,
        "vocabulary": manifest.text_tokenizer.vocab_size,
        "prompt": len(_PROMPT),
        "answer": answer,
    }
