"""Every dropout of a paper is where it should be: alone, it changes answers in training only."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.blocks import Attention, Block, FeedForward, RelativeAttention
from train.families import EvolvedBlock, EvolvedLayer, EvolvingLogits, PooledByAttention
from train.model import CrossAttention, CrossBlock, Embedding, PooledHead

WIDTH, HEADS, SHARE = 16, 2, 0.5
X = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))
MEMORY = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
THERE = torch.ones(2, 5, dtype=torch.bool)
TOKENS = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]])

PLACES: dict[str, tuple[Callable[[float], nn.Module], tuple[Tensor, ...]]] = {
    "attention": (lambda share: Attention(WIDTH, HEADS, False, share), (X,)),
    "relative attention": (lambda share: RelativeAttention(WIDTH, HEADS, False, 3, share), (X,)),
    "attention to a source": (
        lambda share: CrossAttention(WIDTH, HEADS, share),
        (X, MEMORY, THERE),
    ),
    "attention of a block": (
        lambda share: Block(WIDTH, HEADS, 0, False, "pre", attention_dropout=share),
        (X,),
    ),
    "what a block attends to, pre-norm": (
        lambda share: Block(WIDTH, HEADS, 0, False, "pre", share),
        (X,),
    ),
    "what a block attends to, post-norm": (
        lambda share: Block(WIDTH, HEADS, 0, False, "post", share),
        (X,),
    ),
    "activations": (
        lambda share: Block(WIDTH, HEADS, 32, False, "pre", activation_dropout=share),
        (X,),
    ),
    "embeddings": (lambda share: Embedding(9, 4, WIDTH, None, share), (TOKENS,)),
    "embeddings with padding": (lambda share: Embedding(9, 4, WIDTH, 0, share), (TOKENS,)),
    "before pooling by attention": (
        lambda share: PooledByAttention(WIDTH, HEADS, 3, "pre", False, share),
        (X,),
    ),
}


def same(made: nn.Module, given: tuple[Tensor, ...]) -> bool:
    """Whether two passes give the same."""
    outs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        out = made(*given)
        outs.append(out[0] if isinstance(out, tuple) else out)
    return torch.equal(*outs)


@pytest.mark.parametrize("place", PLACES)
def test_it_drops_in_training_only(place: str) -> None:
    make, given = PLACES[place]
    assert not same(make(SHARE).train(), given)
    assert same(make(SHARE).eval(), given)
    assert same(make(0.0).train(), given)


@pytest.mark.parametrize(
    "block",
    [
        Block(WIDTH, HEADS, 32, False, "pre", 1.0),
        Block(WIDTH, HEADS, 32, False, "none", 1.0),
        CrossBlock(WIDTH, HEADS, 32, "pre", 1.0),
        CrossBlock(WIDTH, HEADS, 32, "none", 1.0),
    ],
)
def test_where_all_that_is_added_to_a_skip_drops_out_a_block_changes_nothing(
    block: nn.Module,
) -> None:
    given = (X, MEMORY, THERE) if isinstance(block, CrossBlock) else (X,)
    assert torch.equal(block.train()(*given), X)
    assert not torch.allclose(block.eval()(*given), X)


@pytest.mark.parametrize("cross", [False, True])
def test_after_norms_too_all_that_is_added_to_a_skip_may_drop_out(cross: bool) -> None:
    block: nn.Module = Block(WIDTH, HEADS, 32, False, "post", 1.0)
    if cross:
        block = CrossBlock(WIDTH, HEADS, 32, "post", 1.0)
    left = X
    for _ in range(3 if cross else 2):
        left = F.layer_norm(left, (WIDTH,))
    given = (X, MEMORY, THERE) if cross else (X,)
    torch.testing.assert_close(block.train()(*given), left)


@pytest.mark.parametrize("memory", [False, True])
def test_a_layer_of_an_evolved_block_drops_all_that_it_adds(memory: bool) -> None:
    layer = EvolvedLayer(WIDTH, HEADS, FeedForward(WIDTH, 32), memory, 1.0).train()
    given = (torch.zeros(2, HEADS, 6, 5), MEMORY) if memory else ()
    assert torch.equal(layer(X, torch.zeros(2, HEADS, 6, 6), *given), X)


@pytest.mark.parametrize(
    "head",
    [
        PooledHead(WIDTH, 3, False, "mean", 1.0),
        PooledByAttention(WIDTH, HEADS, 3, "pre", False, 1.0),
    ],
)
def test_where_all_that_is_pooled_drops_out_a_head_has_its_bias_left(
    head: PooledHead | PooledByAttention,
) -> None:
    assert torch.equal(head.train()(X), head.linear.bias.expand(2, 3))


def test_evolved_blocks_drop_queries_and_keys() -> None:
    for share in (0.0, SHARE):
        made = EvolvedBlock(
            WIDTH, HEADS, 2, 32, "full", causal=False, memory=False, attention_dropout=share
        )
        drops = [one.p for one in made.modules() if isinstance(one, nn.Dropout)]
        logits = [one for one in made.modules() if isinstance(one, EvolvingLogits)]
        assert logits and all(one.drop.p == share for one in logits)
        assert sorted(set(drops)) == sorted({0.0, share})
