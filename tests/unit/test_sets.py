"""Patches and sets: what a model of images or points sees, and what it must not see."""

import pytest
import torch
from torch import Tensor, nn

from train.blocks import Norm
from train.data.batch import Sizes
from train.families import (
    InducedBlock,
    InducedEmbedding,
    MultiheadBlock,
    PointEmbedding,
    PooledByAttention,
    SetVelocity,
)
from train.model import OTTransformer, PatchEmbedding, Positions, build_model
from train.recipe import load_recipe


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_patches_are_cut_in_reading_order_and_projected() -> None:
    embed = PatchEmbedding(2, 4, 6, 2, 8, first=True)
    pixels = torch.randn(3, 2, 4, 6)
    x = embed(pixels).state  # (3, 1 + 6, 8)
    assert x.shape == (3, 7, 8)
    patch = pixels[:, :, 2:4, 2:4].reshape(3, -1)  # second row, second column: patch 4 of 6
    by_hand = embed.linear(patch) + embed.positions(7)[5]
    torch.testing.assert_close(x[:, 5], by_hand)
    assert embed.first is not None
    torch.testing.assert_close(x[1, 0], embed.first[0, 0] + embed.positions(7)[0])
    assert PatchEmbedding(2, 4, 6, 2, 8, first=False)(pixels).state.shape == (3, 6, 8)


def test_places_and_the_first_token_of_images_begin_as_large_as_patches() -> None:
    torch.manual_seed(0)
    embed = PatchEmbedding(1, 64, 64, 4, 32, first=True)
    assert embed.first is not None
    assert float(embed.positions.weight.detach().std()) == pytest.approx(1, rel=0.05)
    assert float(embed.first.detach().std()) == pytest.approx(1, rel=0.4)
    words = Positions(256, 32).weight.detach()
    assert float(words.std()) == pytest.approx(0.02, rel=0.05)


def test_patches_that_do_not_fill_the_image_are_refused() -> None:
    with pytest.raises(ValueError, match=r"28 x 28 pixels: set model\.patch to a divisor"):
        PatchEmbedding(1, 28, 28, 5, 8, first=True)


def test_one_head_without_norms_is_the_formula() -> None:
    torch.manual_seed(0)
    block = MultiheadBlock(3, 5, 4, 1, "none")
    x, y = torch.randn(2, 6, 3), torch.randn(2, 7, 5)
    q, k, v = block.query(x), block.key(y), block.value(y)
    h = q + torch.softmax(q @ k.transpose(1, 2) / 4**0.5, -1) @ v
    torch.testing.assert_close(block(x, y), h + torch.relu(block.up(h)))


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
def test_without_an_outer_skip_the_layer_of_a_block_has_none(norm: Norm) -> None:
    torch.manual_seed(0)
    block = InducedBlock(8, 8, 2, 4, norm, outer_skip=False)
    x = torch.randn(2, 9, 8)
    inside = block.points.expand(2, -1, -1)
    for one, queries, others in ((block.gather, inside, x), (block.spread, x, None)):
        others = inside if others is None else others
        for module in (one.norm1, one.norm2):
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight)
        q, other = one.query(one.norm_query(queries)), one.norm_other(others)
        shares = [
            torch.softmax(a @ b.transpose(1, 2) / 8**0.5, -1) @ v
            for a, b, v in zip(
                q.split(4, -1),
                one.key(other).split(4, -1),
                one.value(other).split(4, -1),
                strict=True,
            )
        ]
        h = q + torch.cat(shares, -1)
        inside = one.norm2(torch.relu(one.up(one.norm1(h))))
    torch.testing.assert_close(block(x), inside)


def test_a_chain_of_sets_is_one_ode_for_each_induced_block() -> None:
    overrides = ["model.depth=chain", "model.width=16", "model.inducing=5", "optim.transport=0.05"]
    torch.manual_seed(0)
    config = load_recipe("modelnet", overrides).model
    chain = build_model(config, Sizes(classes=10, dimensions=3)).eval()
    assert isinstance(chain, OTTransformer) and isinstance(chain.velocity, nn.ModuleList)
    points = torch.randn(2, 12, 3)
    x = chain.embed(points).state
    for block in chain.velocity:
        assert isinstance(block, InducedBlock) and not block.spread.outer_skip
        for _ in range(3):
            x = x + block(x) / 3
    output = chain(points, steps=3)
    torch.testing.assert_close(output.logits, chain.head(x))
    assert len(output.trajectories) == 2 and output.evaluations == 6


def test_norms_stand_where_they_should() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 9, 8) * 5 + 3
    after: Tensor = InducedBlock(8, 8, 2, 4, "post")(x)
    torch.testing.assert_close(after.mean(-1), torch.zeros(2, 9), atol=1e-5, rtol=0)
    before = InducedBlock(8, 8, 2, 4, "pre")
    torch.testing.assert_close(before(x), before(x * 10), atol=1e-4, rtol=1e-4)


def model(norm: Norm = "none") -> OTTransformer:
    torch.manual_seed(0)
    return OTTransformer(
        PointEmbedding(3, 16),
        SetVelocity(2, 16, 4, 5, norm, final_norm=False),
        PooledByAttention(16, 4, 10, norm, final_norm=False, dropout=0.5),
    ).eval()


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
def test_the_order_of_points_changes_nothing(norm: Norm) -> None:
    points = torch.randn(2, 30, 3)
    shuffled = points[:, torch.randperm(30)]
    whole = model(norm)
    torch.testing.assert_close(
        whole(points, steps=3).logits, whole(shuffled, steps=3).logits, atol=1e-5, rtol=1e-4
    )
    assert whole(points[:, :7], steps=3).logits.shape == (2, 10)


def test_sizes_are_those_of_the_paper() -> None:
    """0.86M for two blocks of width 256 from the points, 0.65M for two of width 200."""
    baseline = nn.ModuleList(
        [InducedEmbedding(3, 256, 4, 16, "none"), SetVelocity(1, 256, 4, 16, "none", False)]
    )
    assert size(baseline) == 866_560
    assert size(SetVelocity(2, 200, 4, 16, "none", False)) == 649_600


def test_a_discrete_set_model_starts_with_a_block() -> None:
    points = torch.randn(2, 12, 3)
    whole = OTTransformer(
        InducedEmbedding(3, 16, 4, 5, "none"),
        SetVelocity(1, 16, 4, 5, "none", False),
        PooledByAttention(16, 4, 10, "none", False, 0.0),
        depth="discrete",
    )
    output = whole(points)
    assert output.logits.shape == (2, 10)
    output.logits.sum().backward()
    assert all(p.grad is not None for p in whole.parameters())


def test_graphs_take_any_number_of_clouds_points_and_images() -> None:
    batch, points = torch.export.Dim("batch"), torch.export.Dim("points", min=2)
    clouds = torch.randn(3, 20, 3)
    graph = torch.export.export(model(), (clouds,), dynamic_shapes=(({0: batch, 1: points},),))
    more = torch.randn(5, 33, 3)
    torch.testing.assert_close(graph.module()(more).logits, model()(more).logits)
    embed = PatchEmbedding(3, 8, 8, 4, 16, first=True)
    graph = torch.export.export(embed, (torch.randn(3, 3, 8, 8),), dynamic_shapes=({0: batch},))
    pixels = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(graph.module()(pixels).state, embed(pixels).state)
