"""Transformer blocks, with and without time as an input, and the velocity that composes them.

A block maps (B, N, D) to (B, N, D) and keeps its own inner skip connections.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["pre", "post", "none"]
Activation = Literal["gelu", "gelu-exact", "relu"]  # gelu by tanh, as GPT-2; exact as BERT


class Attention(nn.Module):
    """Multi-head self-attention, causal or over all positions that the mask allows.

    With fewer `kv_heads` several query heads share one of keys and values. With `rotary` channels
    of each query and key are rotated by their position, by `theta` and up to a window.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool,
        dropout: float = 0.0,
        bias: bool = True,
        project: bool = True,
        head_width: int = 0,
        kv_heads: int = 0,
        rotary: int = 0,
        theta: float = 10_000.0,
        window: int = 0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.head_width = head_width or width // heads
        inner = heads * self.head_width
        if inner != width and not project:
            raise ValueError(f"heads of {head_width} need a projection back to width {width}")
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.kv_heads = kv_heads or heads
        self.rotary, self.theta, self.window = rotary, theta, window
        if rotary:
            for name, table in zip(("cos", "sin"), rotations(window, rotary, theta), strict=True):
                self.register_buffer(name, table, persistent=False)
        self.qkv = nn.Linear(width, inner + 2 * self.kv_heads * self.head_width, bias=bias)
        self.out: nn.Module = nn.Linear(inner, width, bias=bias) if project else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, N, _ = x.shape
        counts = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (
            part.view(B, N, count, self.head_width).transpose(1, 2)  # (B, H, N, D/H)
            for count, part in zip(
                counts, self.qkv(x).split([n * self.head_width for n in counts], -1), strict=True
            )
        )
        if self.rotary:
            q, k = self.rotated(q), self.rotated(k)
        allowed = None if mask is None else mask[:, None, None, :]
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=allowed,
            is_causal=self.causal,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.kv_heads != self.heads,
        )
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))  # (B, N, D)
        return out

    def rotated(self, x: Tensor) -> Tensor:
        """Queries or keys (B, H, N, E), each rotated by its position."""
        half = self.rotary // 2
        a, b, rest = x.split([half, half, self.head_width - self.rotary], -1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]  # (N, half)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def rotations(window: int, channels: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (window, channels / 2) of rotary positions: slower for later channels."""
    rates = 1.0 / theta ** (torch.arange(0, channels, 2).float() / channels)
    angles = torch.outer(torch.arange(window).float(), rates)
    return angles.cos(), angles.sin()


class RelativeAttention(nn.Module):
    """Attention over all positions that sees how far apart two are (Shaw and others, 2018).

    Keys and values get a learned vector for each distance from -reach to reach, the same for all
    heads; what is farther away has the outermost.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool,
        reach: int,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.reach, self.head_width = heads, causal, reach, width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.far_keys = nn.Parameter(torch.empty(2 * reach + 1, self.head_width))
        self.far_values = nn.Parameter(torch.empty(2 * reach + 1, self.head_width))
        nn.init.xavier_uniform_(self.far_keys)
        nn.init.xavier_uniform_(self.far_values)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, N, _ = x.shape
        q, k, v = (
            part.view(B, N, self.heads, self.head_width).transpose(1, 2)  # (B, H, N, E)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        at = torch.arange(N, device=x.device)
        apart = at[None] - at[:, None]  # (N, N): how far a key is to the right of a query
        place = apart.clamp(-self.reach, self.reach) + self.reach
        by_distance = q @ self.far_keys.mT  # (B, H, N, 2 reach + 1)
        scores = q @ k.transpose(-1, -2)  # (B, H, N, N)
        scores = scores + by_distance.gather(-1, place.expand_as(scores))
        scores = scores * self.head_width**-0.5
        least = torch.finfo(scores.dtype).min
        if self.causal:
            scores = scores.masked_fill(apart > 0, least)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], least)
        shares = self.drop(scores.softmax(-1))
        y = shares @ v + torch.einsum("bhnm,nmd->bhnd", shares, self.far_values[place])
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))  # (B, N, D)
        return out


class FeedForward(nn.Module):
    """Two linear layers around a GELU (as usual by tanh, or exact, by erf) or a ReLU."""

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: Activation = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.drop = nn.Dropout(dropout)  # of what is activated

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.activation == "relu":
            x = F.relu(x)
        else:
            x = F.gelu(x, approximate="none" if self.activation == "gelu-exact" else "tanh")
        out: Tensor = self.down(self.drop(x))
        return out


class GatedFeedForward(nn.Module):
    """down(silu(gate) * up), both from one linear layer: SwiGLU."""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=bias)  # the gate before what it gates
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)  # (B, N, hidden) each
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class RootNorm(nn.Module):
    """x over its root mean square, times a weight for each channel: RMSNorm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Block(nn.Module):
    """Attention and feed-forward, each with a skip; norms before, after, or nowhere.

    Without hidden units the block is attention alone. Without `outer_skip` the feed-forward has no
    skip around it: the velocity of an N-ODE Transformer as the papers of OT-Transformer have it.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        causal: bool,
        norm: Norm = "pre",
        dropout: float = 0.0,
        activation: Activation = "gelu",
        bias: bool = True,
        project: bool = True,
        head_width: int = 0,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        reach: int = 0,
        outer_skip: bool = True,
    ) -> None:
        super().__init__()

        def new_norm() -> nn.Module:
            return nn.Identity() if norm == "none" else nn.LayerNorm(width, bias=bias)

        self.norm, self.outer_skip = norm, outer_skip
        self.attention: Attention | RelativeAttention
        if reach:
            self.attention = RelativeAttention(width, heads, causal, reach, attention_dropout, bias)
        else:
            self.attention = Attention(
                width, heads, causal, attention_dropout, bias, project, head_width
            )
        self.norm1 = new_norm()
        self.drop = nn.Dropout(dropout)
        self.feedforward: FeedForward | GatedFeedForward | None = None
        if hidden:
            self.feedforward = FeedForward(width, hidden, activation, bias, activation_dropout)
            self.norm2 = new_norm()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.attend(x, mask)
        return self.feed(x) if self.feedforward is not None else x

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The first half: attention, its skip and its norm."""
        if self.norm == "post":
            out: Tensor = self.norm1(x + self.drop(self.attention(x, mask)))
        else:
            out = x + self.drop(self.attention(self.norm1(x), mask))
        return out

    def feed(self, x: Tensor) -> Tensor:
        """The second half: the feed-forward, its skip and its norm."""
        assert self.feedforward is not None
        changed: Tensor = self.feedforward(x if self.norm == "post" else self.norm2(x))
        changed = self.drop(changed)
        changed = x + changed if self.outer_skip else changed
        if self.norm == "post":
            changed = self.norm2(changed)
        return changed


class ParallelBlock(Block):
    """A block whose halves read the same state, as those of GPT-NeoX do."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert self.feedforward is not None and self.norm == "pre"
        attended = self.drop(self.attention(self.norm1(x), mask))
        out: Tensor = x + attended + self.drop(self.feedforward(self.norm2(x)))
        return out


class BlockVelocity(nn.Module):
    """f = [norm o] f_L o ... o f_1: the whole stack, with one set of weights for every step."""

    def __init__(
        self, blocks: Iterable[nn.Module], width: int, final_norm: bool, bias: bool = True
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm: nn.Module = nn.LayerNorm(width, bias=bias) if final_norm else nn.Identity()

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *context)
        x = self.norm(x)
        return x


class Loop(nn.Module):
    """A velocity as the step of a loop: f(x, e) = F(x + e) - x, or F(x + e), or F(x) - x.

    With an injection e (B, N, D), the first of the context, every evaluation sees the input again.
    A residual step of size 1 is x <- F(x).
    """

    def __init__(self, velocity: nn.Module, inject: bool, residual: bool) -> None:
        super().__init__()
        self.velocity, self.inject, self.residual = velocity, inject, residual
        self.timed: bool = getattr(velocity, "timed", False)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        seen = x
        if self.inject:
            seen, rest = x + rest[0], rest[1:]
        out: Tensor = self.velocity(seen, *rest)
        return out - x if self.residual else out


class Conditioned(nn.Module):
    """A velocity that sees the size of its step, or the time: scales and shifts that begin as 0."""

    timed = True

    def __init__(self, velocity: nn.Module, width: int, by_time: bool) -> None:
        super().__init__()
        self.velocity, self.by_time = velocity, by_time
        self.up, self.down = nn.Linear(1, 32), nn.Linear(32, 3 * width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        *context, t, h = rest  # each for all rows, or (B, 1, 1)
        seen = t if self.by_time else h
        seen = seen.type_as(x) if isinstance(seen, Tensor) else x.new_tensor(seen)
        seen = torch.log2(1 + seen if self.by_time else seen).reshape(-1, 1, 1)
        scale, shift, gain = self.down(torch.tanh(self.up(seen))).chunk(3, -1)  # (R, 1, D) each
        out: Tensor = self.velocity(x * (1 + scale) + shift, *context) * (1 + gain)
        return out


def initialise(module: nn.Module, layers: int, scaled: bool = False) -> None:
    """N(0, 0.02) as in GPT-2, smaller by sqrt(2 layers) where a block writes into its skip.

    0.02 suits a width of 2500 channels. `scaled`, matrices of blocks have 1 / sqrt(channels in)
    instead: at a width of 64 training starts several times as fast.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            continue
        into_skip = name.endswith(("attention.out.weight", "feedforward.down.weight"))
        deviation = 0.02
        if scaled and ".blocks." in name:
            deviation = parameter[0].numel() ** -0.5
        if into_skip:
            deviation /= (2 * layers) ** 0.5
        with torch.no_grad():
            parameter.normal_(0.0, deviation)
    for module_ in module.modules():
        if isinstance(module_, nn.Linear) and module_.bias is not None:
            nn.init.zeros_(module_.bias)
        if isinstance(module_, Conditioned):
            nn.init.zeros_(module_.down.weight)


def initialise_glorot(module: nn.Module) -> None:
    """Linear layers by Glorot's rule, biases zero; embeddings N(0, 1 / width), tied or not."""
    for each in module.modules():
        if isinstance(each, nn.Linear):
            nn.init.xavier_uniform_(each.weight)
            if each.bias is not None:
                nn.init.zeros_(each.bias)
        if isinstance(each, Conditioned):
            nn.init.zeros_(each.down.weight)
    for each in module.modules():  # last, since a head may share their weights
        if isinstance(each, nn.Embedding):
            nn.init.normal_(each.weight, 0.0, each.embedding_dim**-0.5)


# Attention depends on time in the same way, or not at all.


class TimedLinear(nn.Module):
    """A x + b + c t."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.affine = nn.Linear(inputs, outputs)
        self.drift = nn.Parameter(torch.empty(outputs))  # c
        nn.init.uniform_(self.drift, -(inputs**-0.5), inputs**-0.5)  # as the bias

    def forward(self, x: Tensor, t: float | Tensor) -> Tensor:
        out: Tensor = self.affine(x) + self.drift * t
        return out


class TimedAttention(nn.Module):
    """Attention whose affine layers, of queries, keys, values and the output, know the time."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = TimedLinear(width, 3 * width), TimedLinear(width, width)

    def forward(self, x: Tensor, t: float | Tensor, mask: Tensor | None = None) -> Tensor:
        B, N, D = x.shape
        q, k, v = (
            part.view(B, N, self.heads, D // self.heads).transpose(1, 2)  # (B, H, N, D/H)
            for part in self.qkv(x, t).chunk(3, dim=-1)
        )
        allowed = None if mask is None else mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=self.causal)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2), t)  # (B, N, D)
        return out


class TimedVelocity(nn.Module):
    """One block; `inner_skip` is whether a = 1, `timed_attention` whether attention knows t."""

    timed = True

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        inner_skip: bool,
        causal: bool = False,
        timed_attention: bool = False,
    ) -> None:
        super().__init__()
        self.inner_skip, self.timed_attention = inner_skip, timed_attention
        self.attention: nn.Module = (
            TimedAttention(width, heads, causal)
            if timed_attention
            else Attention(width, heads, causal)
        )
        self.up, self.down = TimedLinear(width, hidden), TimedLinear(hidden, width)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        *context, t, _ = rest  # the velocity does not depend on the size of the step
        time = (t,) if self.timed_attention else ()
        y = self.attention(x, *time, *context)  # (B, N, D)
        y = x + y if self.inner_skip else y
        out: Tensor = self.down(F.relu(self.up(y, t)), t)
        return out


# Feed-forward layers whose matrices are fixed random rotations around a learned diagonal. W = U S
# V: the entries of U and V are sines and cosines of random angles that grow with the depth,
# chosen once and kept with the weights; S and the biases are learned, which is O(width)
# parameters.


class RandomLinear(nn.Module):
    """x -> x U S V + b, at one depth of a block."""

    left: Tensor
    right: Tensor

    def __init__(self, inputs: int, outputs: int, depth: int) -> None:
        super().__init__()
        rank = min(inputs, outputs)  # S is rectangular: beyond this it is zero
        self.register_buffer("left", rotation(inputs, depth)[:, :rank].clone())  # (I, R)
        self.register_buffer("right", rotation(outputs, depth)[:rank].clone())  # (R, O)
        self.diagonal = nn.Parameter(torch.empty(rank))
        nn.init.uniform_(self.diagonal, -math.sqrt(6 / rank), math.sqrt(6 / rank))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.left * self.diagonal) @ self.right  # (I, O)
        return x @ weight + self.bias


class RandomFeedForward(nn.Module):
    """Two random linear layers around a ReLU."""

    def __init__(self, width: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.up, self.down = RandomLinear(width, hidden, depth), RandomLinear(hidden, width, depth)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.up(x)))
        return out


def rotation(width: int, depth: int) -> Tensor:
    """A (width, width) matrix that is nearly orthogonal, from torch's generator; depth from 1."""
    coefficients = torch.randn(width, width // 2) * width
    angles = depth * math.pi / width * torch.arange(width // 2) * coefficients
    return torch.cat([angles.sin(), angles.cos()], dim=1) / math.sqrt(width)
