"""The manifest of a bundle before anything is measured: what the model is and what it takes.

Knows recipes, data sets and traced models; quality and verification are filled in later.
"""

import dataclasses
from typing import Any

import torch
from tokenizers import Tokenizer

from export.parts import Traced
from serve.bundle import (
    LABELLING,
    AgainstFp32,
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
)
from train.data.arrays import ImageDataset
from train.data.batch import Dataset
from train.data.text import BEGIN, END
from train.model import PAD_ID, Stepped, count_parameters
from train.ode import method_named
from train.otify import OtifiedTransformer
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
    small_caches: bool = False,
) -> Manifest:
    """The manifest with quality and verification still open."""
    c, classifies = recipe.model, traced.task in LABELLING
    translates = traced.task == "translate"
    kept = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, path=""))
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
        cache="kv_int8" if small_caches else traced.cache,
        input=_input(recipe, dataset, classifies),
        target_max_tokens=c.target_window if translates else None,
        labels=dataset.labels if classifies else None,
        tokenizer=_tokenizer(recipe.data, dataset.tokenizer, translates),
        shape=_shape(recipe.model, model, traced),
        weights=WEIGHTS,
        rungs=_rungs(traced, ladder, method, model.discrete, precision != "fp32" or small_caches),
        step=step_files(traced),
        card=card,
        provenance={
            "recipe": kept.to_json(),
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


def step_files(traced: Traced) -> StepFiles | None:
    """The graphs of one step that a bundle has."""
    return None if traced.step is None else STEP_FILES


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
    head, tail = recipe.data.head, recipe.data.tail
    cut = Truncation(head, tail) if head + tail else Truncation(window, 0)
    return TextInput(max_tokens=window, truncation=cut)


def _tokenizer(
    data: DataConfig, tokenizer: Tokenizer | None, translates: bool
) -> TokenizerSpec | None:
    if tokenizer is None:
        return None
    size = tokenizer.get_vocab_size()
    if not translates:
        return TokenizerSpec(data.tokenizer, TOKENIZER, data.pad_id, size)
    marks = (tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END))
    return TokenizerSpec("bpe", TOKENIZER, PAD_ID, size, *marks)
