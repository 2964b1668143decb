"""The manifest of a bundle before anything is measured, and its model card."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from export.inspect import (
    depth_in_words,
    flat_in_words,
    input_in_words,
    metric_in_words,
    range_in_words,
    shape_in_words,
)
from export.trace import Traced
from serve.bundle import (
    LABELLING,
    AgainstFp32,
    Cache,
    Depth,
    ImageInput,
    InputSpec,
    Manifest,
    PointsInput,
    Precision,
    Quality,
    Rung,
    Shape,
    StepFiles,
    TextInput,
    TokenizerSpec,
    Truncation,
    Verified,
    rounds,
    steps_in_words,
)
from train.data.arrays import ImageDataset
from train.data.batch import Dataset
from train.data.text import BEGIN, END
from train.model import PAD_ID, Stepped, count_parameters
from train.ode import method_named
from train.otify import OtifiedTransformer
from train.pretrained import ConvertedTransformer
from train.recipe import DataConfig, ModelConfig, Recipe

WEIGHTS, TOKENIZER = "weights.bin", "tokenizer.json"
STEP_FILES = StepFiles("embed.onnx", "step.onnx", "head.onnx")
UNMEASURED = Verified(0.0, 0.0, 0.0)
UNCOMPARED = AgainstFp32(1.0, 0.0, 1)


def draft_manifest(
    name: str,
    recipe: Recipe,
    model: Stepped,
    traced: Traced,
    dataset: Dataset,
    ladder: tuple[int, ...],
    method: str,
    precision: Precision,
    card: dict[str, Any],
    iteration: int,
    cache: Cache = "none",
    digest: str | None = None,  # of the data it was trained on
) -> Manifest:
    """The manifest with quality and verification still open."""
    c, classifies = recipe.model, traced.task in LABELLING
    translates = traced.task == "translate"
    return Manifest(
        name=name,
        task=traced.task,
        precision=precision,
        method=method,  # type: ignore[arg-type]  # the manifest checks it
        T=1.0 if model.discrete else model.T,
        full_steps=ladder[-1],
        default_steps=ladder[-1],
        dial=model.dial,
        grid_steps=traced.graph.grid_steps,
        depth=_depth(model),
        cache=cache,
        input=_input(recipe, dataset, classifies),
        target_max_tokens=c.target_window if translates else None,
        labels=dataset.labels if classifies else None,
        tokenizer=_tokenizer(recipe.data, dataset.tokenizer, translates, _end_of(model)),
        shape=_shape(recipe.model, model, traced),
        weights=WEIGHTS,
        rungs=_rungs(traced, ladder, method, model.discrete, rounds(precision, cache)),
        step=step_files(traced),
        embedding=traced.width if traced.embeds else None,
        card=card,
        provenance={
            "recipe": _without_paths(recipe).to_json(),
            "data_sha256": digest,
            "iteration": iteration,
            "torch": torch.__version__,
        },
    )


def _shape(config: ModelConfig, model: Stepped, traced: Traced) -> Shape:
    """As the caches have it, or the model says: what was otified is not described by a recipe."""
    caches, parameters = traced.caches, count_parameters(model)
    if caches is not None:
        state = None
        if traced.step is not None and traced.step.injected is not None:
            state = 2 * traced.width
        return Shape(caches.pairs, caches.heads, caches.head_width, traced.width, parameters, state)
    blocks, heads = config.layers, config.heads
    if isinstance(model, OtifiedTransformer):
        blocks, heads = model.blocks, model.heads
    return Shape(blocks, heads, max(1, traced.width // heads), traced.width, parameters)


def _without_paths(recipe: Recipe) -> Recipe:
    """The recipe without where files were on the machine of the training."""
    data, teacher = recipe.data, recipe.teacher
    tokenizer = Path(data.tokenizer_file).name
    return dataclasses.replace(
        recipe,
        data=dataclasses.replace(data, path="", tokenizer_file=tokenizer),
        teacher=dataclasses.replace(teacher, run=Path(teacher.run).name),
    )


def step_files(traced: Traced) -> StepFiles | None:
    """The graphs of one step that a bundle has."""
    if traced.step is None:
        return None
    return dataclasses.replace(STEP_FILES, endings=traced.graph.endings > 0)


def graph_name(steps: int) -> str:
    return f"steps-{steps}.onnx"


def encoder_name(steps: int) -> str:
    return f"encoder-{steps}.onnx"


def _depth(model: Stepped) -> Depth:
    return "fixed" if model.depth == "discrete" else model.depth


def _rungs(
    traced: Traced, ladder: tuple[int, ...], method: str, fixed: bool, rounds: bool
) -> tuple[Rung, ...]:
    unknown = Quality("accuracy" if traced.task in LABELLING else "loss", 0.0, 0.0, 0.0, 1)
    a_step = 1 if fixed else method_named(method).evaluations
    return tuple(
        Rung(
            steps,
            method,  # type: ignore[arg-type]  # the manifest checks it
            traced.velocities * steps * a_step,
            None,  # named when the qualities are known
            graph_name(steps),
            unknown,
            UNMEASURED,
            encoder_name(steps) if traced.encoder else None,
            against_fp32=UNCOMPARED if rounds else None,
        )
        for steps in ladder
    )


def _end_of(model: Stepped) -> int | None:
    """The token with which texts of a pretrained decoder end, if it has one."""
    origin = model.origin if isinstance(model, ConvertedTransformer) else {}
    found: int | None = origin.get("decoder", {}).get("eos_id")
    return found


def _input(recipe: Recipe, dataset: Dataset, classifies: bool) -> InputSpec:
    sizes, window = dataset.sizes, recipe.model.window
    if isinstance(dataset, ImageDataset):
        return ImageInput(
            channels=sizes.channels,
            height=sizes.height,
            width=sizes.width,
            mean=dataset.mean,
            std=dataset.std,
        )
    if sizes.dimensions:
        return PointsInput(max_points=window, dimensions=sizes.dimensions)
    if not classifies:
        return TextInput(max_tokens=window)
    if sizes.length:
        return TextInput(max_tokens=sizes.length, exact=True)
    head, tail = recipe.data.head, recipe.data.tail
    cut = Truncation(head, tail) if head + tail else Truncation(window, 0)
    return TextInput(max_tokens=window, truncation=cut)


def _tokenizer(
    data: DataConfig, tokenizer: Tokenizer | None, translates: bool, eos_id: int | None
) -> TokenizerSpec | None:
    if tokenizer is None:
        return None
    size = tokenizer.get_vocab_size()
    if not translates:
        return TokenizerSpec(data.tokenizer, TOKENIZER, data.pad_id, size, eos_id=eos_id)
    marks = (tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END))
    return TokenizerSpec("bpe", TOKENIZER, PAD_ID, size, *marks)


# The model card of a bundle: README.md, written from the manifest alone.


def model_card(manifest: Manifest) -> str:
    m = manifest
    metric, heads = m.rungs[0].quality.metric, m.shape.heads
    whole = any(rung.quality.exact is not None for rung in m.rungs)
    title = str(m.card.get("title") or m.name)
    lines = [
        f"# {m.name}: {title}",
        "",
        str(m.card.get("description", "")),
        "",
        f"{depth_in_words(m)} {m.shape.parameters:,} parameters, {shape_in_words(m)}, "
        f"{heads} head{'' if heads == 1 else 's'}, {input_in_words(m)}, {m.precision_in_words}.",
        "",
        f"| steps | effort | evaluations | {metric_in_words(metric)} | 95 % interval |"
        f"{' rows all right |' if whole else ''} default |",
        f"|---:|---|---:|---:|---|{'---:|' if whole else ''}---|",
    ]
    for rung in m.rungs:
        q = rung.quality
        default = "yes" if rung.steps == m.default_steps else ""
        lines.append(
            f"| {rung.steps} | {rung.effort or ''} | {rung.nfe} | {_number(metric, q.value)} | "
            f"{_number(metric, q.low)} to {_number(metric, q.high)} | "
            f"{f'{100 * (q.exact or 0):.2f} % | ' if whole else ''}{default} |"
        )
    samples = m.rungs[0].quality.samples
    unit = "tokens" if metric == "loss" else "positions" if m.task == "tag" else "rows"
    lines += ["", f"Measured on {samples:,} held-out {unit}, in the runtime that serves.", ""]
    if (found := range_in_words(m)) is not None:
        lines += [f"{found[0].upper()}{found[1:]}.", ""]
    if (flat := flat_in_words(m)) is not None:
        lines += [flat, ""]
    beyond = [rung.steps for rung in m.rungs if m.grid_steps and rung.steps > m.grid_steps]
    if beyond:
        lines += [
            f"Trained to {steps_in_words(m.grid_steps or 0)}; what {steps_in_words(beyond[-1])} do "
            "was measured like the rest.",
            "",
        ]
    if m.labels:
        lines += [f"Labels: {', '.join(m.labels)}.", ""]
    for key, heading in (
        ("data", "Data"),
        ("baselines", "Measured beside it"),
        ("intended_use", "Intended use"),
        ("precision", "Precision"),
        ("limits", "Limits"),
        ("license", "Licence"),
        ("made_with", "Made with"),
    ):
        if m.card.get(key):
            lines += [f"## {heading}", "", str(m.card[key]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _number(metric: str, value: float) -> str:
    return f"{value:.4f}" if metric == "loss" else f"{100 * value:.2f} %"
