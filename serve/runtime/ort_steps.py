"""The sessions of one step of a bundle on onnxruntime: embed, step, head. They make every rung.

Knows the graphs and how a rung divides the interval, or where it stops; neither rows nor caches.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import onnxruntime as ort

from serve.bundle import EVALUATIONS_PER_STEP, Bundle, BundleError, Manifest
from serve.runtime.interface import (
    Interface,
    embed_interface,
    head_interface,
    step_interface,
)
from serve.runtime.interruptible import InterruptibleSession
from serve.runtime.ort_session import open_session
from serve.runtime.ort_weights import Weights
from serve.runtime.protocol import FloatArray

_SMALL_END_BYTES = 1 << 20
HISTORY = 0.5  # of ab2: what a step takes from the one before it


@final
@dataclass(frozen=True, slots=True)
class StepSessions:
    """One copy of the weights for all rungs."""

    embed: InterruptibleSession
    step: InterruptibleSession
    single: InterruptibleSession  # the step of one token, which may be quicker on fewer threads
    head: InterruptibleSession
    timed: bool  # whether the step wants the time
    sized: bool  # whether it wants its size: a pass of fixed depth has none
    history: bool  # whether it wants the velocity of the step before
    stages: int  # evaluations a step
    T: float
    grid_steps: int | None  # of the dial of time: steps that cross [0, T]
    contexts: tuple[str, ...]  # what the embedding gives to the step beside the state
    head_contexts: tuple[str, ...]  # and to the head

    def step_of(self, tokens: int) -> InterruptibleSession:
        """The session that takes so many tokens a step further."""
        return self.single if tokens == 1 else self.step

    def times(self, step: int, steps: int, rows: int) -> dict[str, FloatArray]:
        """What a step of a rung is told, row by row."""
        told: dict[str, float] = {}
        if self.sized:
            told["h"] = self.T / (self.grid_steps or steps)
        if self.timed:
            told["t"] = self.T * step / (self.grid_steps or steps)
        if self.history:
            told["history"] = HISTORY if step else 0.0
        return {name: np.full(rows, value, dtype=np.float32) for name, value in told.items()}


def open_steps(
    bundle: Bundle,
    threads: int,
    run_options: ort.RunOptions | None = None,
    weights: Weights | None = None,
    spin: bool = False,
) -> StepSessions:
    """The sessions of a bundle that has graphs of one step; `spin` as in `open_session`."""
    manifest = bundle.manifest
    files = manifest.step
    assert files is not None, f"{manifest.name} has no graphs of one step"
    weights = weights or Weights.read(bundle, in_place=False)

    def opened(file: str, interface: Interface, threads: int, spins: bool) -> InterruptibleSession:
        return open_session(
            bundle,
            file,
            interface,
            threads,
            run_options=run_options,
            weights=weights,
            spin=spins,
        )

    # Between two tokens the threads of the others would be in the way of a step's.
    ends = 1 if _small_ends(manifest) else threads
    embed = opened(files.embed, embed_interface(manifest), ends, False)
    step = opened(files.step, step_interface(manifest), threads, spin)
    head = opened(files.head, head_interface(manifest), ends, False)
    given = {node.name: node.type for node in embed.get_outputs()}
    for file, session in ((files.step, step), (files.head, head)):
        for node in session.get_inputs():
            if node.name.startswith("context_") and given.get(node.name) != node.type:
                raise BundleError(
                    f"takes {node.name} as {node.type}, which {files.embed} does not give; export "
                    "the bundle again",
                    file=str(bundle.folder / file),
                )
    names = {node.name for node in step.get_inputs()}
    head_names = {node.name for node in head.get_inputs()}
    return StepSessions(
        embed,
        step,
        step,
        head,
        timed="t" in names,
        sized="h" in names,
        history=manifest.method == "ab2",
        stages=EVALUATIONS_PER_STEP[manifest.method],
        T=manifest.T,
        grid_steps=manifest.grid_steps,
        contexts=tuple(name for name in given if name != "x" and name in names),
        head_contexts=tuple(name for name in given if name != "x" and name in head_names),
    )


def _small_ends(manifest: Manifest) -> bool:
    """Whether to embed tokens and to read them off takes less than to wake a thread for it."""
    if not manifest.keeps_caches:
        return False
    tokens = manifest.text_tokenizer.vocab_size
    return tokens * manifest.shape.width * np.dtype(np.float32).itemsize <= _SMALL_END_BYTES
