"""The inputs and outputs that each graph of a bundle must have, with their types and shapes.

Knows the tasks and the manifest; not the runtime that opens the graph.
"""

from serve.bundle import ImageInput, Manifest, PointsInput, Rung

# Of each name: the type as ONNX calls it, and the shape; a word stands for any size.
Nodes = dict[str, tuple[str, tuple[int | str, ...]]]
Interface = tuple[Nodes, Nodes]

_INT64, _FLOAT = "tensor(int64)", "tensor(float)"
_TOKENS: Nodes = {"tokens": (_INT64, ("batch", "length"))}
_KEEP: Nodes = {"keep": (_INT64, ("kept",))}


def graph_interface(manifest: Manifest, rung: Rung) -> Interface:
    """Of the graph of a rung."""
    if manifest.task == "classify":
        classes = len(manifest.labels or ())
        return _taken(manifest), {"logits": (_FLOAT, ("batch", classes))}
    vocab_size = manifest.text_tokenizer.vocab_size
    logits: Nodes = {"logits": (_FLOAT, ("batch", "kept", vocab_size))}
    if manifest.task == "translate":
        return _TOKENS | _source() | _memory(manifest) | _KEEP, logits
    if manifest.cache == "none":
        return _TOKENS | _KEEP, logits
    shape = manifest.shape
    cache = (_FLOAT, ("batch", shape.heads, "capacity", shape.head_width))
    names = cache_names(rung.nfe, shape.layers)
    past: Nodes = {"past": ("tensor(int32)", ("batch",))}
    return (
        _TOKENS | past | _KEEP | dict.fromkeys(names, cache),
        logits | {f"{name}_out": cache for name in names},
    )


def encoder_interface(manifest: Manifest) -> Interface:
    """Of the encoder of a translator's rung."""
    return _source(), _memory(manifest)


def cache_names(evaluations: int, layers: int) -> list[str]:
    """The cache inputs of a decoder graph; the outputs have _out behind."""
    return [
        f"{part}_{evaluation}_{layer}"
        for evaluation in range(evaluations)
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


def _source() -> Nodes:
    return {"source": (_INT64, ("batch", "source_length"))}


def _memory(manifest: Manifest) -> Nodes:
    return {"memory": (_FLOAT, ("batch", "source_length", manifest.shape.width))}
