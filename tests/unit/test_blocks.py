"""Blocks, embeddings and heads against their formulas, written out with matrices."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.blocks import (
    Attention,
    Block,
    FeedForward,
    RelativeAttention,
    initialise,
    initialise_glorot,
)
from train.data.batch import Sizes
from train.families import MultiheadBlock
from train.model import CrossBlock, Embedding, OTTransformer, PooledHead, build_model, sinusoids
from train.recipe import ModelConfig

WIDTH, HEADS, HIDDEN, N = 8, 2, 16, 5


def shaken(module: nn.Module) -> nn.Module:
    """With norms that are none of 1 and 0, so that it shows where they stand."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 0.7)
    return module.eval()


def test_post_norms_stand_after_each_skip() -> None:
    block = shaken(Block(WIDTH, HEADS, HIDDEN, False, "post"))
    assert isinstance(block, Block) and block.feedforward is not None
    x = torch.randn(2, N, WIDTH)
    y = block.norm1(x + block.attention(x))
    torch.testing.assert_close(block(x), block.norm2(y + block.feedforward(y)))

    cross = shaken(CrossBlock(WIDTH, HEADS, HIDDEN, "post"))
    assert isinstance(cross, CrossBlock) and cross.feedforward is not None
    memory = torch.randn(2, 3, WIDTH)
    y = cross.norm1(x + cross.attention(x))
    y = cross.norm2(y + cross.cross_attention(y, memory))
    torch.testing.assert_close(cross(x, memory), cross.norm3(y + cross.feedforward(y)))


def test_without_an_outer_skip_the_feed_forward_has_none() -> None:
    block = shaken(Block(WIDTH, HEADS, HIDDEN, False, "pre", outer_skip=False))
    assert isinstance(block, Block) and block.feedforward is not None
    x = torch.randn(2, N, WIDTH)
    y = x + block.attention(block.norm1(x))
    torch.testing.assert_close(block(x), block.feedforward(block.norm2(y)))


def test_a_chain_of_plain_blocks_is_one_ode_each_without_that_skip() -> None:
    torch.manual_seed(0)
    config = ModelConfig("encoder", "chain", width=WIDTH, heads=HEADS, hidden=HIDDEN, layers=2)
    model = build_model(config, Sizes(vocabulary=20, classes=3)).eval()
    assert isinstance(model, OTTransformer)
    tokens = torch.randint(1, 20, (2, N))
    start = model.embed(tokens)
    x = start.state
    assert isinstance(model.velocity, nn.ModuleList)
    for block in model.velocity:
        assert not block.outer_skip
        for _ in range(3):
            x = x + block(x, *start.context) / 3
    output = model(tokens, steps=3)
    torch.testing.assert_close(output.logits, model.head(x, *start.context))
    assert len(output.trajectories) == 2 and output.evaluations == 6


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_set_block_of_several_heads_divides_by_the_root_of_its_whole_width(heads: int) -> None:
    torch.manual_seed(0)
    block = MultiheadBlock(3, 5, WIDTH, heads, "none")
    x, y = torch.randn(2, 6, 3), torch.randn(2, 7, 5)
    q, k, v = block.query(x), block.key(y), block.value(y)
    mixed = []
    for own in torch.arange(WIDTH).view(heads, -1):
        shares = torch.softmax(q[..., own] @ k[..., own].transpose(1, 2) / WIDTH**0.5, -1)
        mixed.append(shares @ v[..., own])
    h = q + torch.cat(mixed, -1)
    torch.testing.assert_close(block(x, y), h + torch.relu(block.up(h)))


def test_activations_are_those_that_are_named() -> None:
    x = torch.linspace(-4, 4, 101)[:, None].double()
    erf = 0.5 * x * (1 + torch.erf(x / 2**0.5))
    tanh = 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))
    expected = {"gelu": tanh, "gelu-exact": erf, "relu": x.clamp(min=0)}
    for name, values in expected.items():
        layer = FeedForward(1, 1, name).double()  # type: ignore[arg-type]  # of a known set
        for linear in (layer.up, layer.down):
            nn.init.ones_(linear.weight)
            nn.init.zeros_(linear.bias)
        assert float((layer(x) - values).detach().abs().max()) < 1e-12
    assert 1e-5 < float((erf - tanh).abs().max()) < 1e-3


def test_dropouts_of_attention_and_activation_stand_where_they_should() -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        "encoder",
        width=WIDTH,
        heads=HEADS,
        hidden=HIDDEN,
        attention_dropout=0.3,
        activation_dropout=0.4,
    )
    model = build_model(config, Sizes(vocabulary=20, classes=3))
    attentions = [m for m in model.modules() if isinstance(m, Attention)]
    assert [m.dropout for m in attentions] == [0.3, 0.3]
    assert [m.drop.p for m in model.modules() if isinstance(m, FeedForward)] == [0.4, 0.4]

    # One head that attends evenly, with values of one: what is dropped of the shares is what
    # misses from their sum, and what is kept weighs more.
    attention = Attention(1, 1, False, dropout=0.5, project=False)
    nn.init.zeros_(attention.qkv.weight)
    attention.qkv.bias.data.copy_(torch.tensor([0.0, 0.0, 1.0]))
    sums = attention(torch.zeros(1, 400, 1)).detach()
    assert float(sums.std()) == pytest.approx(1 / 20, rel=0.25)  # of 400 halves, each twice 1/400
    assert float(sums.mean()) == pytest.approx(1, abs=0.02)
    assert torch.equal(attention.eval()(torch.zeros(1, 400, 1)), torch.ones(1, 400, 1))

    layer = FeedForward(1, 1000, "relu", dropout=0.5)
    nn.init.zeros_(layer.up.weight)
    nn.init.ones_(layer.up.bias)
    nn.init.ones_(layer.down.weight)
    nn.init.zeros_(layer.down.bias)
    kept = float(layer(torch.zeros(1, 1)).detach()) / 2  # each of a thousand ones, doubled
    assert kept == round(kept) and 400 < kept < 600


@pytest.mark.parametrize("causal", [False, True])
def test_relative_attention_is_its_formula(causal: bool) -> None:
    torch.manual_seed(0)
    reach, E = 2, WIDTH // HEADS
    layer = RelativeAttention(WIDTH, HEADS, causal, reach).double()
    x = torch.randn(2, 6, WIDTH).double()
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    q, k, v = (part.view(2, 6, HEADS, E) for part in layer.qkv(x).chunk(3, -1))
    found = torch.zeros(2, 6, HEADS, E).double()
    for b in range(2):
        for h in range(HEADS):
            for i in range(6):
                seen = [j for j in range(6) if mask[b, j] and (j <= i or not causal)]
                at = [max(-reach, min(reach, j - i)) + reach for j in seen]
                scores = torch.stack(
                    [
                        q[b, i, h] @ (k[b, j, h] + layer.far_keys[place]) / E**0.5
                        for j, place in zip(seen, at, strict=True)
                    ]
                )
                for share, j, place in zip(scores.softmax(0), seen, at, strict=True):
                    found[b, i, h] += share * (v[b, j, h] + layer.far_values[place])
    expected = layer.out(found.flatten(2))
    torch.testing.assert_close(layer(x, mask)[mask], expected[mask])
    assert float(layer.far_values.detach().abs().min()) > 0


def test_relative_positions_are_in_every_self_attention_of_a_translator() -> None:
    config = ModelConfig("translator", "discrete", width=WIDTH, heads=HEADS, hidden=HIDDEN, reach=3)
    model = build_model(config, Sizes(vocabulary=20))
    found = [m for m in model.modules() if isinstance(m, RelativeAttention)]
    assert [(m.reach, m.causal) for m in found] == [(3, False)] * 2 + [(3, True)] * 2
    assert not [m for m in model.modules() if isinstance(m, Attention)]


def test_sinusoids_are_of_base_ten_thousand_and_interleaved() -> None:
    table = sinusoids(50, 6)
    for position in (0, 1, 17, 49):
        for i in range(3):
            angle = position / 10_000 ** (2 * i / 6)
            pair = float(table[position, 2 * i]), float(table[position, 2 * i + 1])
            assert pair == pytest.approx((math.sin(angle), math.cos(angle)), abs=1e-5)


def test_tokens_beside_sinusoids_weigh_the_root_of_the_width() -> None:
    tokens = torch.tensor([[3, 1, 4]])
    for positions, scale in (("sinusoidal", WIDTH**0.5), ("learned", 1.0)):
        embed = Embedding(10, 5, WIDTH, None, positions=positions)
        assert embed.positions is not None
        expected = embed.tokens.weight[tokens] * scale + embed.positions.weight[:3]
        torch.testing.assert_close(embed(tokens).state, expected)


def pooled(head: PooledHead, x: Tensor, lengths: list[int]) -> Tensor:
    mask = torch.arange(x.shape[1]) < torch.tensor(lengths)[:, None]
    out: Tensor = head(x, mask)
    return out


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_padding_is_pooled_from_nowhere_even_where_all_is_negative(pool: str) -> None:
    head = PooledHead(WIDTH, 3, False, pool, 0.0)
    x = -1 - torch.rand(2, N, WIDTH)
    x[0, 3:] = 7.0  # padding
    alone = head(x[:1, :3])
    torch.testing.assert_close(pooled(head, x, [3, N])[:1], alone)
    state = x[0, :3].amax(0) if pool == "max" else x[0, :3].mean(0)
    torch.testing.assert_close(alone[0], head.linear(state))


@pytest.mark.parametrize("pool", ["mean", "max", "first"])
def test_a_norm_after_pooling_is_of_what_was_pooled(pool: str) -> None:
    config = ModelConfig(
        "encoder",
        width=WIDTH,
        heads=HEADS,
        hidden=HIDDEN,
        final_norm="pooled",
        pool=pool,  # type: ignore[arg-type]  # of a known set
    )
    model = build_model(config, Sizes(vocabulary=20, classes=3))
    head = shaken(model.head)
    assert isinstance(head, PooledHead)
    x = torch.randn(2, N, WIDTH) * 4 + 1
    state = {"mean": x.mean(1), "max": x.amax(1), "first": x[:, 0]}[pool]
    norm = head.norm_pooled
    assert isinstance(norm, nn.LayerNorm)
    expected = F.layer_norm(state, (WIDTH,), norm.weight, norm.bias)
    torch.testing.assert_close(head(x), head.linear(expected))


def test_a_head_of_more_layers_has_a_relu_after_each() -> None:
    config = ModelConfig("encoder", width=WIDTH, heads=HEADS, hidden=HIDDEN, head_layers=2)
    head = build_model(config, Sizes(vocabulary=20, classes=3)).head
    assert isinstance(head, PooledHead) and len(head.layers) == 2
    x = torch.randn(2, N, WIDTH)
    state = head.norm(x).mean(1)
    for layer in head.layers:
        state = torch.relu(state @ layer.weight.T + layer.bias)
    torch.testing.assert_close(head(x), head.linear(state))


def test_first_weights_are_smaller_where_a_block_writes_into_its_skip() -> None:
    torch.manual_seed(0)
    layers = 3
    blocks = nn.ModuleList(Block(64, 4, 256, False) for _ in range(layers))
    initialise(blocks, layers)
    for name, parameter in blocks.named_parameters():
        if parameter.dim() < 2:
            continue
        writes = name.endswith(("attention.out.weight", "feedforward.down.weight"))
        expected = 0.02 / (2 * layers) ** 0.5 if writes else 0.02
        assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.05)


def test_glorot_weights_are_uniform_within_their_limit_and_embeddings_normal() -> None:
    torch.manual_seed(0)
    layer, embedding, head = nn.Linear(30, 90), nn.Embedding(500, 16), nn.Linear(16, 500)
    head.weight = embedding.weight
    initialise_glorot(nn.ModuleList([embedding, head, layer]))
    linear, table = layer.weight.detach(), embedding.weight.detach()
    assert not layer.bias.detach().any()
    limit = (6 / 120) ** 0.5
    assert 0.98 * limit < float(linear.abs().max()) <= limit
    assert float(table.std()) == pytest.approx(16**-0.5, rel=0.05)
    assert float(table.abs().max()) > 3 * 16**-0.5  # normal, and not the head's uniform weights
