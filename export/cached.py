"""Velocities whose attention reads and extends a cache instead of seeing the whole sequence.

Knows which modules have such a form. It does not know their structure: whatever calls a causal
attention, in whatever order and however often, calls the cached one with the next pair of caches.
"""

import copy

import torch
from torch import Tensor, nn

from train.blocks import Attention, Block, BlockVelocity, Conditioned
from train.model import Embedding
from train.runge_kutta import RungeKuttaStack

HEAD_WIDTH_MULTIPLE = 8  # of the operator


def attentions(velocity: nn.Module) -> list[Attention]:
    return [module for module in velocity.modules() if isinstance(module, Attention)]


def has_cached_form(velocity: nn.Module) -> bool:
    """Whether positions meet only in causal attention of the kind that the operator computes."""
    found = attentions(velocity)
    return (
        _is_of_blocks(velocity)
        and all(a.causal and head_width(a) % HEAD_WIDTH_MULTIPLE == 0 for a in found)
        and len({(a.heads, head_width(a)) for a in found}) == 1
    )


def _is_of_blocks(velocity: nn.Module) -> bool:
    match velocity:
        case Conditioned():
            return _is_of_blocks(velocity.velocity)
        case BlockVelocity():
            blocks = list(velocity.blocks)
        case RungeKuttaStack():
            blocks = [getattr(function, "block", function) for function in velocity.functions]
        case _:
            return False
    return all(isinstance(block, Block) for block in blocks)


def head_width(attention: Attention) -> int:
    return attention.qkv.in_features // attention.heads


def count_pairs(velocity: nn.Module, *inputs: Tensor) -> int:
    """Pairs of caches that one evaluation uses: calls of attention in a dry run."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    hooks = [attention.register_forward_hook(count) for attention in attentions(velocity)]
    with torch.no_grad():
        velocity(*inputs)
    for hook in hooks:
        hook.remove()
    return calls


class _Tape:
    """The caches of one evaluation, taken and given back in the order of the calls."""

    def __init__(self) -> None:
        self.lengths: tuple[Tensor, Tensor]
        self.waiting: list[Tensor] = []
        self.extended: list[Tensor] = []


class CachedAttention(nn.Module):
    """A causal attention on cached keys and values, as ONNX Runtime's operator.

    The operator cannot run in torch: the attention it stands for is what it is verified by.
    """

    def __init__(self, attention: Attention, tape: _Tape) -> None:
        super().__init__()
        self.attention, self.tape = attention, tape

    def forward(self, x: Tensor, mask: None = None) -> Tensor:
        heads, tape = self.attention.heads, self.tape
        key, value = tape.waiting.pop(0), tape.waiting.pop(0)
        y, key_out, value_out = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            [self.attention.qkv(x), None, None, key, value, *tape.lengths],
            attrs={"num_heads": heads, "kv_num_heads": heads},
            dtypes=[torch.float32] * 3,
            shapes=[x.shape, key.shape, value.shape],
            version=1,
        )
        tape.extended += [key_out, value_out]
        out: Tensor = self.attention.out(y)
        return out


class CachedEmbed(nn.Module):
    """Tokens at absolute positions, and the two lengths that the cached attention wants."""

    def __init__(self, embed: Embedding) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, tokens: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        N, embed = tokens.shape[1], self.embed
        at = past.long()[:, None] + torch.arange(N)[None, :]  # (B, N)
        x = embed.tokens(tokens) * embed.scale + embed.positions.at(at)  # (B, N, D)
        last = past + (N - 1)  # (B,): index of the last position of each row
        return x, last.int(), (last.amax(0) + 1).int()


class CachedVelocity(nn.Module):
    """One evaluation: x, [t, h,] two lengths and the caches, to v and the caches extended."""

    def __init__(self, velocity: nn.Module) -> None:
        super().__init__()
        self.tape = _Tape()
        self.timed: bool = getattr(velocity, "timed", False)
        self.velocity = _with_tape(copy.deepcopy(velocity), self.tape)

    def forward(self, x: Tensor, seqlens: Tensor, total: Tensor, *rest: Tensor) -> list[Tensor]:
        time, caches = (rest[:2], rest[2:]) if self.timed else ((), rest)
        self.tape.lengths = (seqlens, total)
        self.tape.waiting, self.tape.extended = list(caches), []
        v = self.velocity(x, *time)
        assert not self.tape.waiting
        return [v, *self.tape.extended]


def _with_tape(module: nn.Module, tape: _Tape) -> nn.Module:
    for name, child in module.named_children():
        if isinstance(child, Attention):
            setattr(module, name, CachedAttention(child, tape))
        else:
            _with_tape(child, tape)
    return module
