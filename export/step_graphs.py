"""The graphs of ONE step: embed, step, head. The CPU server runs any rung with them.

    step: x, h, [t,] [previous, history,] context, caches -> y, [v,] caches

The size h of the step and the time t are given row by row, so that rows of different rungs can
share a call. Knows methods as data; not how many steps anyone will take.
"""

from typing import NamedTuple

import onnx

from export.builder import GraphBuilder
from export.parts import Parts, StepParts
from export.ports import FLOAT, KEEP, Port
from train.ode import Method, method_named

H, TIME = Port("h", FLOAT, ("batch",)), Port("t", FLOAT, ("batch",))
HISTORY = Port("history", FLOAT, ("batch",))


class StepGraphs(NamedTuple):
    """Three graphs; their weights still inside."""

    embed: onnx.ModelProto
    step: onnx.ModelProto
    head: onnx.ModelProto


def stitch_step(parts: Parts, one: StepParts, method: str) -> StepGraphs:
    """The graphs of one step of a method."""
    embed, step, head = GraphBuilder(), GraphBuilder(), GraphBuilder()
    step.stored = head.stored = embed.stored
    return StepGraphs(
        _embed(embed, one), _step(step, parts, one, method_named(method)), _head(head, parts, one)
    )


def _embed(build: GraphBuilder, one: StepParts) -> onnx.ModelProto:
    made = build.paste(one.embed, "embed", "embed", [port.name for port in one.inputs])
    if one.injected is not None:
        x, injected, *rest = made
        made = [build.join(x, injected, "both"), *rest]
    outputs = dict(zip(made, [_state(one), *one.context], strict=True))
    return build.model("embed", one.inputs, outputs)


def _state(one: StepParts) -> Port:
    """What goes from step to step: x, and behind it what every step sees again, if anything."""
    if one.injected is None:
        return one.state
    *sizes, width = one.state.shape
    assert isinstance(width, int)
    return Port(one.state.name, one.state.kind, (*sizes, 2 * width))


def _head(build: GraphBuilder, parts: Parts, one: StepParts) -> onnx.ModelProto:
    inputs = [_state(one)]
    seen = [one.state.name]
    if one.injected is not None:
        seen = [*build.halves(one.state.name)]
    if parts.head_sees_context and one.caches is None:
        inputs += one.context
        seen += [port.name for port in one.context]
    if parts.keeps:
        inputs.append(KEEP)
        seen.append(KEEP.name)
    (answer,) = build.paste(parts.head, "head", "head", seen)
    return build.model("head", inputs, {answer: parts.output})


def _step(build: GraphBuilder, parts: Parts, one: StepParts, table: Method) -> onnx.ModelProto:
    write = _Writer(one)
    state, context = _state(one), list(one.context)
    after = Port("y", FLOAT, state.shape)
    start, kept = state.name, list[str]()
    if one.injected is not None:  # it stays as it is behind the state
        start, injected = build.halves(state.name)
        kept = [injected]

    def given(value: str, name: str) -> str:
        return build.join(value, kept[0], name) if kept else value

    if parts.depth == "discrete":
        v = write.evaluate(build, "pass", [start, *kept])
        inputs = [state, *context, *write.taken]
        return build.model("step", inputs, {given(v, "after"): after} | write.given)
    previous, first = (Port(name, FLOAT, state.shape) for name in ("previous", "v"))
    h = build.by_row(H.name, len(state.shape))
    t = build.by_row(TIME.name, len(state.shape)) if one.timed else ""
    stages: list[str] = []
    for stage, (row, c) in enumerate(zip(table.a, table.c, strict=True)):
        x = _advance(build, f"at{stage}", start, h, row, stages)
        time = [_later(build, f"at{stage}", t, h, c), h] if one.timed else []
        stages.append(write.evaluate(build, f"stage{stage}", [x, *kept], time))
    outputs = dict(write.given)
    if table.history:
        before = build.halves(previous.name)[0] if kept else previous.name
        grown = build.node("Sub", [stages[0], before], "grown")
        weight = build.by_row(HISTORY.name, len(state.shape))
        more = build.node("Mul", [grown, weight], "more")
        moved = build.node("Mul", [build.node("Add", [stages[0], more], "along"), h], "moved")
        y = build.node("Add", [start, moved], "next")
        outputs[given(stages[0], "first")] = first
        context += [previous, HISTORY]
    else:
        y = _advance(build, "next", start, h, table.b, stages)
    inputs = [state, H, *([TIME] if one.timed else []), *context, *write.taken]
    return build.model("step", inputs, {given(y, "after"): after} | outputs)


def _advance(
    build: GraphBuilder, name: str, x: str, h: str, weights: tuple[float, ...], stages: list[str]
) -> str:
    """x + h * (sum of weight * stage)."""
    terms = [(w, v) for w, v in zip(weights, stages, strict=True) if w]
    if not terms:
        return x
    moved = build.node("Mul", [build.combine(name, None, terms), h], f"{name}/moved")
    return build.node("Add", [x, moved], f"{name}/state")


def _later(build: GraphBuilder, name: str, t: str, h: str, c: float) -> str:
    """t + c h."""
    if c == 0:
        return t
    part = h if c == 1 else build.node("Mul", [h, build.constant(c)], f"{name}/part")
    return build.node("Add", [t, part], f"{name}/time")


class _Writer:
    """Pastes evaluations, and notes the caches that each takes and gives."""

    def __init__(self, one: StepParts) -> None:
        self.one = one
        self.taken: list[Port] = []
        self.given: dict[str, Port] = {}
        self._stages = 0

    def evaluate(
        self, build: GraphBuilder, name: str, x: list[str], time: list[str] | None = None
    ) -> str:
        one = self.one
        state, *injected = x
        inputs = [state, *(port.name for port in one.context), *injected, *(time or [])]
        ports: list[Port] = []
        if one.caches is not None:
            size = ("batch", one.caches.heads, "capacity", one.caches.head_width)
            ports = [
                Port(f"{kind}_{self._stages}_{pair}", FLOAT, size)
                for pair in range(one.caches.pairs)
                for kind in ("k", "v")
            ]
        v, *given = build.paste(
            one.velocity, "velocity", name, inputs + [port.name for port in ports]
        )
        self.taken += ports
        for value, port in zip(given, ports, strict=True):
            self.given[value] = Port(f"{port.name}_out", port.kind, port.shape)
        self._stages += 1
        return v
