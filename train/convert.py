"""Converts a pretrained model: fine-tune it, then train a few of its layers as a velocity.

Encoders learn from a table of texts and labels, decoders from a text that they go on with. The
fine-tuned model is the teacher. The layers that are kept become the velocity of an ODE (with
one step alone, a shallow stack) and learn from the labels and from the teacher. Both are ordinary
training runs with recipes made here, so the same command resumes them.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.checkpoint import STATE, TEACHER_RUN, RunError, check_out, load_run, read_facts
from train.data import open_dataset, training_texts
from train.data.batch import Dataset
from train.data.labelled import LabelledDataset
from train.data.tables import KINDS, plain_name
from train.data.text import TextDataset
from train.loop import train
from train.pretrained import (
    ConvertedTransformer,
    Original,
    PretrainedError,
    apart,
    begin_with_layers,
    check_layers,
    converted,
    kind_of,
    read_original,
    special_ends,
    spread,
)
from train.recipe import Recipe, load_recipe, overridden
from train.vocabulary import pruned

ENDINGS = 2  # the rank of a step that a shorter answer ends with is so small a part of the others
BATCH, WINDOWS = 32, 8  # rows of a batch: labelled texts, and windows of a text to continue
SEEN = 4  # batches that corrections are fitted to before training
WINDOW = 256  # tokens of such a window, unless more are asked for
Begin = Callable[[Recipe], None]
_HUB_NAME = re.compile(r"(?!\.)([\w.-]+/)?[\w.-]+")


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a pretrained model shall become."""

    blocks: int = 2  # layers that are kept; 0: all
    layers: tuple[int, ...] = ()  # which; (): as far apart as can be
    steps: tuple[int, ...] = (1, 2, 3)  # (1,): a stack, no ODE
    recipe: str = ""  # whose data, title and card are used; "": classifier, of a decoder text
    teacher: Path | None = None  # a run; None: the original is fine-tuned first
    teacher_epochs: float = 3.0
    epochs: float = 6.0
    max_tokens: int = 0  # 0: the recipe's
    prune: bool = False  # keep only the pieces of the vocabulary that the training texts use
    rank: int = 0  # of the corrections that each step after the first has; 0: none
    overrides: tuple[str, ...] = ()  # of data and run for the teacher as well


def convert(
    model: str,
    folder: Path,
    request: Conversion,
    data: str = "",
    quiet: bool = False,
    begin: Begin | None = None,
) -> Recipe:
    """Convert a pretrained model into a run; the recipe that this took.

    `begin` is called when the data can be read, before anything is trained.
    """
    request = _with_window(request)
    check_out(folder)
    original = find_original(model)
    count = original.sizes.layers
    layers = request.layers or _layers(request, count)
    if request.rank:
        _check_rank(original, request, layers)
    whole = layers == tuple(range(count)) and request.steps == (1,)
    base = _base(original, request, data)
    if request.prune:
        settings = [each for each in request.overrides if each.startswith(("data.", "run."))]
        recipe = overridden(base, settings, f"convert {original.name}")
        before = original.sizes.vocabulary
        original = pruned(original, training_texts(recipe))
        base = _base(original, request, data)
        after = original.sizes.vocabulary
        base["card"]["made_with"] += f" Its vocabulary is cut from {before:,} to {after:,} pieces."
        if not quiet:
            print(f"the training texts use {after:,} of {before:,} pieces of the vocabulary")
    teacher = request.teacher
    if teacher is None and not whole:
        teacher = folder / TEACHER_RUN
        _check_own_teacher(folder, teacher)
        # What is wrong with the second run is said before the first, which may take hours.
        check_layers(original, layers)
        table = _table_of_run(base, layers, teacher, request)
        _overridden(table, request, original)
        _train_whole(original, base, teacher, request, quiet, begin)
        begin = None
    if not quiet and not whole:
        form = "a stack" if request.steps == (1,) else f"a dial of {_joined(request.steps)} steps"
        begin = _saying(f"training {form} of the layers {_joined(layers)}: {folder}", begin)
    return _train(original, base, folder, layers, teacher, request, quiet, begin)


def _check_own_teacher(folder: Path, teacher: Path) -> None:
    """Refuse a run that began with another teacher, before a new one is trained for hours."""
    if teacher.is_dir() or not (folder / STATE).is_file():
        return
    kept = read_facts(folder)["recipe"].get("teacher", {}).get("run", "")
    if kept and Path(kept).resolve() != teacher.resolve():
        raise RunError(
            f"{folder} learns from another teacher than its own: pass --teacher {kept} to go on, "
            "or choose another --out"
        )


def _saying(line: str, begin: Begin | None) -> Begin:
    """Print a line when the data can be read, and begin."""

    def say(recipe: Recipe) -> None:
        print(line, flush=True)
        if begin is not None:
            begin(recipe)

    return say


def _layers(request: Conversion, count: int) -> tuple[int, ...]:
    """The layers that are kept; with corrections, those that each step begins as."""
    kept = apart(request.blocks or count, count)
    return spread(len(kept) * max(request.steps), count) if request.rank else kept


def _check_rank(original: Original, request: Conversion, layers: tuple[int, ...]) -> None:
    steps, sizes = max(request.steps), original.sizes
    if steps == 1:
        raise PretrainedError("--rank is of steps after the first: ask for more with --steps")
    if original.decodes or original.encoder.family == "albert":
        raise PretrainedError(
            f"--rank: {original.name} is "
            + ("a decoder" if original.decodes else "an ALBERT, whose layers are all the same")
            + ", whose steps cannot have corrections; leave --rank out"
        )
    if not 1 <= request.rank < sizes.width:
        raise PretrainedError(
            f"--rank {request.rank}: from 1 to below the width of {original.name}, {sizes.width}"
        )
    if len(layers) % steps:
        raise PretrainedError(
            f"--layers with --rank names those of each step, one after the other, such as "
            f"{_joined(spread(2 * steps, sizes.layers))}: {len(layers)} cannot be shared out among "
            f"{steps} steps"
        )
    if not request.layers and len(layers) > sizes.layers:
        raise PretrainedError(
            f"--blocks {len(layers) // steps} at each of {steps} steps are {len(layers)} layers, "
            f"and {original.name} has {sizes.layers}: ask for fewer --blocks or --steps"
        )


def _joined(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _with_window(request: Conversion) -> Conversion:
    """An override of model.window is the length that texts are cut to, of the teacher's too."""
    key = "model.window="
    given = [each.removeprefix(key) for each in request.overrides if each.startswith(key)]
    if not given or request.max_tokens:
        return request
    if not given[-1].isdecimal():
        raise PretrainedError(f"--set {key}{given[-1]}: write a whole number")
    others = tuple(each for each in request.overrides if not each.startswith(key))
    return dataclasses.replace(request, max_tokens=int(given[-1]), overrides=others)


def find_original(model: str) -> Original:
    """A pretrained model in a folder, or one of the Hub, fetched if that can be reached."""
    folder = Path(model)
    if folder.exists() or not _HUB_NAME.fullmatch(model):
        return read_original(folder)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise PretrainedError(
            f"there is no folder {model}; to fetch a model of that name from the Hub, "
            "pip install huggingface_hub, or download it elsewhere and give its folder"
        ) from None
    wanted = ["*.json", "*.safetensors", "README.md", "1_Pooling/*"]
    try:
        fetched = snapshot_download(model, allow_patterns=wanted)
    except Exception as error:  # whatever the network and the Hub may say
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        owner = "" if "/" in model else "; most names there have an owner, as in owner/name"
        raise PretrainedError(
            f"{model} is no folder here and cannot be fetched from the Hub ({reason}){owner}: "
            "download it where there is a network and give its folder"
        ) from None
    return dataclasses.replace(read_original(Path(fetched)), name=model)


def _base(original: Original, request: Conversion, data: str) -> dict[str, Any]:
    """A recipe's table with its data read as the original reads it, the rest still as it was."""
    return (_text_base if original.decodes else _labelled_base)(original, request, data)


def _labelled_base(original: Original, request: Conversion, data: str) -> dict[str, Any]:
    recipe = load_recipe(request.recipe or "classifier", [], data)
    if recipe.data.kind != "table":
        raise PretrainedError(
            f"recipe {recipe.name!r} is not of a table of texts and labels: convert needs one"
        )
    encoder = original.encoder
    window = request.max_tokens or min(recipe.model.window, encoder.positions)
    before, behind = special_ends(original.tokenizer)
    if window <= before + behind:
        raise PretrainedError(f"--max-tokens {window}: {before + behind} of them are special")
    head, tail = recipe.data.head, recipe.data.tail
    if not 0 < head + tail <= window:
        head, tail = window - behind, behind
    table = _table(original, recipe, window, BATCH)
    table["data"] |= {"head": head, "tail": tail}
    table["model"] |= {
        "family": "encoder",
        "norm": "post",
        "final_norm": "none",
        "pool": encoder.pool,
    }
    return table


def _text_base(original: Original, request: Conversion, data: str) -> dict[str, Any]:
    """A recipe's table with its corpus in tokens of the original."""
    columns = any(one.startswith(("data.text=", "data.label=")) for one in request.overrides)
    if columns or plain_name(Path(data)).suffix.lower() in KINDS:
        raise PretrainedError(
            f"{original.name} is a decoder, which learns to go on with a text and not the labels "
            "of a table: give it a file of text, without --text and --label, or convert an encoder"
        )
    recipe = load_recipe(request.recipe or "text", [], data)
    if recipe.data.kind not in ("text", "stdlib"):
        raise PretrainedError(
            f"recipe {recipe.name!r} is not of a text to continue: to convert a decoder needs one"
        )
    sizes = original.sizes
    table = _table(original, recipe, request.max_tokens or min(WINDOW, sizes.positions), WINDOWS)
    table["model"] |= {"family": "decoder", "norm": "pre", "final_norm": "outside", "tied": False}
    return table


def _table(original: Original, recipe: Recipe, window: int, batch: int) -> dict[str, Any]:
    sizes, table = original.sizes, recipe.to_json()
    table["data"] |= {
        "tokenizer": kind_of(original.tokenizer),
        "pad_id": sizes.pad_id,
        "lowercase": False,
    }
    table["model"] |= {
        "block": "transformer",
        "heads": sizes.heads,
        "width": sizes.width,
        "hidden": sizes.hidden,
        "window": window,
        "conditioned": False,
        "T": 1.0,
        "embed_dropout": 0.0,
    }
    table["card"] = {
        "made_with": f"Layers of {original.name}"
        + (f" (licence: {original.licence})" if original.licence else "")
        + ", fine-tuned.",
        **table["card"],
    }
    table["optim"] |= {
        "epochs": 0.0,  # iterations follow from those of the request
        "batch": batch,
        "beta2": 0.999,
        "weight_decay": 0.01,
        "transport": 0.0,
        "token_dropout": 0.0,
        "smoothing": 0.0,
        "precision": "bf16",
        "schedule": "cosine",
        "final_lr": 0.02,
    }
    table["run"] |= {
        "keep": "best",
        "patience": 6,
        "evaluate_batches": 1000,
        "checkpoint_every": 100,
    }
    return table


def _train_whole(
    original: Original,
    base: dict[str, Any],
    folder: Path,
    request: Conversion,
    quiet: bool,
    begin: Begin | None,
) -> None:
    if not quiet:
        begin = _saying(f"fine-tuning {original.name}, the teacher: {folder}", begin)
    of_teacher = ("data.", "run.", "optim.class_weights")
    shared = tuple(each for each in request.overrides if each.startswith(of_teacher))
    whole = Conversion(steps=(1,), epochs=request.teacher_epochs, overrides=shared)
    layers = tuple(range(original.sizes.layers))
    _train(original, base, folder, layers, None, whole, quiet, begin)


def _train(
    original: Original,
    base: dict[str, Any],
    folder: Path,
    layers: tuple[int, ...],
    teacher: Path | None,
    request: Conversion,
    quiet: bool,
    begin: Begin | None,
) -> Recipe:
    """One run of some layers of the original."""
    table = _table_of_run(base, layers, teacher, request)
    depth = table["model"]["depth"]
    first = _overridden(table, request, original)
    dataset = open_dataset(first, original.tokenizer)
    at_once = first.optim.batch * first.optim.accumulate
    epoch = max(1, _rows(dataset, first.model.window) // at_once)
    iterations = max(1, round(request.epochs * epoch))
    table["optim"] |= {"iterations": iterations, "warmup": max(1, round(0.06 * iterations))}
    if request.rank:
        table["optim"]["endings"] = endings = _endings(request, first, iterations)
        table["optim"]["iterations"] += endings
    table["run"] = table["run"] | {"evaluate_every": max(1, min(epoch // 2, iterations))}
    recipe = _overridden(table, request, original)
    steps = max(request.steps) if request.rank else 1
    gain = float(steps) if request.rank else original.sizes.layers / len(layers)
    form = _Form(layers, gain if depth == "ode" else 0.0, steps, request.rank)
    model = _model(original, recipe, dataset, form, folder)
    train(recipe, folder, quiet, model=model, tokenizer=original.tokenizer, begin=begin)
    return recipe


def _endings(request: Conversion, first: Recipe, iterations: int) -> int:
    """The iterations in which only endings learn: a third more, unless a setting says otherwise."""
    given = {each.partition("=")[0] for each in request.overrides}
    if "optim.endings" in given:
        return first.optim.endings
    return first.optim.iterations // 4 if "optim.iterations" in given else iterations // 3


def _table_of_run(
    base: dict[str, Any],
    layers: tuple[int, ...],
    teacher: Path | None,
    request: Conversion,
) -> dict[str, Any]:
    """The recipe of one run, without how long it takes."""
    full, depth = max(request.steps), "discrete" if request.steps == (1,) else "ode"
    taught = teacher is not None
    short = sorted(set(request.steps) - {full})
    steps = {
        "full": full,
        "short": short or [1],  # which `fixed` does not take
        "schedule": "any" if short else "fixed",
        "full_probability": 0.5,
        "grow": 0.0,
    }
    if request.rank:  # a step is another function than the one before: they cannot be stretched
        steps |= {"dial": "time", "schedule": "fixed", "exits": short, "full_probability": 0.4}
    blocks = len(layers) // full if request.rank else len(layers)
    return base | {
        "model": base["model"]
        | {"layers": blocks, "depth": depth, "dropout": 0.0 if taught else 0.1},
        "steps": steps,
        "optim": base["optim"] | {"lr": 1e-4 if taught else 5e-5},
        "teacher": {"run": str(teacher) if taught else ""},
    }


def _rows(dataset: Dataset, window: int) -> int:
    """Labelled rows to train on, or windows of a text."""
    if isinstance(dataset, LabelledDataset):
        return dataset.rows_to_train
    assert isinstance(dataset, TextDataset)
    return len(dataset.train_ids) // window


def _overridden(table: dict[str, Any], request: Conversion, original: Original) -> Recipe:
    recipe = overridden(table, list(request.overrides), f"convert {original.name}")
    model = recipe.to_json()["model"]
    kept = [key for key in model if key != "dropout" and model[key] != table["model"][key]]
    if kept:
        raise PretrainedError(
            f"--set model.{kept[0]}: a conversion has the layers of {original.name} as they are: "
            "leave it out; --blocks, --steps, model.window and model.dropout can be chosen"
        )
    steps, full = recipe.steps, max(request.steps)
    if request.rank and (steps.dial, steps.method, steps.full) != ("time", "euler", full):
        raise PretrainedError(
            f'--rank needs steps.dial "time", steps.method "euler" and steps.full {full}: '
            "leave --set of those out"
        )
    return recipe


@dataclass(frozen=True, slots=True)
class _Form:
    """How layers become the depth of a model."""

    layers: tuple[int, ...]
    gain: float  # 0: one pass
    steps: int  # that the layers are of
    rank: int


def _model(
    original: Original, recipe: Recipe, dataset: Dataset, form: _Form, folder: Path
) -> ConvertedTransformer:
    import torch

    torch.manual_seed(recipe.run.seed)  # a readout that is new
    model = converted(
        original,
        dataset.sizes.classes,
        recipe.model.window,
        form.layers,
        form.gain,
        recipe.model.dropout,
        form.steps,
        form.rank,
        max(1, form.rank // ENDINGS) if form.rank else 0,
        dataset.labels,
    )
    if (folder / STATE).is_file():
        kept = read_facts(folder).get("pretrained")
        if kept != model.origin:
            raise RunError(f"{folder} holds a run of another conversion: choose another --out")
        return model
    teacher = Path(recipe.teacher.run) if recipe.teacher.run else None
    if teacher is not None:
        _start_from_teacher(model, teacher, form.layers)
    if form.rank:
        stack = converted(
            original,
            dataset.sizes.classes,
            recipe.model.window,
            form.layers,
            labels=dataset.labels,
        ).eval()
        if teacher is not None:
            _start_from_teacher(stack, teacher, form.layers)
        rows = (dataset.batch(i, recipe.optim.batch, 0).inputs[0] for i in range(SEEN))
        begin_with_layers(model, stack, rows)
    return model


def _start_from_teacher(model: ConvertedTransformer, folder: Path, layers: tuple[int, ...]) -> None:
    """Begin with the fine-tuned layers, embedding and readout, where the teacher has the same."""
    taught = load_run(folder).model
    if not isinstance(taught, ConvertedTransformer):
        return
    mine, theirs = model.origin, taught.origin
    if any(mine.get(key) != theirs.get(key) for key in ("encoder", "decoder", "window")):
        return
    model.embed.load_state_dict(taught.embed.state_dict())
    model.head.load_state_dict(taught.head.state_dict())
    kept = theirs["layers"][: len(theirs["layers"]) // theirs.get("steps", 1)]
    places = {layer: i for i, layer in enumerate(kept)}
    blocks: Any = model.velocity.blocks
    others: Any = taught.velocity.blocks
    for block, layer in zip(blocks, layers, strict=False):
        if layer in places:
            block.load_state_dict(others[min(places[layer], len(others) - 1)].state_dict())
