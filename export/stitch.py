"""Rungs: copies of a traced evaluation joined into a fixed-step graph by a method's tableau.

Knows methods as data and how evaluations follow each other; nothing of torch modules, files, or of
the graphs of one step that the CPU server runs.
"""

import onnx

from export.builder import GraphBuilder
from export.parts import Parts
from export.ports import KEEP
from train.ode import Method, method_named


def stitch(parts: Parts, method: str, steps: int) -> onnx.ModelProto:
    """The graph of one rung in plain operators; its weights still inside."""
    table = method_named(method)
    build = GraphBuilder()
    x, *context = build.paste(parts.embed, "embed", "embed", [port.name for port in parts.inputs])
    for index in range(len(parts.velocities)):
        if parts.depth == "discrete":
            x = _evaluate(build, parts, index, "pass", [x, *context])
        else:
            x = _integrate(build, parts, index, table, steps, x, context)
    keep = [KEEP] if parts.keeps else []
    seen = [x, *context] if parts.head_sees_context else [x]
    (answer,) = build.paste(parts.head, "head", "head", seen + [port.name for port in keep])
    return build.model(f"{method}-{steps}", [*parts.inputs, *keep], {answer: parts.output})


def _integrate(
    build: GraphBuilder,
    parts: Parts,
    index: int,
    table: Method,
    steps: int,
    x: str,
    context: list[str],
) -> str:
    """So many steps of one velocity, across [0, T] or along the grid of all; the state behind."""
    grid = parts.grid_steps or steps  # steps that cross [0, T]
    h = parts.T / grid
    before: str | None = None
    for step in range(steps):
        name = f"flow{index}/step{step}" if len(parts.velocities) > 1 else f"step{step}"
        stages: list[str] = []
        for stage, (row, c) in enumerate(zip(table.a, table.c, strict=True)):
            terms = [(h * a, v) for a, v in zip(row, stages, strict=True)]
            inputs = [build.combine(f"{name}/at{stage}", x, terms), *context]
            if parts.timed:
                t = parts.T * step / grid + c * h
                inputs += [build.constant(t, parts.rank), build.constant(h, parts.rank)]
            stages.append(_evaluate(build, parts, index, f"{name}/f{stage}", inputs))
        if table.history and before is not None:
            terms = [(h * (1 + table.history), stages[0]), (-h * table.history, before)]
        else:
            terms = [(h * b, v) for b, v in zip(table.b, stages, strict=True)]
        x = build.combine(name, x, terms)
        before = stages[0]
    return x


def _evaluate(build: GraphBuilder, parts: Parts, index: int, name: str, inputs: list[str]) -> str:
    (v,) = build.paste(parts.velocities[index], f"velocity{index}", name, inputs)
    return v
