"""The dataset of a recipe. Its batches are a function of (seed, iteration): a run can resume
anywhere.
"""

import dataclasses
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from train.data import generators
from train.data.arrays import ImageDataset, PointDataset
from train.data.batch import Dataset
from train.data.labelled import LabelledDataset, PairDataset
from train.data.logic import PuzzleDataset
from train.data.tables import DataError, Rows, divide, read_table
from train.data.tags import TagDataset, Tagged, read_tags
from train.data.text import (
    Corpus,
    StreamDataset,
    TextDataset,
    divided,
    pieces,
    plain,
    read_corpus,
)
from train.recipe import DataConfig, ModelConfig, Recipe

_log = logging.getLogger("stepdial")


def open_dataset(recipe: Recipe, tokenizer: Tokenizer | None = None) -> Dataset:
    """The dataset of a recipe; a resumed run passes the tokenizer that it kept."""
    data, model = recipe.data, recipe.model
    if tokenizer is not None:
        tokenizer = plain(tokenizer)
    check_window(data, model)
    if data.kind == "text":
        return TextDataset(read_corpus(data), data, model.window, tokenizer)
    if data.kind == "stream":
        return StreamDataset(data, model.window, tokenizer)
    if data.kind == "stdlib":
        return TextDataset(generators.stdlib_text(), data, model.window, tokenizer)
    if data.kind == "images":
        return ImageDataset(data, recipe.run.seed)
    if data.kind == "points":
        return PointDataset(data, model.window, recipe.run.seed)
    if data.kind == "pairs":
        return PairDataset(data, model.window, model.target_window, tokenizer, recipe.run.seed)
    if data.kind == "logic":
        return PuzzleDataset(data, tokenizer)
    if model.family == "tagger":
        tagged, others = _tagged_rows(data, recipe.run.seed)
        root_only = data.kind == "listops"  # what is asked; its parts are learnt beside it
        return TagDataset(
            tagged, others, data, model.window, tokenizer, recipe.run.seed, first_only=root_only
        )
    train, test = _labelled_rows(data, recipe.run.seed)
    return LabelledDataset(train, test, data, model.window, tokenizer, recipe.run.seed)


def open_measured(recipe: Recipe, tokenizer: Tokenizer | None, facts: dict[str, Any]) -> Dataset:
    """The data that a trained model is measured on: of another table than its own, all rows."""
    data, labels = recipe.data, facts.get("labels")
    table = data.kind in ("table", "tags")
    if table and not data.values and labels:
        data = dataclasses.replace(data, values=data.labels or tuple(labels))
    named = table and Path(data.path).is_file()
    # A table that is named stands for itself: the test table beside it is of the run's own.
    test = "" if named else data.test
    known, alone = (dataclasses.replace(one, test=test) for one in (data, recipe.data))
    try:  # with its classes: another table need not have a row of each
        dataset = open_dataset(dataclasses.replace(recipe, data=known), tokenizer)
    except DataError as error:  # it may have others: the check below says which
        try:
            dataset = open_dataset(dataclasses.replace(recipe, data=alone), tokenizer)
        except DataError:
            raise error from None
    check_same_meaning(dataset, recipe, facts)
    if facts.get("data_sha256") in (None, dataset.digest):
        if known == data:
            return dataset
        return open_dataset(dataclasses.replace(recipe, data=data), tokenizer)
    if not named:
        _log.warning(
            "not the data it was trained on: training may have seen the rows held out here"
        )
        return dataset
    _log.warning(
        "not the data it was trained on: all its rows are measured; training may have seen some"
    )
    whole = dataclasses.replace(data, test=Path(data.path).name)
    return open_dataset(dataclasses.replace(recipe, data=whole), tokenizer)


def training_texts(recipe: Recipe) -> list[str]:
    """The texts of a table or corpus that a model learns from, without what is held out."""
    data = recipe.data
    if data.kind == "table":
        train, _ = _labelled_rows(data, recipe.run.seed)
        used, _ = divide(len(train), data.held_out, recipe.run.seed)
        return [train[i][0] for i in used]
    text = generators.stdlib_text() if data.kind == "stdlib" else read_corpus(data)
    corpus = text if isinstance(text, Corpus) else divided(text, data.held_out)
    return pieces(corpus.train)


def _tagged_rows(data: DataConfig, seed: int) -> tuple[list[Tagged], list[Tagged] | None]:
    if data.kind == "listops":
        train, test = (
            [Tagged(text.split(), generators.listops_values(text.split())) for text, _ in part]
            for part in _listops(data, seed)
        )
        return train, test
    name = data.train or "train.jsonl"
    return read_tags(data, name), read_tags(data, data.test) if data.test else None


def _labelled_rows(data: DataConfig, seed: int) -> tuple[Rows, Rows | None]:
    if data.kind == "parity":
        return generators.parity(data.longest, data.rows, seed)
    if data.kind == "listops":
        return _listops(data, seed)
    name = data.train or "train.csv"
    return read_table(data, name), read_table(data, data.test) if data.test else None


# Seconds of work, for a training and once more for its report.
_drawn = lru_cache(1)(generators.listops)


def _listops(data: DataConfig, seed: int) -> tuple[Rows, Rows]:
    return _drawn(data.longest, data.rows, seed, data.shortest, data.nesting)


def check_same_meaning(dataset: Dataset, recipe: Recipe, facts: dict[str, Any]) -> None:
    """Refuse data that a trained model would read or answer in another way than its own."""
    labels = facts.get("labels")
    if labels is not None and dataset.labels is not None and list(dataset.labels) != labels:
        raise DataError(
            f"this data has the classes {', '.join(dataset.labels)}, but the model was trained on "
            f"{', '.join(labels)}: pass data with the same classes, or train with data.values set"
        )
    if isinstance(dataset, TextDataset) and not dataset.knows_all:
        raise DataError(
            "this text has characters that the model was not trained on: pass its own data, or "
            "train with data.tokenizer=bpe"
        )
    known = facts.get("sizes")
    here = dataclasses.asdict(dataset.sizes)
    shape = ("channels", "height", "width", "dimensions")
    if known is not None and any(known.get(name, 0) != here[name] for name in shape):
        mine, theirs = (
            ", ".join(f"{name} {sizes[name]}" for name in shape if sizes.get(name))
            for sizes in (here, known)
        )
        raise DataError(
            f"this data has {mine}, but the model was trained on {theirs}: pass data of that shape"
        )
    measured = isinstance(dataset, ImageDataset) and not recipe.data.mean
    if measured and dataset.digest != facts.get("data_sha256"):
        raise DataError(
            "these are not the images it was trained on, and their mean and deviation were "
            "measured: pass the same --data, or train with data.mean and data.std set"
        )


def check_window(data: DataConfig, model: ModelConfig) -> None:
    if data.kind in ("parity", "listops") and data.longest + 2 > model.window:
        raise DataError(f"model.window {model.window} is too small for data.longest {data.longest}")
