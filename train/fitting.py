"""Whether a model that was made elsewhere can be trained as a recipe says, on its data.

Knows sizes; not what the model does with them.
"""

import torch
from torch import Tensor

from train.batch import Dataset
from train.config import Recipe
from train.model import Stepped


def check_fits(model: Stepped, dataset: Dataset, recipe: Recipe) -> None:
    """Refuse a model that was made for data of other sizes, or another depth than is trained."""
    if model.depth != recipe.model.depth:
        raise ValueError(
            f"the model has depth {model.depth!r}, but the recipe trains {recipe.model.depth!r}: "
            f'set model.depth to "{model.depth}"'
        )
    sizes = dataset.sizes
    try:
        with torch.no_grad():
            answers = model(*_longest_row(dataset, recipe.model.window)).logits.shape[-1]
    except (IndexError, RuntimeError, ValueError) as error:
        raise ValueError(f"the model cannot read this data, of {sizes}: {error}") from None
    if answers != (sizes.classes or sizes.vocabulary):
        raise ValueError(f"the model has {answers} answers, but the data is of {sizes}")
    pad = getattr(getattr(model, "embed", None), "pad_id", sizes.pad_id)
    if sizes.vocabulary and sizes.classes and pad != sizes.pad_id:
        raise ValueError(
            f"the data pads with id {sizes.pad_id}, the model with {pad}: set pad_token_id"
        )


def _longest_row(dataset: Dataset, window: int) -> tuple[Tensor, ...]:
    """Inputs of one row; a labelled text as long as one may be."""
    inputs = dataset.batch(0, 1, 0).inputs
    if len(inputs) > 1 or inputs[0].dtype != torch.int64:
        return inputs
    (tokens,) = inputs  # (1, N)
    return (tokens.repeat(1, -(-window // tokens.shape[1]))[:, :window],)
