"""The inputs and outputs that each graph of a bundle must have, with their types and shapes.

Knows the tasks and the manifest; not the runtime that opens the graph.
"""

from dataclasses import dataclass, field

from serve.bundle import (
    EVALUATIONS_PER_STEP,
    ImageInput,
    Manifest,
    PointsInput,
)

# Of each name: the type as ONNX calls it, and the shape; a word stands for any size, None for any
# shape at all, an empty type for any type.
Nodes = dict[str, tuple[str, tuple[int | str, ...] | None]]


@dataclass(frozen=True, slots=True)
class Interface:
    """What a graph takes and gives, and what else it may."""

    inputs: Nodes
    outputs: Nodes
    more_inputs: Nodes = field(default_factory=dict)
    more_outputs: Nodes = field(default_factory=dict)


_INT64, _INT32, _INT8 = "tensor(int64)", "tensor(int32)", "tensor(int8)"
_FLOAT = "tensor(float)"
_TOKENS: Nodes = {"tokens": (_INT64, ("batch", "length"))}
_KEEP: Nodes = {"keep": (_INT64, ("kept",))}
_A_ROW: Nodes = {"h": (_FLOAT, ("batch",))}
_TIME: Nodes = {"t": (_FLOAT, ("batch",))}
_LENGTHS: Nodes = {"seqlens": (_INT32, ("batch",)), "total": (_INT32, ())}
_CONTEXTS: Nodes = {f"context_{index}": ("", None) for index in range(8)}


def graph_interface(manifest: Manifest) -> Interface:
    """Of the graph of any rung: the whole depth, without caches."""
    if manifest.labelled:
        return Interface(_taken(manifest), _classes(manifest))
    if manifest.task == "translate":
        inputs = _TOKENS | _source() | _memory(manifest) | _KEEP
        return Interface(inputs, _vocabulary(manifest))
    return Interface(_TOKENS | _KEEP, _vocabulary(manifest))


def encoder_interface(manifest: Manifest) -> Interface:
    """Of the encoder of a translator's rung."""
    return Interface(_source(), _memory(manifest))


def embed_interface(manifest: Manifest) -> Interface:
    """Of what comes before the first step."""
    if manifest.keeps_caches:
        past: Nodes = {"past": (_INT32, ("batch",))}
        return Interface(_TOKENS | past, _state("x", manifest) | _LENGTHS)
    taken = _taken(manifest) if manifest.labelled else _TOKENS
    return Interface(taken, _state("x", manifest), more_outputs=_CONTEXTS)


def step_interface(manifest: Manifest) -> Interface:
    """Of one step of the method."""
    inputs, outputs = _state("x", manifest), _state("y", manifest)
    if manifest.depth != "fixed":
        inputs |= _A_ROW
    if manifest.method == "ab2":
        inputs |= _state("previous", manifest) | {"history": (_FLOAT, ("batch",))}
        outputs |= _state("v", manifest)
    if not manifest.keeps_caches:
        return Interface(inputs, outputs, more_inputs=_TIME | _CONTEXTS)
    shape = manifest.shape
    kind = _INT8 if manifest.cache == "kv_int8" else _FLOAT
    cache = (kind, ("batch", shape.heads, "capacity", shape.head_width))
    names = cache_names(EVALUATIONS_PER_STEP[manifest.method], shape.layers)
    return Interface(
        inputs | _LENGTHS | dict.fromkeys(names, cache),
        outputs | {f"{name}_out": cache for name in names},
        more_inputs=_TIME,
    )


def head_interface(manifest: Manifest) -> Interface:
    """Of what reads the answer off the last state."""
    if manifest.labelled:
        return Interface(_state("x", manifest), _classes(manifest), more_inputs=_CONTEXTS)
    inputs, more = _state("x", manifest) | _KEEP, {} if manifest.keeps_caches else _CONTEXTS
    return Interface(inputs, _vocabulary(manifest), more_inputs=more)


def cache_names(stages: int, layers: int) -> list[str]:
    """The cache inputs of a decoder's step; the outputs have _out behind."""
    return [
        f"{part}_{stage}_{layer}"
        for stage in range(stages)
        for layer in range(layers)
        for part in ("k", "v")
    ]


def _taken(manifest: Manifest) -> Nodes:
    match manifest.input:
        case ImageInput(channels=channels, height=height, width=width):
            return {"pixels": (_FLOAT, ("batch", channels, height, width))}
        case PointsInput(dimensions=dimensions):
            return {"points": (_FLOAT, ("batch", "count", dimensions))}
        case _:
            return _TOKENS


def _state(name: str, manifest: Manifest) -> Nodes:
    """A state: of words as many positions as the input, of other inputs whatever they embed to."""
    if manifest.keeps_caches:
        return {name: (_FLOAT, ("batch", "length", manifest.shape.state_width))}
    return {name: (_FLOAT, None)}


def _classes(manifest: Manifest) -> Nodes:
    """The scores of every label, of a row or of each of its positions."""
    place = ("batch", "length") if manifest.task == "tag" else ("batch",)
    return {"logits": (_FLOAT, (*place, len(manifest.labels or ())))}


def _vocabulary(manifest: Manifest) -> Nodes:
    return {"logits": (_FLOAT, ("batch", "kept", manifest.text_tokenizer.vocab_size))}


def _source() -> Nodes:
    return {"source": (_INT64, ("batch", "source_length"))}


def _memory(manifest: Manifest) -> Nodes:
    return {"memory": (_FLOAT, ("batch", "source_length", manifest.shape.width))}
