"""Checkpoints: safetensors written under a temporary name, synced, then renamed. No pickle.

A run folder holds recipe.json, tokenizer.json, metrics.jsonl, model.safetensors (newest weights)
and state.safetensors (weights, optimiser moments and iteration, all that resuming needs).
"""

import json
import os
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
    if not (folder / RECIPE).is_file():
        raise RunError(
            f"{folder} is not a run: it has no {RECIPE}. Make one with `stepdial train`."
        )
    content = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
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
