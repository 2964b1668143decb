"""How a model's depth, input and cost are said to a person: for the card and for `inspect`.

Knows manifests only.
"""

from serve.bundle import ImageInput, Manifest, Metric, PointsInput, Range, steps_in_words

# By which nobody need care: nats, or a share of the rows or positions.
TOLERATED: dict[str, float] = {"loss": 0.01, "accuracy": 0.005}


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
    if manifest.dial == "time":
        return (
            "An OT-Transformer: depth is the ODE x' = f(x), solved with "
            f"{manifest.method} in steps of {manifest.step_size(1):g}; the dial is time, so that "
            "fewer steps end earlier, and one set of weights serves every step count."
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


def dial_in_words(manifest: Manifest) -> str:
    """What a step count means, and which counts go beyond the training."""
    if manifest.dial == "resolution":
        return "any number of steps crosses the whole depth"
    beyond = [steps for steps in manifest.steps if steps > (manifest.grid_steps or 0)]
    measured = f", measured up to {beyond[-1]}" if beyond else ""
    return f"the dial is time, trained to {steps_in_words(manifest.grid_steps or 0)}{measured}"


def range_in_words(manifest: Manifest, found: Range | None = None) -> str | None:
    """What the dial buys; None where it was not measured."""
    found = found or manifest.range
    if found is None:
        return None
    metric = manifest.rungs[0].quality.metric
    scale, unit = (1.0, "nats a token") if metric == "loss" else (100.0, f"points of {metric}")
    places = 4 if metric == "loss" else 2
    value, low, high = (
        f"{scale * each:.{places}f}" for each in (found.value, found.low, found.high)
    )
    return (
        f"range: {steps_in_words(manifest.steps[-1])} are better than "
        f"{steps_in_words(manifest.steps[0])} by {value} {unit} (95 % interval {low} to {high}, "
        "row by row on the same data)"
    )


def flat_in_words(manifest: Manifest) -> str | None:
    """That the fewest steps are enough, where none of the others is surely better by much."""
    first, last = manifest.steps[0], manifest.steps[-1]
    metric = manifest.rungs[0].quality.metric
    if first == last or manifest.default_steps != first or metric not in TOLERATED:
        return None
    enough = "one step" if first == 1 else steps_in_words(first)
    by = "0.01 nats a token" if metric == "loss" else "half a point"
    return f"This model needs {enough}: up to {last}, no more are better by {by}."


def metric_in_words(metric: Metric) -> str:
    return "loss (nats a token)" if metric == "loss" else metric
