"""Checkpoints: safetensors written under a temporary name, synced, then renamed. No pickle.

A run folder holds recipe.json, tokenizer.json, metrics.jsonl, model.safetensors (newest weights)
and state.safetensors (weights, optimiser moments and iteration, all that resuming needs).
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor, nn

from train.config import Recipe, recipe_from
from train.model import OTTransformer, build_model

RECIPE, TOKENIZER, METRICS = "recipe.json", "tokenizer.json", "metrics.jsonl"
MODEL, STATE = "model.safetensors", "state.safetensors"


class RunError(ValueError):
    """A run folder that cannot be used, with the file named."""


def write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def start_run(folder: Path, recipe: Recipe, tokenizer: Tokenizer, facts: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / TOKENIZER, tokenizer.to_str().encode())
    content = {"recipe": recipe.to_json(), **facts}
    write_atomically(folder / RECIPE, json.dumps(content, indent=2).encode())


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """One training in a folder at a time; the lock goes with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(
                f"another training is at work in {folder}: choose another --out"
            ) from None
        yield


def check_resumable(folder: Path, recipe: Recipe) -> Tokenizer:
    """The tokenizer to go on with; refuses a run of another recipe."""
    kept, now = read_facts(folder)["recipe"], recipe.to_json()
    differs = [
        f"{section}.{key}" if isinstance(value, dict) else section
        for section, value in now.items()
        for key in (value if isinstance(value, dict) else [section])
        if (
            kept.get(section, {}).get(key) != value[key]
            if isinstance(value, dict)
            else kept.get(section) != value
        )
    ]
    if differs:
        raise RunError(
            f"{folder} holds a run of another recipe (it differs in {', '.join(differs)}): "
            "choose another --out, or pass the settings it was started with to go on"
        )
    return Tokenizer.from_file(str(folder / TOKENIZER))


def check_same_data(folder: Path, digest: str) -> None:
    """Refuse to go on with other data than the run began with."""
    if read_facts(folder).get("data_sha256", digest) != digest:
        raise RunError(
            f"{folder} was started on other data than this: choose another --out, or pass the data "
            "it was started with to go on"
        )


def read_facts(folder: Path) -> dict[str, Any]:
    """What a run keeps about itself."""
    path = folder / RECIPE
    if not path.is_file():
        raise RunError(
            f"{folder} is not a run: it has no {RECIPE}. Make one with `stepdial train`."
        )
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return {**facts, "recipe": dict(facts["recipe"])}
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}): train again or restore the file") from None


def save_checkpoint(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, iteration: int
) -> None:
    weights = {name: t.detach().contiguous() for name, t in model.state_dict().items()}
    state = {f"model.{name}": t for name, t in weights.items()}
    for name, parameter in model.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            state[f"optimiser.{key}.{name}"] = torch.as_tensor(value).detach().contiguous()
    meta = {"iteration": str(iteration)}
    write_atomically(folder / STATE, save(state, meta))
    write_atomically(folder / MODEL, save(weights, meta))


def load_checkpoint(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> int:
    """Restore weights and moments; the iteration to go on with."""
    state, iteration = _read(folder / STATE)
    model.load_state_dict({k.removeprefix("model."): v for k, v in _under(state, "model.").items()})
    for name, parameter in model.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            value = state.get(f"optimiser.{key}.{name}")
            if value is not None:
                optimiser.state[parameter][key] = value
    return iteration


def load_run(folder: Path) -> tuple[OTTransformer, Recipe, Tokenizer, dict[str, Any]]:
    """The newest model of a run, in evaluation mode, with its recipe, tokenizer and facts."""
    content = read_facts(folder)
    recipe = recipe_from(content["recipe"], str(folder / RECIPE))
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    labels = content.get("labels")
    model = build_model(recipe.model, tokenizer.get_vocab_size(), labels and len(labels))
    weights, iteration = _read(folder / MODEL)
    model.load_state_dict(weights)
    vocabulary = tokenizer.get_vocab_size()
    return (
        model.eval(),
        recipe,
        tokenizer,
        content | {"iteration": iteration, "vocabulary": vocabulary},
    )


def _read(path: Path) -> tuple[dict[str, Tensor], int]:
    if not path.is_file():
        raise RunError(f"{path} does not exist: the run has not reached its first checkpoint")
    try:
        with safe_open(path, framework="pt") as file:
            iteration = int(file.metadata()["iteration"])
        return load_file(path), iteration
    except (SafetensorError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}): train again or restore the file") from None


def _under(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.startswith(prefix)}
