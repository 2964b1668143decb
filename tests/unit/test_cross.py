"""Blocks with a memory: what they may and may not see."""

from typing import get_args

import pytest
import torch

from train.blocks import Norm
from train.model import CrossAttention, CrossBlock

WIDTH, HEADS, HIDDEN = 8, 2, 16


def block(norm: Norm = "pre", hidden: int = HIDDEN) -> CrossBlock:
    torch.manual_seed(0)
    return CrossBlock(WIDTH, HEADS, hidden, norm)


@pytest.mark.parametrize("hidden", [HIDDEN, 0])
@pytest.mark.parametrize("norm", get_args(Norm))
def test_neither_the_future_nor_the_padding_of_the_memory_is_seen(norm: Norm, hidden: int) -> None:
    made = block(norm, hidden)
    x, memory = torch.randn(2, 6, WIDTH), torch.randn(2, 5, WIDTH)
    mask = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    out = made(x, memory, mask)
    assert out.shape == x.shape
    torch.testing.assert_close(made(x[:, :4], memory, mask), out[:, :4])
    torch.testing.assert_close(made(x[:1], memory[:1, :3]), out[:1])
    torch.testing.assert_close(made(x[1:], memory[1:]), out[1:])
    assert not torch.allclose(made(x, torch.randn(2, 5, WIDTH), mask), out)


def test_attention_to_a_memory_of_one_position_returns_its_value() -> None:
    attention = CrossAttention(WIDTH, HEADS)
    memory = torch.randn(2, 1, WIDTH)
    value = attention.kv(memory)[..., WIDTH:]
    expected = attention.out(value).expand(2, 4, WIDTH)
    torch.testing.assert_close(attention(torch.randn(2, 4, WIDTH), memory), expected)


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="width 8 is not a multiple of heads 3"):
        CrossBlock(8, 3, 16)
