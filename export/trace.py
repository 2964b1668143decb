"""Traces the parts that rungs are stitched from: embed, ONE evaluation of each velocity, head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from export.attention import (
    CachedEmbed,
    after_past,
    fused,
    has_cached_form,
    marks,
    with_caches,
    written_out,
)
from export.pieces import (
    CLASSES,
    EMBEDDING,
    FLOAT,
    LABELS,
    PAST,
    SEQLENS,
    SOURCE,
    TOKENS,
    TOTAL,
    VOCABULARY,
    Function,
    Piece,
    Port,
    open_sizes,
    port_of,
    trace_functions,
)
from serve.bundle import Cache, Task
from train.corrections import CorrectedVelocity
from train.model import (
    Coda,
    Embedding,
    OTTransformer,
    Prelude,
    Stepped,
    Translator,
    as_embedded,
    pools,
)
from train.ode import Depth, flows


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The caches of one evaluation."""

    pairs: int
    heads: int
    head_width: int


@dataclass(frozen=True, slots=True)
class Parts:
    """The pieces of one kind of graph."""

    embed: Piece  # *inputs -> x, *context
    velocities: tuple[Piece, ...]  # x, *context, [t, h,] caches -> v, caches
    timed: bool
    by_step: bool  # whether they are those of the steps, and not of one trajectory each
    endings: int  # the first so many are of steps that a shorter answer ends with, the last first
    head: Piece  # x, [*context,] [keep] -> outputs
    head_sees_context: bool
    inputs: tuple[Port, ...]  # of the embedding
    keeps: bool  # whether the head also takes the positions to answer for
    outputs: tuple[Port, ...]  # of the head: logits, and of a text's classifier its embedding
    depth: Depth
    T: float
    grid_steps: int | None  # of the dial of time: steps that cross [0, T]
    rank: int  # dimensions of x


@dataclass(frozen=True, slots=True)
class StepParts:
    """The pieces of the graphs of one step, beside the head."""

    embed: Piece  # *inputs -> x, *context
    velocities: tuple[Piece, ...]  # x, *context, [t, h,] caches -> v, caches; one, or of each step
    timed: bool
    inputs: tuple[Port, ...]  # of the embedding
    state: Port  # x
    context: tuple[Port, ...]
    caches: CacheShape | None = None
    injected: Port | None = None  # with caches: what every evaluation sees, kept behind the state


@dataclass(frozen=True, slots=True)
class Traced:
    """All that is traced of a model."""

    task: Task
    width: int
    graph: Parts
    encoder: Parts | None = None  # of a translator
    step: StepParts | None = None  # where one velocity makes the whole depth

    @property
    def embeds(self) -> bool:
        """Whether the graphs also give the embedding of a text."""
        return len(self.graph.outputs) > 1

    @property
    def caches(self) -> CacheShape | None:
        return None if self.step is None else self.step.caches

    @property
    def cache(self) -> Cache:
        return "none" if self.caches is None else "kv"

    @property
    def velocities(self) -> int:
        """Velocities that one answer crosses, one after another."""
        own = 1 if self.graph.by_step else len(self.graph.velocities)
        return own + (len(self.encoder.velocities) if self.encoder else 0)


class _Embed(nn.Module):
    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        made = as_embedded(self.embed(*inputs))
        return (made.state, *made.context)


class _AnswerEmbed(nn.Module):
    """The answer so far, and where the source of its memory has tokens."""

    def __init__(self, model: Translator) -> None:
        super().__init__()
        self.embed, self.mask_of = model.embed_target, model.mask_of

    def forward(self, tokens: Tensor, memory: Tensor, source: Tensor) -> tuple[Tensor, ...]:
        x = as_embedded(self.embed(tokens)).state  # (B, N, D)
        return x, memory, self.mask_of(source)


class _KeptHead(nn.Module):
    """Logits of the kept positions only, so that a prompt pays for one."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        *context, keep = rest
        head = self.head
        if isinstance(head, Coda):  # whose blocks see all positions
            x, seen = head.behind(x, *context)
            head, context = head.head, list(seen)
        logits: Tensor = head(x.index_select(1, keep), *context)
        return logits


class _PoolingHead(nn.Module):
    """Logits, and the pooled state that they are read from."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head: Any = head

    def forward(self, x: Tensor, *context: Tensor) -> tuple[Tensor, Tensor]:
        pooled = self.head.pooled(x, *context)
        return self.head.read(pooled), pooled


def trace(
    model: Stepped, small: Sequence[Tensor], large: Sequence[Tensor], labelled: bool = False
) -> Traced:
    """The pieces of a trained model, from two examples of its inputs: what differs is open.

    One of labelled data whose answer has positions is a tagger, any other such a generator.
    """
    with torch.no_grad():
        if isinstance(model, Translator):
            return _translator(model, small, large)
        assert isinstance(model, OTTransformer)
        positions = model(*small, steps=1).logits.dim() == 3
        generates = positions and not labelled
        embeds = not positions and pools(model.head) and not small[0].is_floating_point()
        head = _PoolingHead(model.head) if embeds else model.head
        plan = _Plan(model, generates)
        plan.follow(_Embed(model.embed), model.velocity, head, (small, large))
    inputs = (TOKENS if generates else _port(small[0]),)
    cached = [_cached_embed(model, small[0])] if generates and _cacheable(model) else []
    pieces = trace_functions(plan.functions + cached)
    count = len(plan.functions)
    task: Task = "generate" if generates else "tag" if positions else "classify"
    output = {"generate": VOCABULARY, "tag": LABELS}.get(task, CLASSES)
    outputs = (output, EMBEDDING) if embeds else (output,)
    graph = plan.parts(pieces[:count], inputs, *outputs)
    if cached:
        step = _cached_step(plan, velocity=pieces[1], embed=pieces[count])
    elif model.depth == "ode":
        state, *context = plan.states
        embed, *velocities = map(fused, pieces[: count - 1])
        step = StepParts(embed, tuple(velocities), plan.timed, inputs, state, tuple(context))
    else:
        step = None
    return Traced(task, plan.width, graph, None, step)


class _Plan:
    """What is to be traced for a graph without caches."""

    def __init__(self, model: Stepped, keeps: bool, head_sees_context: bool = True) -> None:
        self.depth, self.T = model.depth, model.T
        self.grid_steps = model.full if model.dial == "time" else None
        self.keeps, self.head_sees_context = keeps, head_sees_context
        self.functions: list[Function] = []
        self.states: list[Port] = []  # x and the context, as the embedding gives them
        self.timed = self.by_step = False
        self.endings = 0
        self.width = self.rank = 0  # of the state that the head reads

    def follow(
        self,
        embed: nn.Module,
        velocity: nn.Module,
        head: nn.Module,
        examples: tuple[Sequence[Tensor], Sequence[Tensor]],
    ) -> None:
        """Note each function with what it gets when the two examples come through."""
        velocities = flows(velocity, self.depth)
        self.by_step = isinstance(velocity, CorrectedVelocity)
        if isinstance(velocity, CorrectedVelocity):
            velocities = [velocity.at(step) for step in velocity.every()]
            self.endings = len(velocities) - velocity.steps
        self.timed = getattr(velocities[0], "timed", False)
        self._note(embed, *examples)
        (x, *context), (y, *other) = embed(*examples[0]), embed(*examples[1])
        self.states = [
            port_of("x", x, y),
            *(
                port_of(f"context_{i}", *pair)
                for i, pair in enumerate(zip(context, other, strict=True))
            ),
        ]
        for each in velocities:
            one, two = [x, *context], [y, *other]
            if self.timed:
                one, two = one + _time(x), two + _time(y)
            self._note(each, one, two)
            x, y = each(*one), each(*two)
        self.width, self.rank = x.shape[-1], x.dim()
        one, two = ([x, *context], [y, *other]) if self.head_sees_context else ([x], [y])
        if self.keeps:
            head = _KeptHead(head)
            one, two = [*one, torch.arange(2)], [*two, torch.arange(3)]
        self._note(head, one, two)

    def parts(self, pieces: list[Piece], inputs: tuple[Port, ...], *outputs: Port) -> Parts:
        """The traced functions, in the order in which they were noted."""
        embed, *velocities, head = pieces
        return Parts(
            written_out(embed),
            tuple(map(written_out, velocities)),
            self.timed,
            self.by_step,
            self.endings,
            written_out(head),
            self.head_sees_context,
            inputs,
            self.keeps,
            outputs,
            self.depth,
            self.T,
            self.grid_steps,
            self.rank,
        )

    def _note(self, module: nn.Module, one: Sequence[Tensor], two: Sequence[Tensor]) -> None:
        self.functions.append(Function(module, tuple(one), open_sizes(one, two)))


def _cacheable(model: OTTransformer) -> bool:
    embed, head = model.embed, model.head
    if isinstance(embed, Prelude) and not embed.blocks:  # it injects, and that is all
        embed = embed.embed
    return (
        model.depth != "chain"
        and type(embed) is Embedding
        and embed.pad_id is None
        and has_cached_form(model.velocity)
        and not (isinstance(head, Coda) and head.blocks)
    )


def _cached_embed(model: OTTransformer, tokens: Tensor) -> Function:
    assert isinstance(model.embed, Embedding | Prelude)
    return Function(CachedEmbed(model.embed), (tokens, tokens), ((0, 1), (0, 1)))


def _cached_step(plan: _Plan, velocity: Piece, embed: Piece) -> StepParts:
    attentions = marks(velocity)
    caches = CacheShape(len(attentions), attentions[0].kv_heads, attentions[0].head_width)
    inputs, context = (TOKENS, PAST), (SEQLENS, TOTAL)
    state, *injected = plan.states
    return StepParts(
        after_past(embed),
        (with_caches(velocity),),
        plan.timed,
        inputs,
        state,
        context,
        caches,
        injected[0] if injected else None,
    )


def _translator(model: Translator, small: Sequence[Tensor], large: Sequence[Tensor]) -> Traced:
    reads = _Plan(model, keeps=False, head_sees_context=False)
    reads.follow(_Embed(model.embed_source), model.encoder, model.norm, (small[:1], large[:1]))
    writes = _Plan(model, keeps=True, head_sees_context=False)
    one, two = (
        (target, model.encode(source), source) for source, target in (small, large)
    )  # (B, N), (B, S, D), (B, S)
    writes.follow(_AnswerEmbed(model), model.decoder, model.head, (one, two))
    pieces = trace_functions(reads.functions + writes.functions)
    count = len(reads.functions)
    memory = Port("memory", FLOAT, ("batch", "source_length", reads.width))
    encoder = reads.parts(pieces[:count], (SOURCE,), memory)
    graph = writes.parts(pieces[count:], (TOKENS, memory, SOURCE), VOCABULARY)
    return Traced("translate", reads.width, graph, encoder)


def _time(x: Tensor) -> list[Tensor]:
    """A time and a size of step for each row, as they are multiplied with x."""
    size = (x.shape[0],) + (1,) * (x.dim() - 1)
    return [torch.zeros(size), torch.full(size, 0.5)]


def _port(example: Tensor) -> Port:
    """The input of a classifier."""
    if not example.is_floating_point():
        return TOKENS
    if example.dim() == 3:
        return Port("points", FLOAT, ("batch", "count", example.shape[2]))
    return Port("pixels", FLOAT, ("batch", *example.shape[1:]))
