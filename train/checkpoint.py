"""Checkpoints: safetensors written under a temporary name, synced, then renamed. No pickle.

A run folder holds recipe.json, tokenizer.json, metrics.jsonl, model.safetensors (newest weights)
and state.safetensors (weights, optimiser moments and iteration, all that resuming needs).
"""

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor, nn

from train.data.batch import Sizes
from train.model import Stepped, build_model, tied_weights
from train.otify import otified_from
from train.pretrained import converted_from
from train.recipe import Recipe, recipe_from

RECIPE, TOKENIZER = "recipe.json", "tokenizer.json"
MODEL, STATE, TEACHER = "model.safetensors", "state.safetensors", "teacher.safetensors"
AVERAGED = "averaged"  # a folder of weights, by iteration
TEACHER_RUN = "teacher"  # a folder: the run of a teacher that was trained for this one
BEST, TAUGHT = "best.safetensors", "taught.safetensors"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
_log = logging.getLogger("stepdial")


class RunError(ValueError):
    """A run folder that cannot be used, with the file named."""


def write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # what is half written must not take the last space of a disk
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def start_run(
    folder: Path, recipe: Recipe, tokenizer: Tokenizer | None, facts: dict[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        write_atomically(folder / TOKENIZER, tokenizer.to_str().encode())
    content = {"recipe": recipe.to_json(), **facts}
    write_atomically(folder / RECIPE, json.dumps(content, indent=2).encode())


def check_begins(folder: Path) -> None:
    """Refuse to begin where a model lies: what it was trained with would be mixed or lost."""
    if left := [name for name in (MODEL, BEST, AVERAGED) if (folder / name).exists()]:
        raise RunError(
            f"{folder} holds {left[0]}, but not {STATE}, which a training goes on from: choose "
            "another --out"
        )


def check_out(folder: Path) -> None:
    """Refuse a folder that holds something else than a run, whose files would be replaced."""
    if not folder.is_dir() or (folder / RECIPE).exists():
        return
    begun = {TOKENIZER, TEACHER_RUN}  # of a run that was ended before it had a recipe
    others = (path.name for path in folder.iterdir() if not path.name.startswith("."))
    if foreign := sorted(set(others) - begun):
        raise RunError(
            f"{folder} holds {foreign[0]} and is no run, so nothing is trained there: choose "
            "another --out"
        )


def lock(file: IO[str], kind: int) -> bool:
    """Lock an open file; False on a file system that has no locks, as some of clusters have none.

    BlockingIOError if another process has the lock and none is waited for.
    """
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """One training in a folder at a time; the lock goes with the process, however it ends."""
    check_out(folder)
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, FileNotFoundError):
        raise RunError(f"{folder} cannot be made a folder: choose another --out") from None
    with (folder / ".lock").open("w") as file:
        try:
            locked = lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another training is at work in {folder}: choose another --out"
            ) from None
        if not locked:
            _log.warning(
                "the file system of %s has no locks: nothing keeps a second training out of it",
                folder,
            )
        try:
            yield
        except BaseException:
            if made and [path.name for path in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
                folder.rmdir()  # nothing was begun
            raise


def check_resumable(folder: Path, recipe: Recipe) -> Tokenizer | None:
    """The tokenizer to go on with, if the run has one; refuses a run of another recipe."""
    # Of an older release it may lack settings: those have their defaults.
    kept = recipe_from(read_facts(folder)["recipe"], str(folder / RECIPE)).to_json()
    now = recipe.to_json()
    now["data"]["path"] = kept["data"]["path"]  # it may have moved; its digest is checked
    if now["teacher"]["run"] and kept["teacher"]["run"]:
        now["teacher"]["run"] = kept["teacher"]["run"]  # and so may this
    # How it is run and watched may change with the machine; only the seed makes another run.
    now["run"] = kept["run"] | {"seed": now["run"]["seed"]}
    differs = [
        f"{section}.{key}" if isinstance(value, dict) else section
        for section, value in now.items()
        for key in (value if isinstance(value, dict) else [section])
        if (
            kept[section].get(key) != value[key]
            if isinstance(value, dict)
            else kept[section] != value
        )
    ]
    if differs:
        raise RunError(
            f"{folder} holds a run of another recipe (it differs in {', '.join(differs)}): "
            "choose another --out, or pass the settings it was started with to go on"
        )
    return read_tokenizer(folder)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    path = folder / TOKENIZER
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers has no narrower one
        raise RunError(_damaged(path, error)) from None


def check_same_data(folder: Path, digest: str) -> None:
    """Refuse to go on with other data than the run began with."""
    if read_facts(folder).get("data_sha256", digest) != digest:
        raise RunError(
            f"{folder} was started on other data than this: choose another --out, or pass the data "
            "it was started with to go on"
        )


def note_places(folder: Path, recipe: Recipe) -> None:
    """Write down where the data and the teacher are now: they may have moved."""
    facts = read_facts(folder)
    kept = facts["recipe"]
    places = {"data": {"path": recipe.data.path}, "teacher": {"run": recipe.teacher.run}}
    moved = {
        section: kept[section] | place
        for section, place in places.items()
        if section in kept and any(place.values()) and kept[section] | place != kept[section]
    }
    if moved:
        facts["recipe"] = kept | moved
        write_atomically(folder / RECIPE, json.dumps(facts, indent=2).encode())


def check_same_teacher(folder: Path, teacher: Path | None) -> None:
    """Refuse to go on with another teacher than the run began with; it may have moved."""
    known = read_facts(folder).get("teacher_sha256")  # earlier runs have none
    if teacher is not None and known not in (None, digest_of_weights(teacher)):
        raise RunError(
            f"{folder} learnt from another teacher than {teacher}, or that one was trained "
            "further: choose another --out, or pass the teacher it was started with to go on"
        )


def digest_of_weights(folder: Path) -> str:
    return hashlib.sha256((folder / MODEL).read_bytes()).hexdigest()


def read_facts(folder: Path) -> dict[str, Any]:
    """What a run keeps about itself."""
    path = folder / RECIPE
    if not path.is_file():
        raise RunError(
            f"{folder} is not a run: it has no {RECIPE}. Make one with `stepdial train`."
        )
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return {**facts, "recipe": dict(facts["recipe"]), "sizes": dict(facts["sizes"])}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(_damaged(path, error)) from None


def _damaged(path: Path, error: Exception) -> str:
    return f"{path} is damaged ({error}): train again or restore the file"


class Reached(NamedTuple):
    """How far a run has come."""

    iteration: int = 0
    evaluations: int = 0  # of velocities, trained through


def _weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Every weight; those that are another one are kept once."""
    tied = tied_weights(model)
    return {
        name: t.detach().contiguous() for name, t in model.state_dict().items() if name not in tied
    }


def save_checkpoint(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, reached: Reached
) -> None:
    weights = _weights_of(model)
    state = {f"model.{name}": t for name, t in weights.items()}
    for name, parameter in model.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            state[f"optimiser.{key}.{name}"] = torch.as_tensor(value).detach().contiguous()
    state["evaluations"] = torch.tensor(reached.evaluations)
    meta = {"iteration": str(reached.iteration)}  # alone: the order of several is not fixed
    write_atomically(folder / STATE, save(state, meta))
    write_atomically(folder / MODEL, save(weights, meta))


def keep_for_average(folder: Path, iteration: int, wanted: int) -> None:
    """Keep the weights just saved beside the run, and those of the last checkpoints before it."""
    kept = folder / AVERAGED
    kept.mkdir(exist_ok=True)
    path = kept / f"{iteration}.safetensors"
    if not path.is_file():  # of a run that has ended, the newest model is the mean already
        write_atomically(path, (folder / MODEL).read_bytes())
    for _, older in _checkpoints(kept)[:-wanted]:
        older.unlink()


def average_checkpoints(folder: Path, wanted: int) -> None:
    """Make the newest model of a run the mean of its last checkpoints; what resumes stays."""
    last = _checkpoints(folder / AVERAGED)[-wanted:]
    weights = load_file(last[-1][1])
    for _, path in last[:-1]:
        for name, value in load_file(path).items():
            if value.is_floating_point():
                weights[name] = weights[name] + value
    mean = {
        name: (value / len(last)).contiguous() if value.is_floating_point() else value
        for name, value in weights.items()
    }
    write_atomically(folder / MODEL, save(mean, {"iteration": str(last[-1][0])}))


def load_newest(folder: Path, model: nn.Module) -> None:
    """Take over the weights that a run has kept last."""
    load_weights(model, _read(folder / MODEL)[0])


def _checkpoints(kept: Path) -> list[tuple[int, Path]]:
    """Iterations and files, the oldest first."""
    return sorted((int(path.stem), path) for path in kept.glob("[0-9]*.safetensors"))


def load_checkpoint(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> Reached:
    """Restore weights and moments; where to go on."""
    state, iteration = _read(folder / STATE)
    weights = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
    newest = folder / MODEL
    best = read_best(folder)[1]
    if _reached(newest) not in (iteration, best or iteration):
        # The run ended between the two files of its checkpoint, or this one was damaged.
        write_atomically(newest, save(weights, {"iteration": str(iteration)}))
    load_weights(model, weights)
    for name, parameter in model.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            value = state.get(f"optimiser.{key}.{name}")
            if value is not None:
                optimiser.state[parameter][key] = value
    return Reached(iteration, int(state["evaluations"]))


def save_best(folder: Path, model: nn.Module, value: float, iteration: int) -> None:
    """Keep the weights of the best evaluation so far."""
    note = json.dumps({"iteration": iteration, "value": value})
    write_atomically(folder / BEST, save(_weights_of(model), {"best": note}))


def read_best(folder: Path) -> tuple[float, int]:
    """What the best evaluation so far was worth, and when; minus infinity, 0 if there is none."""
    try:
        with safe_open(folder / BEST, framework="pt") as file:
            note = json.loads(file.metadata()["best"])
        return float(note["value"]), int(note["iteration"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return -math.inf, 0


def load_best(folder: Path, model: nn.Module) -> None:
    """Take over the best weights."""
    load_weights(model, load_file(folder / BEST))


def save_weights(folder: Path, model: nn.Module, iteration: int) -> None:
    """Make these weights the run's newest."""
    write_atomically(folder / MODEL, save(_weights_of(model), {"iteration": str(iteration)}))


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Set every weight; those that are another one are kept once."""
    owners = tied_weights(model)
    wanted = set(model.state_dict()) - set(owners)
    if wanted != set(weights):
        raise RunError(
            "these weights are of another form of the model (they differ in "
            f"{', '.join(sorted(wanted ^ set(weights))[:4])}): a release that wrote it another way "
            "can still export them; this one must train them again"
        )
    model.load_state_dict(weights | {name: weights[owner] for name, owner in owners.items()})


def start_from(origin: Path, model: Stepped) -> tuple[dict[str, Any], bytes]:
    """Take over the weights of another run; where they are from, and their file as it is."""
    weights, iteration = _read(origin / MODEL)
    load_weights(model, weights)
    content = (origin / MODEL).read_bytes()
    facts = {
        "name": read_facts(origin)["recipe"]["name"],
        "iteration": iteration,
        "weights_sha256": hashlib.sha256(content).hexdigest(),
    }
    return facts, content


def load_original(folder: Path, recipe: Recipe, sizes: Sizes) -> Stepped:
    """The model that a run started from, frozen."""
    original = new_model(folder, recipe, sizes)
    load_weights(original, _read(folder / TEACHER)[0])
    return original.eval().requires_grad_(False)


def new_model(folder: Path | None, recipe: Recipe, sizes: Sizes) -> Stepped:
    """Fresh weights for the model of a run, or of a recipe that has no run yet."""
    facts = {} if folder is None else read_facts(folder)
    if facts.get("own_model"):
        raise RunError(
            f"{folder} trained a module of your own: build it again and pass it, to `train` to go "
            "on, to `evaluate_run` or to `export_run`; see docs/training.md"
        )
    if not (facts.get("otify") or facts.get("pretrained")):
        return build_model(recipe.model, sizes, recipe.steps)
    model = (
        otified_from(facts["otify"]) if facts.get("otify") else converted_from(facts["pretrained"])
    )
    model.dial, model.full = recipe.steps.dial, recipe.steps.full
    return model


class Run(NamedTuple):
    """A trained model and what its run keeps about it."""

    model: Stepped
    recipe: Recipe
    tokenizer: Tokenizer | None
    facts: dict[str, Any]


def load_run(folder: Path, model: Stepped | None = None) -> Run:
    """The newest model of a run, in evaluation mode, with its recipe, tokenizer and facts.

    A model of one's own is passed as it was built; it gets the weights of the run.
    """
    content = read_facts(folder)
    recipe = recipe_from(content["recipe"], str(folder / RECIPE))
    try:
        sizes = Sizes(**content["sizes"])
    except TypeError as error:
        raise RunError(_damaged(folder / RECIPE, error)) from None
    if model is None:
        model = new_model(folder, recipe, sizes)
    model.dial, model.full = recipe.steps.dial, recipe.steps.full
    weights, iteration = _read(folder / MODEL)
    load_weights(model, weights)
    return Run(model.eval(), recipe, read_tokenizer(folder), content | {"iteration": iteration})


def _read(path: Path) -> tuple[dict[str, Tensor], int]:
    iteration = iteration_of(path)
    try:
        return load_file(path), iteration
    except SafetensorError as error:
        raise RunError(_damaged(path, error)) from None


def _reached(path: Path) -> int | None:
    """The iteration of the weights in a file, if they can be read."""
    try:
        return iteration_of(path)
    except RunError:
        return None


def iteration_of(path: Path) -> int:
    """How far the weights in a file have come."""
    try:
        with safe_open(path, framework="pt") as file:
            return int(file.metadata()["iteration"])
    except FileNotFoundError:
        raise RunError(
            f"{path} does not exist: the run has not reached its first checkpoint"
        ) from None
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise RunError(_damaged(path, error)) from None
