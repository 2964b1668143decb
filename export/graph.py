"""Graphs stitched from traced pieces: of one step, and of a whole rung."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from export.draft import WEIGHTS, encoder_name, graph_name, step_files
from export.half import Products, half_caches, half_of, use_half
from export.int8 import Ranges, measured_ranges, quantise, use_integers
from export.int8_cache import Scales, cache_bytes
from export.pieces import (
    FLOAT,
    KEEP,
    OPSET,
    Content,
    Contents,
    Piece,
    Port,
    WeightsFile,
    with_branches,
)
from export.trace import Parts, StepParts, Traced
from serve.bundle import LABELLING, Cache, Precision
from serve.runtime.protocol import RowArray
from train.ode import Method, method_named

IR_VERSION = 10
CONTRIB = "com.microsoft"


@dataclass(slots=True)
class GraphBuilder:
    """Nodes and initializers of one graph; every pasted copy gets names of its own."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, onnx.TensorProto] = field(default_factory=dict)
    _pasted: dict[str, dict[str, str]] = field(default_factory=dict)  # names by owner
    _known: dict[Content, str] = field(default_factory=dict)  # large ones
    # Of large ones, of this graph and of those that share its weights file.
    stored: set[Content] = field(default_factory=set)

    def paste(self, piece: Piece, owner: str, copy: str, inputs: Sequence[str]) -> list[str]:
        """A copy of a piece fed by `inputs`; its outputs. Copies of an owner share weights."""
        if owner not in self._pasted:
            self._pasted[owner] = {
                name: self._add(f"{owner}.{name}", tensor, piece.contents.get(name))
                for name, tensor in piece.initializers.items()
            }
        names = dict(zip(piece.inputs, inputs, strict=True)) | self._pasted[owner]
        for node in piece.nodes:
            pasted = onnx.NodeProto()
            pasted.CopyFrom(node)
            pasted.name = f"{copy}/{node.name}"
            pasted.ClearField("input")
            pasted.input.extend(_renamed(names, value, copy) for value in node.input)
            pasted.ClearField("output")
            pasted.output.extend(_renamed(names, value, copy) for value in node.output)
            del pasted.metadata_props[:]  # the exporter's stack traces
            pasted.ClearField("doc_string")
            self.nodes.append(pasted)
        return [_renamed(names, value, copy) for value in piece.outputs]

    def constant(self, value: float, rank: int = 0) -> str:
        """A number, as a tensor of so many dimensions of one."""
        name = f"constant.{value!r}" + (f".{rank}" if rank else "")
        if name not in self.initializers:
            array = np.full((1,) * rank, value, dtype=np.float32)
            self.initializers[name] = numpy_helper.from_array(array, name)
        return name

    def node(self, op: str, inputs: Sequence[str], name: str) -> str:
        """A node of one output; its name."""
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name))
        return name

    def choose(self, name: str, number: str, x: str, makers: Sequence[Callable[[], str]]) -> str:
        """The value, of the kind of x, that one of these makes: the first if the number is 0, ...

        The number is a scalar; above the last it is the last. What they make of constants alone
        stays outside, where a runtime computes it once. The choices stand one after the other:
        ONNX Runtime packs no weights for one inside another.
        """
        nearest = self.node("Round", [number], f"{name}/nearest")
        which = self.node("Min", [nearest, self.constant(len(makers) - 1)], f"{name}/which")
        for index, make in enumerate(makers):
            made, before = self._branch(f"{name}/{index}", make), f"{name}/before{index}"
            unmade = _graph(before, [helper.make_node("Identity", [x], [before])], before)
            chosen = self.node("Equal", [which, self.constant(index)], f"{name}/is{index}")
            x = f"{name}/after{index}"
            self.nodes.append(
                helper.make_node("If", [chosen], [x], x, then_branch=made, else_branch=unmade)
            )
        return x

    def _branch(self, name: str, make: Callable[[], str]) -> onnx.GraphProto:
        before = len(self.nodes)
        value = make()
        made, self.nodes = self.nodes[before:], self.nodes[:before]
        constants = set(self.initializers)
        for node in self.nodes:
            if constants.issuperset(filter(None, node.input)):
                constants.update(node.output)
        inside: list[onnx.NodeProto] = []
        for node in made:
            if constants.issuperset(filter(None, node.input)):
                constants.update(node.output)
                self.nodes.append(node)
            else:
                inside.append(node)
        return _graph(name, inside, value)

    def join(self, one: str, other: str, name: str) -> str:
        """Two values side by side along their last dimension."""
        self.nodes.append(helper.make_node("Concat", [one, other], [name], name=name, axis=-1))
        return name

    def halves(self, both: str) -> tuple[str, str]:
        """The two equal parts of a value along its last dimension."""
        parts = f"{both}/first", f"{both}/second"
        split = helper.make_node("Split", [both], parts, f"{both}/split", axis=-1, num_outputs=2)
        self.nodes.append(split)
        return parts

    def by_row(self, rows: str, rank: int) -> str:
        """A number a row (B,), to be multiplied with what has `rank` dimensions."""
        axes = f"axes.{rank}"
        if axes not in self.initializers:
            array = np.arange(1, rank, dtype=np.int64)
            self.initializers[axes] = numpy_helper.from_array(array, axes)
        return self.node("Unsqueeze", [rows, axes], f"{rows}/by_row")

    def combine(self, name: str, x: str | None, terms: list[tuple[float, str]]) -> str:
        """x + sum of weight * value, leaving out what multiplies by 0 or by 1."""
        total = x
        for index, (weight, value) in enumerate(terms):
            if weight == 0:
                continue
            term = value if weight == 1 else self._scaled(f"{name}/{index}", weight, value)
            if total is None:
                total = term
                continue
            total = self.node("Add", [total, term], f"{name}/sum{index}")
        assert total is not None
        return total

    def _scaled(self, name: str, weight: float, value: str) -> str:
        return self.node("Mul", [value, self.constant(weight)], f"{name}/scaled")

    def model(
        self, name: str, inputs: Sequence[Port], outputs: Mapping[str, Port]
    ) -> onnx.ModelProto:
        """The graph as a model; `outputs` by the value that each is to show."""
        self._name_outputs({value: port.name for value, port in outputs.items()})
        graph = helper.make_graph(
            self.nodes,
            name,
            [_value(port) for port in inputs],
            [_value(port) for port in outputs.values()],
            list(self.initializers.values()),
        )
        opsets = [helper.make_opsetid("", OPSET)]
        if any(node.domain == CONTRIB for node in with_branches(self.nodes)):
            opsets.append(helper.make_opsetid(CONTRIB, 1))
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="stepdial"
        )

    def _name_outputs(self, names: dict[str, str]) -> None:
        """Rename in place, since an Identity would copy; what no node makes gets one."""
        made = {value for node in self.nodes for value in node.output}
        for value in names.keys() - made:
            self.node("Identity", [value], names[value])
        renamed = {value: name for value, name in names.items() if value in made}
        for node in self.nodes:
            for values in (node.input, node.output):
                for index, value in enumerate(values):
                    values[index] = renamed.get(value, value)

    def _add(self, name: str, tensor: onnx.TensorProto, contents: Contents | None) -> str:
        """The value of a weight: its own, an equal one's, or the transpose of one that is known.

        The exporter writes the weights of a linear layer transposed, so a head that is tied to
        the token embedding would stand in the file twice.
        """
        array = numpy_helper.to_array(tensor)
        if contents is not None:
            if contents.upright in self._known:
                return self._known[contents.upright]
            if contents.turned in self._known:
                return self._transposed(name, self._known[contents.turned])
            if contents.turned in self.stored:
                self._keep(f"{name}.T", array.T)
                return self._transposed(name, f"{name}.T")
            self._known[contents.upright] = name
            self.stored.add(contents.upright)
        self._keep(name, array)
        return name

    def _keep(self, name: str, array: np.ndarray) -> None:
        self.initializers[name] = numpy_helper.from_array(np.array(array, order="C"), name)

    def _transposed(self, name: str, known: str) -> str:
        self.nodes.append(helper.make_node("Transpose", [known], [name], name=name, perm=[1, 0]))
        return name


def _graph(name: str, nodes: Sequence[onnx.NodeProto], value: str) -> onnx.GraphProto:
    """A branch that gives a value; it sees the values of the graph around it."""
    return helper.make_graph(nodes, name, [], [helper.make_empty_tensor_value_info(value)])


def _value(port: Port) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(port.name, port.kind, list(port.shape))


def _renamed(names: Mapping[str, str], value: str, copy: str) -> str:
    if not value:
        return ""  # an optional input left out
    return names.get(value, f"{copy}/{value}")


# The graphs of ONE step: embed, step, head. The CPU server runs any rung with them.
#
#     step: x, h, [t,] [previous, history,] context, caches -> y, [v,] caches
#
# The step size h and the time t are given per row, so that rows of different rungs can share a
# call. Only where each step has a velocity of its own all rows are at the step of the first; a step
# that a shorter answer ends with is then at the time -(t + h), if it has one of its own too.


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
    answers = build.paste(parts.head, "head", "head", seen)
    return build.model("head", inputs, dict(zip(answers, parts.outputs, strict=True)))


def _step(build: GraphBuilder, parts: Parts, one: StepParts, table: Method) -> onnx.ModelProto:
    write = _Writer(one, parts.endings)
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
    takes_time = one.timed or len(one.velocities) > 1
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
    inputs = [state, H, *([TIME] if takes_time else []), *context, *write.taken]
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

    def __init__(self, one: StepParts, endings: int = 0) -> None:
        self.one, self.endings = one, endings
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
        if len(one.velocities) > 1:
            assert not ports
            return build.choose(
                name,
                _step_of_first(build, self.endings),
                state,
                [
                    partial(_only, build, piece, f"velocity{index}", f"{name}/{index}", inputs)
                    for index, piece in enumerate(one.velocities)
                ],
            )
        v, *given = build.paste(
            one.velocities[0], "velocity", name, inputs + [port.name for port in ports]
        )
        self.taken += ports
        for value, port in zip(given, ports, strict=True):
            self.given[value] = Port(f"{port.name}_out", port.kind, port.shape)
        self._stages += 1
        return v


def _step_of_first(build: GraphBuilder, endings: int) -> str:
    """The place, among the velocities, of the step that the first row is at, as a scalar."""
    if "first" not in build.initializers:
        build.initializers["first"] = numpy_helper.from_array(np.array(0), "first")
    steps = build.node("Div", [TIME.name, H.name], "steps_done")  # (B,)
    step = build.node("Gather", [steps, "first"], "step")
    return build.node("Add", [step, build.constant(endings)], "place") if endings else step


def _only(build: GraphBuilder, piece: Piece, owner: str, copy: str, inputs: list[str]) -> str:
    (v,) = build.paste(piece, owner, copy, inputs)
    return v


# Rungs: copies of a traced evaluation joined into a fixed-step graph by a method's tableau.


def stitch(parts: Parts, method: str, steps: int) -> onnx.ModelProto:
    """The graph of one rung in plain operators; its weights still inside."""
    table = method_named(method)
    build = GraphBuilder()
    x, *context = build.paste(parts.embed, "embed", "embed", [port.name for port in parts.inputs])
    for index in range(1 if parts.by_step else len(parts.velocities)):
        if parts.depth == "discrete":
            x = _evaluate(build, parts, index, "pass", [x, *context])
        else:
            x = _integrate(build, parts, index, table, steps, x, context)
    keep = [KEEP] if parts.keeps else []
    seen = [x, *context] if parts.head_sees_context else [x]
    answers = build.paste(parts.head, "head", "head", seen + [port.name for port in keep])
    outputs = dict(zip(answers, parts.outputs, strict=True))
    return build.model(f"{method}-{steps}", [*parts.inputs, *keep], outputs)


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
        flows = 1 if parts.by_step else len(parts.velocities)
        name = f"flow{index}/step{step}" if flows > 1 else f"step{step}"
        which = _of_step(parts, step, steps) if parts.by_step else index
        stages: list[str] = []
        for stage, (row, c) in enumerate(zip(table.a, table.c, strict=True)):
            terms = [(h * a, v) for a, v in zip(row, stages, strict=True)]
            inputs = [build.combine(f"{name}/at{stage}", x, terms), *context]
            if parts.timed:
                t = parts.T * step / grid + c * h
                inputs += [build.constant(t, parts.rank), build.constant(h, parts.rank)]
            stages.append(_evaluate(build, parts, which, f"{name}/f{stage}", inputs))
        if table.history and before is not None:
            terms = [(h * (1 + table.history), stages[0]), (-h * table.history, before)]
        else:
            terms = [(h * b, v) for b, v in zip(table.b, stages, strict=True)]
        x = build.combine(name, x, terms)
        before = stages[0]
    return x


def _of_step(parts: Parts, step: int, steps: int) -> int:
    """The velocity of a step among so many."""
    if step + 1 == steps <= parts.endings:
        return parts.endings - steps
    return min(parts.endings + step, len(parts.velocities) - 1)


def _evaluate(build: GraphBuilder, parts: Parts, index: int, name: str, inputs: list[str]) -> str:
    (v,) = build.paste(parts.velocities[index], f"velocity{index}", name, inputs)
    return v


# Shapes that a runtime cannot infer, written into a graph. Without them it takes the same length
# for a new one at every step, and opening the graph compares all buffers of a long rung with each
# other.


def keep_shapes(model: onnx.ModelProto) -> None:
    """State the shapes in which a size appears that no input of their node has.

    All others follow from these. The graph's large weights must be outside it.
    """
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    inferred = {value.name: value for value in graph.value_info}
    symbols = {
        value.name: {size.dim_param for size in value.type.tensor_type.shape.dim if size.dim_param}
        for value in (*graph.input, *graph.output, *graph.value_info)
    }

    def known(names: Iterable[str]) -> set[str]:
        return set().union(*(symbols.get(name, set()) for name in names))

    for node in model.graph.node:
        new = known(node.output) - known(node.input)
        if new:
            model.graph.value_info.extend(
                inferred[name] for name in node.output if name in inferred
            )


def short_names(model: onnx.ModelProto) -> None:
    """Give what nodes compute short names, and nodes none; inputs, outputs and weights keep theirs.

    Names of the code behind each value are two fifths of a graph, and nothing reads them.
    """
    used = {tensor.name for tensor in model.graph.initializer}
    used |= {value.name for value in (*model.graph.input, *model.graph.output)}
    free = (name for number in itertools.count() if (name := f"v{number:x}") not in used)
    _shorten(model.graph, {}, free)


def _shorten(graph: onnx.GraphProto, outer: Mapping[str, str], free: Iterator[str]) -> None:
    kept = {value.name for value in (*graph.input, *graph.output)}
    computed = (name for node in graph.node for name in node.output if name and name not in kept)
    names = {name: short for name, short in outer.items() if name not in kept}
    names |= {name: next(free) for name in computed}
    for node in graph.node:
        node.name = ""
        for values in (node.input, node.output):
            values[:] = [names.get(name, name) for name in values]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _shorten(inner, names, free)
    for value in graph.value_info:
        value.name = names.get(value.name, value.name)


# The graph files of a bundle, and the one file of their weights.


@dataclasses.dataclass(frozen=True, slots=True)
class Ladder:
    """The rungs to be made."""

    steps: tuple[int, ...]
    method: str


def write_graphs(
    folder: Path,
    traced: Traced,
    ladder: Ladder,
    precision: Precision,
    unseen: Iterable[RowArray] = (),
    scales: Scales | None = None,
    floats: bool = False,
    cache: Cache = "none",
) -> None:
    """Write all graphs and the weights; each graph is checked as it then lies there.

    Unseen are the rows on which a classifier of fewer bits is measured, scales those of its caches
    if a decoder keeps them as bytes, `floats` whether bytes become floats when they are loaded.
    """
    weights = WeightsFile(WEIGHTS)
    ranges: Ranges = {}
    if precision == "int8" and traced.task in LABELLING and not floats:
        whole = (stitch(traced.graph, ladder.method, steps) for steps in ladder.steps)
        ranges = measured_ranges(whole, unseen)
    files = step_files(traced)
    products: Products = "float" if files is None else "shared"
    if traced.step is not None and files is not None:
        graphs = stitch_step(traced.graph, traced.step, ladder.method)._asdict()
        if scales is not None:
            cache_bytes(graphs["step"].graph, scales)
        elif cache == "kv_fp16":
            half_caches(graphs["step"].graph)
        for field, name in files.graphs.items():
            _write(folder / name, graphs[field], weights, precision, ranges, floats, "own")
    for steps in ladder.steps:
        graph = stitch(traced.graph, ladder.method, steps)
        _write(folder / graph_name(steps), graph, weights, precision, ranges, floats, products)
        if traced.encoder is not None:
            encoder = stitch(traced.encoder, ladder.method, steps)
            _write(
                folder / encoder_name(steps),
                encoder,
                weights,
                precision,
                ranges,
                floats,
                products,
            )
    weights.write(folder)
    for path in folder.glob("*.onnx"):
        onnx.checker.check_model(str(path))


def _write(
    path: Path,
    graph: onnx.ModelProto,
    weights: WeightsFile,
    precision: Precision,
    ranges: Ranges,
    floats: bool,
    products: Products,
) -> None:
    plain = products != "own"  # of a whole rung
    if precision == "int8":
        use_integers(graph, ranges, plain)
        quantise(graph, plain, floats)
    if (half := half_of(precision)) is not None:
        use_half(graph, half, products)
    weights.externalise(graph)
    if plain:
        keep_shapes(graph)
    short_names(graph)
    path.write_bytes(graph.SerializeToString(deterministic=True))
