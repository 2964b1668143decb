"""A trained run as the teacher of another model: its answers, and its states along the way.

Answers to rows that training never changes are computed once and kept in the teacher's folder.
States are compared at the same share t of the depth: the time of an ODE, or the layers passed in a
stack.
"""

import errno
import fcntl
import json
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from tqdm import tqdm

from train.checkpoint import (
    MODEL,
    TAUGHT,
    RunError,
    iteration_of,
    load_run,
    lock,
    read_facts,
    write_atomically,
)
from train.data.batch import Dataset
from train.data.labelled import LabelledDataset
from train.model import OTTransformer, Output, Stepped
from train.ode import mean_square
from train.recipe import Recipe
from train.schedule import steps_of

ROWS_AT_ONCE = 64
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)  # a folder that only others write
Waypath = dict[Fraction, Tensor]  # states (B, N, D) by the share of the way that lies behind


class Teacher:
    """The model of a run, frozen, at its full step count."""

    def __init__(self, folder: Path) -> None:
        run = load_run(folder)
        self.model: Stepped = run.model.requires_grad_(False)
        steps = steps_of(run.recipe)
        self.full, self.method = steps.full, steps.method

    def __call__(self, *inputs: Tensor) -> tuple[Output, Waypath]:
        with torch.no_grad(), Waypoints(self.model) as points:
            output = self.model(*inputs, steps=self.full, method=self.method, observe=points)
        return output, points.path(output)


class Waypoints(AbstractContextManager["Waypoints"]):
    """Keeps the states that a model passes; also an observer of its integration."""

    def __init__(self, model: Stepped, wanted: bool = True) -> None:
        self._model, self._wanted = model, wanted
        self._hooks = ExitStack()
        self._states: list[Tensor] = []

    def __enter__(self) -> "Waypoints":
        if self._wanted and self._model.discrete:
            for block in blocks_of(self._model):
                handle = block.register_forward_hook(self._passed)
                self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def __call__(self, evaluation: int, t: float, x: Tensor, v: Tensor) -> None:
        if evaluation:
            self._states.append(x)

    def _passed(self, block: nn.Module, inputs: Any, output: Tensor) -> None:
        self._states.append(output)

    def path(self, output: Output) -> Waypath:
        """All states of the pass that gave this output."""
        states = self._states
        if not self._model.discrete:
            states = [*states, output.trajectories[-1].end]
        return {Fraction(i, len(states)): state for i, state in enumerate(states, 1)}


def blocks_of(model: Stepped) -> Iterable[nn.Module]:
    """The blocks of a stack, or none."""
    velocity = model.velocity if isinstance(model, OTTransformer) else None
    return getattr(velocity, "blocks", ())


def distance(mine: Waypath, aim: Waypath, present: Tensor | None) -> Tensor:
    """How far states are from a teacher's where both have one, as a share of the teacher's size."""
    shared = [
        mean_square(mine[t] - aim[t], present) / mean_square(aim[t], present)
        for t in mine
        if t in aim
    ]
    return torch.stack(shared).mean()


def check_teacher(folder: Path, dataset: Dataset, recipe: Recipe) -> None:
    """Refuse a teacher that answers something else; it must know the same tokens and classes."""
    facts = read_facts(folder)
    iteration_of(folder / MODEL)  # its weights are there
    labels = None if dataset.labels is None else list(dataset.labels)
    if facts.get("labels") != labels:
        raise RunError(
            f"the teacher {folder} has the classes {facts.get('labels')}, but the data {labels}"
        )
    width, theirs = recipe.model.width, facts["recipe"]["model"]["width"]
    if recipe.teacher.states and width != theirs:
        raise RunError(
            f"teacher.states compares states, but model.width is {width} here and {theirs} in "
            f"{folder}: leave it out, or train a model as wide"
        )
    if facts.get("data_sha256") != dataset.digest:
        raise RunError(
            f"the teacher {folder} was trained on other rows, with another tokenizer or cut "
            "otherwise than this data: train it on the same rows, with the same tokenizer, data "
            "settings, model.window and run.seed"
        )


def kept_logits(folder: Path, dataset: LabelledDataset, quiet: bool) -> Tensor:
    """A teacher's logits (R, classes) for all rows to train on; kept in its folder if possible."""
    path = folder / TAUGHT
    reached = str(iteration_of(folder / MODEL))
    meta = {"of": json.dumps([dataset.digest, reached])}
    if (kept := _read_kept(path, meta)) is not None:
        return kept
    try:
        file = (folder / ".taught.lock").open("w")
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
        return _asked_all(folder, dataset, quiet)  # kept nowhere
    with file:
        lock(file, fcntl.LOCK_EX)  # another student may be asking just now
        if (kept := _read_kept(path, meta)) is not None:
            return kept
        logits = _asked_all(folder, dataset, quiet)
        write_atomically(path, save({"logits": logits}, meta))
    return logits


def _asked_all(folder: Path, dataset: LabelledDataset, quiet: bool) -> Tensor:
    teacher = Teacher(folder)
    batches = list(dataset.training_rows(ROWS_AT_ONCE))
    logits = torch.zeros(sum(len(at) for at, _ in batches), dataset.sizes.classes)
    for at, batch in tqdm(batches, desc="teacher's answers", disable=quiet, mininterval=1.0):
        logits[at] = teacher(*batch.inputs)[0].logits.float()
    return logits


def _read_kept(path: Path, meta: dict[str, str]) -> Tensor | None:
    """The logits in a file; None if it is not there yet, or of an earlier training."""
    try:
        with safe_open(path, framework="pt") as file:
            if file.metadata() == meta:
                kept: Tensor = file.get_tensor("logits")
                return kept
    except (OSError, SafetensorError, KeyError):
        pass
    return None
