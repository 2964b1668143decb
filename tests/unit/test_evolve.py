"""Evolved attention against the direct product, and the blocks made of it."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from tests.traced import check_trace
from train.blocks import RandomFeedForward, RandomLinear, rotation
from train.families import (
    EvolvedAttention,
    EvolvedBlock,
    EvolvedLayer,
    EvolvedStack,
    EvolvingLogits,
)

Kind = Literal["full", "random"]
WIDTH, HEADS, DEPTH, HIDDEN = 8, 2, 3, 16


def evolved(
    feedforward: Kind = "full", depth: int = DEPTH, causal: bool = False, memory: bool = False
) -> EvolvedBlock:
    torch.manual_seed(0)
    return EvolvedBlock(WIDTH, HEADS, depth, HIDDEN, feedforward, causal=causal, memory=memory)


def published(
    logits: EvolvingLogits, x: Tensor, y: Tensor, layer: int, unit: float = math.pi / 64
) -> Tensor:
    """The probabilities (B, H, N, M) of the published formula, head by head, all four terms."""
    D, H = logits.width, logits.heads
    w_query, w_key = logits.query.weight.T, logits.key.weight.T  # (D + T, D + T): x @ w
    times = w_query.shape[0] - D
    x_angle = (layer + 1) * unit
    waves = [math.sin(p * x_angle) for p in range(times // 2)]
    waves += [math.cos(p * x_angle) for p in range(times // 2)]
    time = logits.wave_scales[layer] * torch.tensor(waves, dtype=x.dtype)  # (T,)
    query, key = x @ w_query[:D], y @ w_key[:D]  # (B, N, D + T)
    a1 = key @ w_query[D:].T  # (B, M, T)
    a2 = query @ w_key[D:].T  # (B, N, T)
    a3 = (w_query[D:] * w_key[D:]).sum(1)  # (T,)
    heads = []
    for h in range(H):
        E, own = (D + times) // H, slice(h * times // H, (h + 1) * times // H)
        part = slice(h * E, (h + 1) * E)
        a0 = query[..., part] @ key[..., part].transpose(1, 2) / E**0.5
        column = (a1[..., own] @ time[own])[:, None, :]
        row = (a2[..., own] @ time[own])[:, :, None]
        heads.append(a0 + column + row + a3[own] @ time[own] ** 2)
    return torch.stack(heads, 1).softmax(-1)


@pytest.mark.parametrize("time_width", [0, 3])
def test_attention_is_that_of_the_published_formula_at_every_depth(time_width: int) -> None:
    torch.manual_seed(0)
    logits = EvolvingLogits(WIDTH, HEADS, 6, time_width).double()
    with torch.no_grad():
        for scales in logits.wave_scales:  # larger than at the start, so that differences show
            scales.mul_((len(scales) / HEADS) ** 0.5)
    x, y = torch.randn(2, 5, WIDTH).double(), torch.randn(2, 7, WIDTH).double()
    origin = logits.begin(x, y, None)
    seen = [logits.evolve(origin, layer).softmax(-1) for layer in range(6)]
    for layer in range(6):
        expected = published(logits, x, y, layer)
        torch.testing.assert_close(seen[layer], expected, atol=1e-8, rtol=0)
        other = published(logits, x, y, layer, unit=math.pi / 32)
        assert float((seen[layer] - other).detach().abs().max()) > 0.001
    assert float((seen[0] - seen[5]).detach().abs().max()) > 0.05


def test_the_numbers_of_two_heads_are_those_worked_out_by_hand() -> None:
    """Width 2, two heads, one wave each: T(1) = w * (sin 0, cos 0) = (0, 2) with w = (5, 2).

    Rows of the weights are what a product gives, columns what it reads: two of x, two of T.
    """
    logits = EvolvingLogits(2, 2, 1).double()
    with torch.no_grad():
        logits.query.weight.copy_(
            torch.tensor([[1, 0, 7, 1], [0, 1, 7, 0], [1, 1, 7, 3], [0, 0, 7, -1]])
        )
        logits.key.weight.copy_(
            torch.tensor([[1, 0, 3, 3], [2, 0, 3, 3], [0, 1, 3, 3], [0, 1, 3, 3]])
        )
        logits.wave_scales[0].copy_(torch.tensor([5.0, 2.0]))
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]).double()
    # Q = [1 0 1 0], [0 1 1 0]; K = [1 2 0 0], [0 0 1 1]; A1 of the second wave: K (1, 0, 3, -1).
    head0 = torch.tensor([[1 / 2**0.5, 0.0], [2 / 2**0.5, 0.0]])  # its slice of T is 0
    head1 = torch.tensor([[0.0, 1 / 2**0.5], [0.0, 1 / 2**0.5]]) + 2 * torch.tensor([1.0, 2.0])
    expected = torch.stack([head0, head1])[None].double()
    found = logits.evolve(logits.begin(x, x, None), 0)
    torch.testing.assert_close(found, expected)


# What the layers of the released code give to `waves(201, 1, 3, 4)` at depths 1 and 2, with the
# weights of the test below; its own text was run, with torch in place of TensorFlow.
RELEASED = (
    (
        (0.66809076, 0.83066416, 0.60256323, 0.0910674),
        (0.69786118, 0.97241563, 0.78962781, 0.23546569),
        (0.62867485, 0.79006392, 0.57987359, 0.09695965),
    ),
    (
        (0.76184536, -0.1514268, -0.99348056, -1.3682849),
        (0.22421458, 0.15611162, 0.01458692, -0.13379824),
        (0.72640959, -0.16457669, -0.97815997, -1.33169934),
    ),
)


def waves(start: int, *shape: int) -> Tensor:
    """Numbers that look like none of a model, the same everywhere."""
    places = torch.arange(start, start + math.prod(shape)).double()
    return torch.sin(places * 0.7).view(shape)


def test_attention_gives_the_numbers_of_the_released_code() -> None:
    width, heads = 4, 2
    logits = EvolvingLogits(width, heads, len(RELEASED)).double()
    x = waves(201, 1, 3, width)
    with torch.no_grad():
        logits.query.weight.copy_(waves(1, 2 * width, 2 * width))
        logits.key.weight.copy_(waves(101, 2 * width, 2 * width))
        origin = logits.begin(x, x, None)
        for layer, numbers in enumerate(RELEASED):
            start = 300 + 100 * layer
            logits.wave_scales[layer].copy_(waves(start, width))
            attention = EvolvedAttention(width, heads).double()
            attention.norm.weight.copy_(waves(start + 10, width))
            attention.norm.bias.copy_(waves(start + 20, width))
            attention.norm.eps = 1e-3  # that of Keras
            attention.out.weight.copy_(waves(start + 30, width, width).T)
            found = attention(logits.evolve(origin, layer), x)
            expected = torch.tensor([numbers]).double()
            torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)


def test_the_first_layer_of_a_block_is_what_its_formula_says() -> None:
    block = evolved()
    x = torch.randn(2, 5, WIDTH)
    layer = block.layers[0]
    assert isinstance(layer, EvolvedLayer)
    weights = published(block.logits, x, x, 0)  # (B, H, N, N)
    values = layer.attention.norm(x).view(2, 5, HEADS, -1)
    mixed = torch.einsum("bhnm,bmhd->bnhd", weights, values).reshape(2, 5, WIDTH)
    h = x + mixed @ layer.attention.out.weight.T
    expected = h + layer.feedforward(layer.norm(h))
    origin = block.logits.begin(x, x, None)
    torch.testing.assert_close(layer(x, block.logits.evolve(origin, 0)), expected)


def test_dropout_of_attention_is_of_queries_and_keys_and_in_training_only() -> None:
    torch.manual_seed(0)
    logits = EvolvingLogits(WIDTH, HEADS, 1, dropout=0.5)
    x = torch.randn(1, 400, WIDTH)
    dropped, whole = logits.begin(x, x, None), logits.eval().begin(x, x, None)
    assert torch.equal(logits.begin(x, x, None).logits, whole.logits)
    for one, other in ((dropped.logits, whole.logits), (dropped.columns, whole.columns)):
        assert not torch.allclose(one, other)
        ratio = (one * other).sum() / (other * other).sum()
        assert float(ratio.detach()) == pytest.approx(1, abs=0.2)  # its mean is kept


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


def test_rotations_are_waves_of_the_depth_and_every_layer_has_its_own_depth() -> None:
    width, seen = 6, []
    for depth in (1, 2, 5):
        torch.manual_seed(0)
        made = rotation(width, depth)
        torch.manual_seed(0)
        drawn = torch.randn(width, width // 2)
        for row in range(width):
            for p in range(width // 2):
                angle = depth * math.pi / width * p * width * float(drawn[row, p])
                pair = float(made[row, p]), float(made[row, width // 2 + p])
                wave = math.sin(angle) / width**0.5, math.cos(angle) / width**0.5
                assert pair == pytest.approx(wave, abs=1e-5)
        seen.append(made)
    assert not torch.allclose(seen[0], seen[1])
    depths: list[int] = []

    class Noting(RandomFeedForward):
        def __init__(self, width: int, hidden: int, depth: int) -> None:
            depths.append(depth)
            super().__init__(width, hidden, depth)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.families.RandomFeedForward", Noting)
        evolved("random", depth=3)
    assert depths == [1, 2, 3]


def test_waves_and_rotations_begin_as_in_the_released_code() -> None:
    """Uniform within the root of 6 over how many there are: of a block's waves, of a diagonal."""
    torch.manual_seed(0)
    logits = EvolvingLogits(512, 8, 2)
    layer = RandomLinear(512, 2048, 1)
    for values in (*logits.wave_scales, layer.diagonal):
        most = float(values.detach().abs().max())
        assert len(values) == 512 and 0.97 * (6 / 512) ** 0.5 < most <= (6 / 512) ** 0.5
        assert float(values.detach().std()) == pytest.approx((2 / 512) ** 0.5, rel=0.1)


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


@pytest.mark.long
def test_a_block_exports() -> None:
    def inputs(B: int, N: int, S: int) -> tuple[Tensor, ...]:
        mask = torch.ones(B, S).bool()
        mask[-1, -2:] = False
        return torch.randn(B, N, WIDTH), torch.randn(B, S, WIDTH), mask

    check_trace(Traced(), inputs(2, 3, 4), [[0, 1]] * 3, inputs(3, 7, 5))
