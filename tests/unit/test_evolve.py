"""Evolved attention against the direct product, and the blocks made of it."""

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from tests.traced import check_trace
from train.evolve import EvolvedBlock, EvolvedLayer, EvolvedStack, EvolvingLogits
from train.rotation import RandomFeedForward, RandomLinear, rotation

Kind = Literal["full", "random"]
WIDTH, HEADS, DEPTH, HIDDEN = 8, 2, 3, 16


def evolved(
    feedforward: Kind = "full", depth: int = DEPTH, causal: bool = False, memory: bool = False
) -> EvolvedBlock:
    torch.manual_seed(0)
    return EvolvedBlock(WIDTH, HEADS, depth, HIDDEN, feedforward, causal=causal, memory=memory)


@pytest.mark.parametrize("time_width", [0, 3])
def test_evolved_logits_are_the_products_of_augmented_queries_and_keys(time_width: int) -> None:
    torch.manual_seed(0)
    logits = EvolvingLogits(WIDTH, HEADS, 6, time_width).double()
    x, y = torch.randn(2, 5, WIDTH).double(), torch.randn(2, 7, WIDTH).double()
    origin = logits.begin(x, y, None)
    seen = []
    for layer in range(6):
        whole, direct = logits.evolve(origin, layer), logits.direct(x, y, layer)
        torch.testing.assert_close(whole, direct)
        seen.append(direct.softmax(-1))
        # What a row has in common is lost on softmax.
        torch.testing.assert_close(logits.evolve(origin, layer, rows=False).softmax(-1), seen[-1])
    assert not torch.allclose(seen[0], seen[5])


def test_the_first_layer_of_a_block_is_what_its_formula_says() -> None:
    block = evolved()
    x = torch.randn(2, 5, WIDTH)
    layer = block.layers[0]
    assert isinstance(layer, EvolvedLayer)
    weights = block.logits.direct(x, x, 0).softmax(-1)  # (B, H, N, N)
    values = layer.attention.norm(x).view(2, 5, HEADS, -1)
    mixed = torch.einsum("bhnm,bmhd->bnhd", weights, values).reshape(2, 5, WIDTH)
    h = x + mixed @ layer.attention.out.weight.T
    expected = h + layer.feedforward(layer.norm(h))
    origin = block.logits.begin(x, x, None)
    torch.testing.assert_close(layer(x, block.logits.evolve(origin, 0)), expected)


@pytest.mark.parametrize("feedforward", ["full", "random"])
def test_masks_hide_padding_the_future_and_the_padding_of_the_memory(feedforward: Kind) -> None:
    x = torch.randn(1, 6, WIDTH)
    mask = torch.tensor([[True] * 4 + [False] * 2])
    block = evolved(feedforward)
    torch.testing.assert_close(block(x, mask)[:, :4], block(x[:, :4]))
    causal = evolved(feedforward, causal=True)
    torch.testing.assert_close(causal(x)[:, :4], causal(x[:, :4]))
    torch.testing.assert_close(causal(x, mask)[:, :4], causal(x[:, :4]))
    decoder = evolved(feedforward, causal=True, memory=True)
    memory = torch.randn(1, 6, WIDTH)
    short = decoder(x[:, :3], memory[:, :4])
    torch.testing.assert_close(decoder(x, memory, mask)[:, :3], short)
    assert not torch.allclose(decoder(x, memory)[:, :3], short)


def test_a_random_feed_forward_learns_a_number_of_parameters_linear_in_the_width() -> None:
    def learned(width: int) -> int:
        return sum(p.numel() for p in RandomFeedForward(width, 4 * width, 1).parameters())

    assert learned(64) == 64 + 4 * 64 + 64 + 64 and learned(128) == 2 * learned(64)


def test_rotations_are_nearly_orthogonal_follow_from_the_seed_and_are_kept() -> None:
    torch.manual_seed(3)
    u = rotation(512, 2)
    product = u @ u.T * 2  # sines and cosines have a mean square of one half
    assert float((product - torch.eye(512)).abs().mean()) < 0.05
    assert float((product.diagonal() - 1).abs().mean()) < 0.05
    one, same = evolved("random"), evolved("random")
    x = torch.randn(2, 5, WIDTH)
    assert torch.equal(one(x), same(x))
    torch.manual_seed(9)
    other = EvolvedBlock(WIDTH, HEADS, DEPTH, HIDDEN, "random")
    assert not torch.allclose(other(x), one(x))
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(x), one(x))


def test_a_random_layer_is_the_product_of_its_parts() -> None:
    layer = RandomLinear(6, 10, 1)
    x = torch.randn(4, 6)
    expected = x @ layer.left @ torch.diag(layer.diagonal) @ layer.right + layer.bias
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    ("feedforward", "blocks", "millions"),
    [("full", 1, 53), ("full", 2, 59), ("random", 1, 27), ("random", 2, 33)],
)
def test_a_translator_of_the_published_shape_has_the_published_number_of_parameters(
    feedforward: Kind, blocks: int, millions: int
) -> None:
    width, tokens = 512, 32_000
    with torch.device("meta"):
        halves = [
            EvolvedBlock(width, 8, 6 // blocks, 4 * width, feedforward, memory=memory)
            for memory in (False, True)
        ]
    learned = blocks * sum(p.numel() for half in halves for p in half.parameters())
    assert (learned + tokens * width) / 1e6 == pytest.approx(millions, abs=1)


def test_gradients_reach_every_parameter() -> None:
    block = evolved("random", causal=True, memory=True)
    block(torch.randn(2, 5, WIDTH), torch.randn(2, 4, WIDTH)).square().sum().backward()
    assert all(p.grad is not None for p in block.parameters())


def test_widths_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="width 8 must be a multiple of heads 3"):
        EvolvedBlock(8, 3, 1, 8)


class Traced(nn.Module):
    """Everything that a block may have; a depth of one, since every operation takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = EvolvedStack([evolved("random", depth=1, causal=True, memory=True)])

    def forward(self, *inputs: Tensor) -> tuple[Tensor]:
        return (self.stack(*inputs),)


def test_a_block_exports() -> None:
    def inputs(B: int, N: int, S: int) -> tuple[Tensor, ...]:
        mask = torch.ones(B, S).bool()
        mask[-1, -2:] = False
        return torch.randn(B, N, WIDTH), torch.randn(B, S, WIDTH), mask

    check_trace(Traced(), inputs(2, 3, 4), [[0, 1]] * 3, inputs(3, 7, 5))
