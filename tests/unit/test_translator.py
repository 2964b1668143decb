"""Translators: what padding may not change, and that the two halves are the whole."""

from typing import Any

import pytest
import torch

from train.data.batch import Sizes
from train.model import Translator, build_model, count_parameters
from train.recipe import ModelConfig, load_recipe

SMALL: dict[str, Any] = {
    "layers": 1,
    "width": 16,
    "hidden": 32,
    "window": 8,
    "target_window": 8,
    "tied": True,
}
SOURCE = torch.tensor([[5, 6, 7, 0, 0], [5, 6, 8, 9, 4]])
TARGET = torch.tensor([[1, 5, 6, 0], [1, 7, 8, 9]])
VARIANTS: list[dict[str, Any]] = [
    {},
    {"final_norm": "inside", "norm": "post"},
    {"depth": "discrete"},
    {"depth": "discrete", "block": "runge-kutta", "scheme": "rk4"},
    {"depth": "discrete", "block": "evolved", "evolve": 2, "final_norm": "none"},
    {"conditioned": True},
]


def small(vocabulary: int = 12, **changes: Any) -> Translator:
    torch.manual_seed(0)
    config = ModelConfig("translator", **{**SMALL, **changes})
    model = build_model(config, Sizes(vocabulary=vocabulary)).eval()
    assert isinstance(model, Translator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # far from the zero velocity of a fresh model
    return model


@pytest.mark.parametrize("changes", VARIANTS)
def test_neither_padding_nor_later_tokens_change_anything(changes: dict[str, Any]) -> None:
    model = small(**changes)
    both = model(SOURCE, TARGET, steps=2)
    alone = model(SOURCE[:1, :3], TARGET[:1, :3], steps=2)
    torch.testing.assert_close(both.logits[:1, :3], alone.logits, atol=1e-5, rtol=1e-4)
    padded = model(SOURCE[:1], TARGET[:1], steps=2)
    torch.testing.assert_close(padded.cost, alone.cost, atol=1e-6, rtol=1e-4)
    longer = model(SOURCE[1:], TARGET[1:], steps=2).logits
    shorter = model(SOURCE[1:], TARGET[1:, :2], steps=2).logits
    torch.testing.assert_close(longer[:, :2], shorter, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("changes", VARIANTS)
def test_encoding_then_decoding_is_the_whole(changes: dict[str, Any]) -> None:
    model = small(**changes)
    memory = model.encode(SOURCE, 3, "midpoint")
    mask = model.mask_of(SOURCE)
    whole = model(SOURCE, TARGET, steps=3, method="midpoint").logits
    torch.testing.assert_close(model.decode(memory, mask, TARGET, 3, "midpoint"), whole)
    keep = torch.tensor([3, 0])
    kept = model.decode(memory, mask, TARGET, 3, "midpoint", keep)
    torch.testing.assert_close(kept, whole[:, keep])


def test_every_weight_learns_and_recomputing_changes_no_gradient() -> None:
    gradients = []
    for checkpoint in (False, True):
        model = small()
        model.checkpoint = checkpoint
        output = model(SOURCE, TARGET, steps=2)
        (output.logits.square().mean() + output.cost).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    kept, recomputed = gradients
    assert all(g is not None and bool(g.abs().sum() > 0) for g in kept.values())
    for name, gradient in kept.items():
        torch.testing.assert_close(gradient, recomputed[name], msg=name)


def test_the_cost_is_that_of_both_trajectories() -> None:
    model = small()
    seen: list[tuple[int, torch.Tensor]] = []
    cost = model(
        SOURCE[:1, :3],
        TARGET[:1, :3],
        steps=4,
        observe=lambda step, t, x, v: seen.append((step, v)),
    ).cost
    assert [step for step, _ in seen] == [0, 1, 2, 3] * 2
    expected = sum(v.square().mean() / 4 for _, v in seen)
    torch.testing.assert_close(cost, expected)


FULL_1 = ["model.layers=1"]
FULL_2 = ["model.layers=2", "model.evolve=3"]
RANDOM = ["model.feedforward=random"]


@pytest.mark.parametrize(
    ("name", "overrides", "millions"),
    [
        ("ode-transformer-translation", [], 61),
        ("transevolve-translation", FULL_1, 53),
        ("transevolve-translation", FULL_2, 59),
        ("transevolve-translation", [*FULL_1, *RANDOM], 27),
        ("transevolve-translation", [*FULL_2, *RANDOM], 33),
    ],
)
def test_sizes_are_those_of_the_papers(name: str, overrides: list[str], millions: int) -> None:
    recipe = load_recipe(name, overrides)
    with torch.device("meta"):
        model = build_model(recipe.model, Sizes(vocabulary=recipe.data.vocabulary))
    assert count_parameters(model) / 1e6 == pytest.approx(millions, rel=0.025)
