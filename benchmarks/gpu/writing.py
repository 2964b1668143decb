"""Tokens a second of a decoder with caches, on a GPU and the CPU, beside peers on the same GPU.

Ours are the bundle in float32 and made of it in fp16 and bf16. Each is first held against float32
on the CPU, on text that the model wrote itself: how many greedy tokens agree, and the change of the
loss. Peers have random weights in the same shape: a decoder in plain PyTorch with caches that takes
as many steps, and a GPT-2 as deep as all steps together in transformers and in CTranslate2. They
say what the arithmetic costs there, not what it is worth.
"""

import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.lab import interleave
from export.half import Half
from export.half_bundle import halve_bundle
from export.quality import compare
from serve.bundle import AgainstFp32, Bundle, BundleError
from serve.runtime import Device, OpenedModel, open_model
from serve.runtime.protocol import FloatArray
from train.data.batch import Batch

ROWS = (1, 16, 64)
PROMPT, ANSWER = 32, 64  # tokens, where the window has room for them
AGREEMENT, LOSS = 0.99, 0.002
HALVES: tuple[Half, ...] = ("fp16", "bf16")
Write = Callable[[int], int]  # that many rows at once; returns the tokens written


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder, and how much of it is run."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    steps: int
    prompt: int
    answer: int

    @classmethod
    def of(cls, bundle: Bundle, steps: int) -> "Shape":
        manifest = bundle.manifest
        shape, window = manifest.shape, manifest.text_input.max_tokens
        prompt = max(1, min(PROMPT, window // 3))
        answer = max(1, min(ANSWER, window - prompt - 1))
        vocabulary = manifest.text_tokenizer.vocab_size
        return cls(shape.layers, shape.heads, shape.width, vocabulary, steps, prompt, answer)


@dataclass(frozen=True, slots=True)
class Written:
    """One measurement."""

    way: str
    steps: int
    rows: int
    tokens_a_second: float
    against_fp32: AgainstFp32 | None  # of ours

    @property
    def right(self) -> bool:
        known = self.against_fp32
        return known is None or (known.top1_agreement >= AGREEMENT and abs(known.change) <= LOSS)


@dataclass(slots=True)
class Report:
    """What was measured, and why other ways were not."""

    written: list[Written] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)


def measure(bundle: Bundle, folder: Path, rounds: int, peers_on: str = "cuda") -> Report:
    """Every way at the default rung, in turn; `folder` is for the bundles that are made for it."""
    report, steps = Report(), bundle.manifest.default_steps
    shape, reference = Shape.of(bundle, steps), open_model(bundle)
    rows = written_by(reference, steps, 4)
    writes: dict[str, Write] = {}
    against: dict[str, AgainstFp32] = {}
    for name, opening in ours(bundle, folder).items():
        with _reported(report, name):
            model = opening()
            _, against[name] = compare(model, reference, steps, [rows])
            writes[name] = _tried(writer(model, shape))
    for name, making in peers(shape, folder, peers_on).items():
        with _reported(report, name):
            writes[name] = _tried(making())
    for count in ROWS:
        speeds = interleave(
            {name: partial(_speed, write, count) for name, write in writes.items()},
            seconds=0,
            least=rounds,
            most=rounds,
        )
        report.written += [
            Written(name, steps, count, median(found), against.get(name))
            for name, found in speeds.items()
        ]
    return report


@contextmanager
def _reported(report: Report, name: str) -> Iterator[None]:
    """Note in the report why a way was refused, or failed: others are still measured."""
    try:
        yield
    except (BundleError, ImportError, Skipped) as error:
        report.skipped[name] = str(error)
    except Exception as error:
        report.broken[name] = f"{type(error).__name__}: {error}"


class Skipped(Exception):  # not an error
    """A way that this machine has not."""


def ours(bundle: Bundle, folder: Path) -> Mapping[str, Callable[[], OpenedModel]]:
    made: dict[Half, Bundle] = {}

    def halved(half: Half) -> Bundle:
        if half not in made:
            rows = written_by(open_model(bundle), bundle.manifest.default_steps, 2)
            made[half] = halve_bundle(bundle, folder / half, half, lambda: [rows], lambda _: None)
        return made[half]

    found: dict[str, Callable[[], OpenedModel]] = {"stepdial cpu fp32": lambda: open_model(bundle)}
    for half in HALVES:
        found[f"stepdial cpu {half}"] = lambda half=half: open_model(halved(half))  # type: ignore[misc]  # defaults bind now
    found["stepdial cuda fp32, whole rungs"] = lambda: open_model(bundle, device=Device("cuda"))
    for half in HALVES:
        found[f"stepdial cuda {half}"] = lambda half=half: open_model(  # type: ignore[misc]  # defaults bind now
            halved(half), device=Device("cuda")
        )
    return found


def written_by(model: OpenedModel, steps: int, rows: int) -> Batch:
    """Rows that fill the window, drawn from the model's own distribution."""
    chance, manifest = np.random.default_rng(0), model.bundle.manifest
    length = manifest.text_input.max_tokens
    batch = model.decoder(steps).open_batch()
    tokens = np.zeros((rows, length + 1), dtype=np.int64)
    tokens[:, 0] = chance.integers(1, manifest.text_tokenizer.vocab_size, rows)
    logits: FloatArray = np.stack([batch.add(row[:1]) for row in tokens])
    for at in range(1, length + 1):
        tokens[:, at] = (logits + chance.gumbel(size=logits.shape)).argmax(-1)
        if at < length:
            logits = batch.step(tokens[:, at].copy())
    return Batch((torch.from_numpy(tokens[:, :-1]),), torch.from_numpy(tokens[:, 1:]))


def writer(model: OpenedModel, shape: Shape) -> Write:
    """Greedy decoding as the server does it: prompts one by one, then a token of all rows."""
    decoder = model.decoder(shape.steps)
    prompt = 1 + np.arange(shape.prompt, dtype=np.int64) % (shape.vocabulary - 1)

    def write(rows: int) -> int:
        batch = decoder.open_batch()
        tokens = np.array([int(batch.add(prompt).argmax()) for _ in range(rows)])
        for _ in range(shape.answer - 1):
            tokens = batch.step(tokens).argmax(-1)
        return rows * shape.answer

    return write


def peers(shape: Shape, folder: Path, on: str) -> Mapping[str, Callable[[], Write]]:
    """What else could decode there; each says when it is made why it cannot."""

    def gpt2(name: str, *given: Any) -> Write:
        """A GPT-2 as deep as all steps together."""
        peer = importlib.import_module("benchmarks.peers.generation_app")
        layers, window = shape.layers * shape.steps, shape.prompt + shape.answer
        size = (layers, shape.heads, shape.width, window, shape.vocabulary)
        write: Write = getattr(peer, name)(
            peer.Shape(*size, prompt=shape.prompt, answer=shape.answer), *given
        )
        return write

    def here(make: Callable[..., Write], *given: Any) -> Callable[[], Write]:
        def made() -> Write:
            if on == "cuda" and not torch.cuda.is_available():
                raise Skipped("torch sees no CUDA device")
            return make(*given)

        return made

    found: dict[str, Callable[[], Write]] = {}
    for name, kind in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        found[f"PyTorch with caches {name}"] = here(plain_torch, shape, on, kind)
        found[f"transformers {name}"] = here(gpt2, "in_transformers", on, kind)
    half = "float16" if on == "cuda" else "default"
    found["CTranslate2 fp16"] = here(gpt2, "in_ctranslate2", folder / "peer", half, on)
    return found


class _Block(nn.Module):
    """The weights of a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class _TorchDecoder(nn.Module):
    """Blocks that are used in every step, with a cache of each evaluation."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, width)
        self.places = nn.Embedding(shape.prompt + shape.answer, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, at: int, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Logits (B, V) after tokens (B, S) at positions from `at`; caches are written in place."""
        shape, (B, S) = self.shape, tokens.shape
        x = self.tokens(tokens) + self.places(torch.arange(at, at + S, device=tokens.device))
        causal = S > 1
        for step in range(shape.steps):
            v = x
            for index, block in enumerate(self.blocks):
                assert isinstance(block, _Block)
                qkv = block.qkv(block.before(v))
                q, k, w = qkv.view(B, S, 3, shape.heads, -1).permute(2, 0, 3, 1, 4)
                keys, values = caches[step * shape.layers + index]
                keys[:, :, at : at + S], values[:, :, at : at + S] = k, w
                seen = functional.scaled_dot_product_attention(
                    q, keys[:, :, : at + S], values[:, :, : at + S], is_causal=causal
                )
                v = v + block.out(seen.transpose(1, 2).reshape(B, S, -1))
                inner = functional.gelu(block.up(block.between(v)), approximate="tanh")
                v = v + block.down(inner)
            x = x + (v - x) / shape.steps
        logits: Tensor = self.norm(x[:, -1]) @ self.tokens.weight.T
        return logits


def plain_torch(shape: Shape, on: str, kind: torch.dtype) -> Write:
    torch.manual_seed(0)
    model = _TorchDecoder(shape).to(on, kind).eval()
    prompt = 1 + torch.arange(shape.prompt, device=on) % (shape.vocabulary - 1)

    @torch.inference_mode()
    def write(rows: int) -> int:
        size = (rows, shape.heads, shape.prompt + shape.answer, shape.width // shape.heads)
        caches = [
            (torch.empty(size, device=on, dtype=kind), torch.empty(size, device=on, dtype=kind))
            for _ in range(shape.steps * shape.layers)
        ]
        tokens = model(prompt.expand(rows, -1), 0, caches).argmax(-1)  # (B,)
        for at in range(shape.prompt, shape.prompt + shape.answer - 1):
            tokens = model(tokens[:, None], at, caches).argmax(-1)
        tokens.cpu()  # waits for the GPU
        return rows * shape.answer

    return write


def _tried(write: Write) -> Write:
    """The same, after a call of each size: what fails must not end the measurement of others."""
    for rows in ROWS:
        write(rows)
    return write


def _speed(write: Write, rows: int) -> float:
    begun_s = time.perf_counter()
    return write(rows) / (time.perf_counter() - begun_s)
