"""What the rungs of a model are stitched from: embed, ONE evaluation of each velocity, head.

Knows the kinds of models and their torch modules; not how many steps a rung will have.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from onnx import TensorProto
from torch import Tensor, nn

from export.cached import CachedVelocity, attentions, count_pairs, has_cached_form, head_width
from export.pieces import Function, Piece, open_sizes, trace_functions
from serve.bundle import Cache, Task
from train.model import Embedding, OTTransformer, Stepped, as_embedded
from train.translator import Translator
from train.travel import Depth, flows

INT64, INT32, FLOAT = TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a graph; a word stands for any size."""

    name: str
    kind: int
    shape: tuple[int | str, ...]


TOKENS = Port("tokens", INT64, ("batch", "length"))
PAST = Port("past", INT32, ("batch",))
KEEP = Port("keep", INT64, ("kept",))
SOURCE = Port("source", INT64, ("batch", "source_length"))
CLASSES = Port("logits", FLOAT, ("batch", "classes"))
VOCABULARY = Port("logits", FLOAT, ("batch", "kept", "vocabulary"))


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
    head: Piece  # x, [*context,] [keep] -> output
    head_sees_context: bool
    inputs: tuple[Port, ...]  # of the embedding
    keeps: bool  # whether the head also takes the positions to answer for
    output: Port
    depth: Depth
    T: float
    caches: CacheShape | None = None


@dataclass(frozen=True, slots=True)
class Traced:
    """All that is traced of a model."""

    task: Task
    cache: Cache
    width: int
    graph: Parts
    encoder: Parts | None = None  # of a translator

    @property
    def pairs(self) -> int | None:
        return None if self.graph.caches is None else self.graph.caches.pairs

    @property
    def velocities(self) -> int:
        """Velocities that one answer crosses, one after another."""
        return len(self.graph.velocities) + (len(self.encoder.velocities) if self.encoder else 0)


class _Embed(nn.Module):
    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        made = as_embedded(self.embed(*inputs))
        return (made.state, *made.context)


class _CachedEmbed(nn.Module):
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
        logits: Tensor = self.head(x.index_select(1, keep), *context)
        return logits


def trace(model: Stepped, small: Sequence[Tensor], large: Sequence[Tensor]) -> Traced:
    """The pieces of a trained model, from two examples of its inputs: what differs is open."""
    with torch.no_grad():
        if isinstance(model, Translator):
            return _translator(model, small, large)
        assert isinstance(model, OTTransformer)
        generates = model(*small, steps=1).logits.dim() == 3
        if generates and _cacheable(model):
            return _cached_decoder(model, small[0])
        plan = _Plan(model.depth, model.T, generates)
        plan.follow(_Embed(model.embed), model.velocity, model.head, (small, large))
    inputs = (TOKENS if generates else _port(small[0]),)
    graph = plan.parts(
        trace_functions(plan.functions), inputs, VOCABULARY if generates else CLASSES
    )
    return Traced("generate" if generates else "classify", "none", plan.width, graph)


class _Plan:
    """What is to be traced for a graph without caches."""

    def __init__(self, depth: Depth, T: float, keeps: bool, head_sees_context: bool = True) -> None:
        self.depth, self.T = depth, T
        self.keeps, self.head_sees_context = keeps, head_sees_context
        self.functions: list[Function] = []
        self.timed = False
        self.width = 0  # of the state that the head reads

    def follow(
        self,
        embed: nn.Module,
        velocity: nn.Module,
        head: nn.Module,
        examples: tuple[Sequence[Tensor], Sequence[Tensor]],
    ) -> None:
        """Note each function with what it gets when the two examples come through."""
        velocities = flows(velocity, self.depth)
        self.timed = getattr(velocities[0], "timed", False)
        time = [torch.tensor(0.0), torch.tensor(0.5)] if self.timed else []
        self._note(embed, *examples)
        (x, *context), (y, *other) = embed(*examples[0]), embed(*examples[1])
        for each in velocities:
            self._note(each, [x, *context, *time], [y, *other, *time])
            x, y = each(x, *context, *time), each(y, *other, *time)
        self.width = x.shape[-1]
        one, two = ([x, *context], [y, *other]) if self.head_sees_context else ([x], [y])
        if self.keeps:
            head = _KeptHead(head)
            one, two = [*one, torch.arange(2)], [*two, torch.arange(3)]
        self._note(head, one, two)

    def parts(self, pieces: list[Piece], inputs: tuple[Port, ...], output: Port) -> Parts:
        """The traced functions, in the order in which they were noted."""
        embed, *velocities, head = pieces
        return Parts(
            embed,
            tuple(velocities),
            self.timed,
            head,
            self.head_sees_context,
            inputs,
            self.keeps,
            output,
            self.depth,
            self.T,
        )

    def _note(self, module: nn.Module, one: Sequence[Tensor], two: Sequence[Tensor]) -> None:
        self.functions.append(Function(module, tuple(one), open_sizes(one, two)))


def _cacheable(model: OTTransformer) -> bool:
    return (
        model.depth != "chain"
        and type(model.embed) is Embedding
        and model.embed.pad_id is None
        and has_cached_form(model.velocity)
    )


def _cached_decoder(model: OTTransformer, tokens: Tensor) -> Traced:
    assert isinstance(model.embed, Embedding)
    B, N = tokens.shape
    x = model.embed(tokens).state
    timed = getattr(model.velocity, "timed", False)
    time = (torch.tensor(0.0), torch.tensor(0.5)) if timed else ()
    attention = attentions(model.velocity)[0]
    caches = CacheShape(
        count_pairs(model.velocity, x, *time), attention.heads, head_width(attention)
    )
    past = torch.zeros(B, dtype=torch.int32)
    lengths = (torch.full((B,), N - 1, dtype=torch.int32), torch.tensor(N, dtype=torch.int32))
    empty = torch.zeros(B, caches.heads, 8, caches.head_width)
    slots = [empty] * (2 * caches.pairs)
    cached = CachedVelocity(model.velocity)
    embed, velocity, head = trace_functions(
        [
            Function(_CachedEmbed(model.embed), (tokens, past), ((0, 1), (0,))),
            Function(
                cached,
                (x, *lengths, *time, *slots),
                ((0, 1), (0,), (), *[()] * len(time), *[(0, 2)] * len(slots)),
            ),
            Function(_KeptHead(model.head), (x, torch.arange(2)), ((0, 1), (0,))),
        ]
    )
    graph = Parts(
        embed,
        (velocity,),
        timed,
        head,
        False,
        (TOKENS, PAST),
        True,
        VOCABULARY,
        model.depth,
        model.T,
        caches,
    )
    return Traced("generate", "kv", x.shape[-1], graph)


def _translator(model: Translator, small: Sequence[Tensor], large: Sequence[Tensor]) -> Traced:
    reads = _Plan(model.depth, model.T, keeps=False, head_sees_context=False)
    reads.follow(_Embed(model.embed_source), model.encoder, model.norm, (small[:1], large[:1]))
    writes = _Plan(model.depth, model.T, keeps=True, head_sees_context=False)
    one, two = (
        (target, model.encode(source), source) for source, target in (small, large)
    )  # (B, N), (B, S, D), (B, S)
    writes.follow(_AnswerEmbed(model), model.decoder, model.head, (one, two))
    pieces = trace_functions(reads.functions + writes.functions)
    count = len(reads.functions)
    memory = Port("memory", FLOAT, ("batch", "source_length", reads.width))
    encoder = reads.parts(pieces[:count], (SOURCE,), memory)
    graph = writes.parts(pieces[count:], (TOKENS, memory, SOURCE), VOCABULARY)
    return Traced("translate", "none", reads.width, graph, encoder)


def _port(example: Tensor) -> Port:
    """The input of a classifier."""
    if not example.is_floating_point():
        return TOKENS
    if example.dim() == 3:
        return Port("points", FLOAT, ("batch", "count", example.shape[2]))
    return Port("pixels", FLOAT, ("batch", *example.shape[1:]))
