"""How a model's depth, input and cost are said to a person: for the card and for `inspect`.

Knows manifests only.
"""

from serve.bundle import ImageInput, Manifest, Metric, PointsInput


def depth_in_words(manifest: Manifest) -> str:
    if manifest.depth == "fixed":
        return (
            "A transformer of fixed depth: its weights differ by depth, so it has one operating "
            "point and no step count to choose."
        )
    if manifest.depth == "chain":
        return (
            f"A chain of ODEs x' = f(x, t), one a block, each over [0, {manifest.T:g}], solved "
            f"with {manifest.method} in as many steps as are asked for."
        )
    return (
        f"An OT-Transformer: depth is the ODE x' = f(x) over [0, {manifest.T:g}], solved with "
        f"{manifest.method}; one set of weights serves every step count."
    )


def shape_in_words(manifest: Manifest) -> str:
    layers = manifest.shape.layers
    return f"{layers} block{'' if layers == 1 else 's'} of width {manifest.shape.width}"


def solved_in_words(manifest: Manifest) -> str:
    if manifest.depth == "fixed":
        return "fixed depth"
    return f"{manifest.method}{', one ODE a block' if manifest.depth == 'chain' else ''}"


def input_in_words(manifest: Manifest) -> str:
    match manifest.input:
        case ImageInput(channels=channels, height=height, width=width):
            return f"images of {channels} × {height} × {width}"
        case PointsInput(max_points=most, dimensions=dimensions):
            return f"at most {most} points of {dimensions} coordinates"
        case text if manifest.target_max_tokens is not None:
            return f"at most {text.max_tokens} tokens in, {manifest.target_max_tokens} out"
        case text:
            return f"at most {text.max_tokens} tokens"


def unit_of_cost(manifest: Manifest) -> str:
    """What one measured latency is for."""
    return "request" if manifest.labelled else "token"


def metric_in_words(metric: Metric) -> str:
    return "loss (nats a token)" if metric == "loss" else metric
