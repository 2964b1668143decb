"""Any manifest that can be made survives JSON; any mutilated one is refused or still sound."""

import json
from dataclasses import replace
from typing import Any, Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.bundle import (
    EFFORTS,
    EVALUATIONS_PER_STEP,
    LABELLING,
    AgainstFp32,
    BundleError,
    Cache,
    Calibration,
    Depth,
    FileEntry,
    ImageInput,
    InputSpec,
    Latency,
    LatencyEntry,
    Level,
    Machine,
    Manifest,
    Method,
    PointsInput,
    Precision,
    Quality,
    Range,
    Rung,
    Shape,
    StepFiles,
    Task,
    TextInput,
    TokenizerSpec,
    Truncation,
    Verified,
)
from serve.bundle.manifest import rounds
from serve.bundle.part import parse_json

TASKS: tuple[Task, ...] = get_args(Task)
Kind = Literal["classify", "prefill", "decode"]
KINDS: tuple[Kind, ...] = get_args(Kind)

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
finite = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False)
facts = st.dictionaries(
    texts,
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
entries = st.builds(
    FileEntry,
    sha256=st.binary(min_size=32, max_size=32).map(bytes.hex),
    bytes=st.integers(0, 1 << 40),
)


@st.composite
def qualities(draw: st.DrawFn, metric: str, task: Task) -> Quality:
    bound = st.floats(0, 1) if metric == "accuracy" else finite
    low, value, high = sorted(draw(st.tuples(bound, bound, bound)))
    samples = draw(st.integers(1, 10**9))
    exact = draw(st.none() | st.floats(0, 1)) if task == "tag" else None
    if metric == "accuracy":
        return Quality("accuracy", value, low, high, samples, exact)
    return Quality("loss", value, low, high, samples, exact)


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    low, value, high = sorted(draw(st.tuples(finite, finite, finite)))
    return Range(value, low, high)


@st.composite
def inputs(draw: st.DrawFn, task: Task) -> InputSpec:
    kind = draw(st.sampled_from(["text", "image", "points"])) if task == "classify" else "text"
    if kind == "image":
        channels = draw(st.integers(1, 4))
        numbers = st.lists(st.floats(0.01, 10), min_size=channels, max_size=channels).map(tuple)
        height, width = draw(st.integers(1, 4096)), draw(st.integers(1, 4096))
        mean, std = draw(numbers), draw(numbers)
        return ImageInput(channels=channels, height=height, width=width, mean=mean, std=std)
    if kind == "points":
        return PointsInput(
            max_points=draw(st.integers(1, 1 << 16)), dimensions=draw(st.integers(1, 16))
        )
    max_tokens = draw(st.integers(1, 1 << 20))
    if task not in LABELLING or draw(st.booleans()):
        exact = task in LABELLING and draw(st.booleans())
        return TextInput(max_tokens=max_tokens, exact=exact)
    head = draw(st.integers(0, max_tokens))
    tail = draw(st.integers(0 if head else 1, max_tokens - head if head else max_tokens))
    return TextInput(max_tokens=max_tokens, truncation=Truncation(head, tail))


@st.composite
def tokenizers(draw: st.DrawFn, task: Task) -> TokenizerSpec:
    vocab_size = draw(st.integers(3, 1 << 24))
    ids = st.integers(0, vocab_size - 1)
    pad, bos, eos = draw(st.lists(ids, min_size=3, max_size=3, unique=True))
    kind: Any = draw(st.sampled_from(["chars", "bpe"]))
    if task == "translate":
        return TokenizerSpec(kind, "t.json", pad, vocab_size, bos, eos)
    chat = "chat_template.jinja" if task == "generate" and draw(st.booleans()) else None
    return TokenizerSpec(kind, "t.json", pad, vocab_size, chat_template=chat)


@st.composite
def calibrations(draw: st.DrawFn) -> Calibration:
    allowed = sorted(draw(st.sets(st.floats(1e-4, 0.5), min_size=1, max_size=4)))
    found = st.lists(st.floats(0, 1e3), min_size=len(allowed), max_size=len(allowed))
    thresholds: list[float | None] = [*sorted(draw(found), reverse=True)]
    for index in range(draw(st.integers(0, len(allowed)))):
        thresholds[index] = None
    levels = [
        Level(most, threshold, draw(st.floats(1, 99)), draw(st.floats(0, most)))
        for most, threshold in zip(allowed, thresholds, strict=True)
    ]
    rows, confidence = draw(st.integers(1, 10**9)), draw(st.floats(0.5, 0.999))
    return Calibration(rows, confidence, draw(texts), tuple(levels))


@st.composite
def ladders(draw: st.DrawFn, task: Task, depth: Depth, rounds: bool) -> tuple[Rung, ...]:
    method: Method = draw(st.sampled_from(get_args(Method))) if depth != "fixed" else "euler"
    metric = draw(st.sampled_from(["loss", "accuracy"]))
    counts = st.sets(st.integers(1, 1024), min_size=1, max_size=6)
    steps = sorted(draw(counts)) if depth != "fixed" else [1]
    words = sorted(
        draw(st.sets(st.sampled_from(EFFORTS[:3]), max_size=len(steps) - 1)), key=EFFORTS.index
    )
    efforts = [*words, *[None] * (len(steps) - 1 - len(words))]
    efforts.append(draw(st.sampled_from([None, "max"])))
    stacks = 2 if task == "translate" else 1
    if depth == "chain":
        stacks *= draw(st.integers(1, 12))
    rungs = []
    shares = st.floats(0, 1)
    for count, effort in zip(steps, efforts, strict=True):
        against = AgainstFp32(draw(shares), draw(finite), 9) if rounds else None
        error, tolerance = sorted(draw(st.tuples(st.floats(0, 1), st.floats(0, 1))))
        rungs.append(
            Rung(
                steps=count,
                method=method,
                nfe=stacks * count * EVALUATIONS_PER_STEP[method],
                effort=effort,
                graph=f"steps-{count}.onnx",
                quality=draw(qualities(metric, task)),
                verified=Verified(error, tolerance, draw(st.floats(0, 1))),
                encoder=f"encoder-{count}.onnx" if task == "translate" else None,
                dominated=effort is None and draw(st.booleans()),
                against_fp32=against,
            )
        )
    return tuple(rungs)


@st.composite
def shapes(draw: st.DrawFn, caches: bool) -> Shape:
    sizes = ("layers", "heads", "head_width", "width", "parameters")
    shape = draw(st.builds(Shape, **{size: st.integers(1, 1024) for size in sizes}))
    wider = draw(st.integers(shape.width, 4096)) if caches and draw(st.booleans()) else None
    return replace(shape, state=wider)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    task: Task = draw(st.sampled_from(TASKS))
    depth: Depth = draw(st.sampled_from(get_args(Depth)))
    precision: Precision = draw(st.sampled_from(get_args(Precision)))
    keeps = task == "generate" and depth != "chain"
    cache: Cache = draw(st.sampled_from(get_args(Cache))) if keeps else "none"
    rungs = draw(ladders(task, depth, rounds(precision, cache)))
    spec = draw(inputs(task))
    tokenizer = draw(tokenizers(task)) if spec.kind == "text" else None
    labels = tuple(draw(st.lists(texts, min_size=2, max_size=5, unique=True)))
    one_step = cache != "none" or (depth == "ode" and task != "translate")
    step = StepFiles("embed.onnx", "step.onnx", "head.onnx") if one_step else None
    stops = step is not None and task in LABELLING and rungs[0].method == "euler"
    calibrated = stops and draw(st.booleans())
    timed = depth == "ode" and draw(st.booleans())
    if step is not None and stops and timed:
        step = replace(step, endings=draw(st.booleans()))
    names = ["w.bin", *(file for rung in rungs for file in rung.graphs.values())]
    names += step.graphs.values() if step is not None else ()
    return Manifest(
        name=draw(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True)),
        task=task,
        precision=precision,
        method=rungs[0].method,
        T=draw(st.floats(1e-3, 1e3)),
        full_steps=rungs[-1].steps,
        default_steps=draw(st.sampled_from([rung.steps for rung in rungs])),
        dial="time" if timed else "resolution",
        grid_steps=draw(st.integers(1, 1024)) if timed else None,
        depth=depth,
        cache=cache,
        input=spec,
        target_max_tokens=draw(st.integers(2, 1 << 20)) if task == "translate" else None,
        labels=labels if task in LABELLING else None,
        tokenizer=tokenizer,
        shape=draw(shapes(cache != "none")),
        weights="w.bin",
        rungs=rungs,
        range=draw(st.none() | ranges()) if len(rungs) > 1 else None,
        step=step,
        calibration=draw(calibrations()) if calibrated else None,
        card=draw(facts),
        provenance=draw(facts),
        files={name: draw(entries) for name in [*names, "t.json", "chat_template.jinja"]},
    )


def paths(value: object) -> list[tuple[Any, ...]]:
    """The way to every member of a JSON value, free facts left out."""
    found: list[tuple[Any, ...]] = []
    if isinstance(value, dict):
        members: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list):
        members = list(enumerate(value))
    else:
        return found
    for key, item in members:
        if key not in ("card", "provenance"):
            found += [(key,), *((key, *rest) for rest in paths(item))]
    return found


@given(manifests())
@pytest.mark.long
def test_a_manifest_survives_json(manifest: Manifest) -> None:
    text = json.dumps(manifest.to_json(), allow_nan=False, ensure_ascii=False)
    again = Manifest.from_json(parse_json(text.encode()))
    assert again == manifest
    assert again.to_json() == manifest.to_json()


@given(manifests(), st.data())
def test_a_mutilated_manifest_is_refused_or_sound(manifest: Manifest, data: st.DataObject) -> None:
    text = json.dumps(manifest.to_json())
    for _ in range(3):  # to make a manifest takes longer
        mutilated(json.loads(text), data)


def mutilated(value: Any, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(paths(value)))
    place = value
    for key in path[:-1]:
        place = place[key]
    if data.draw(st.booleans()):
        del place[path[-1]]
    else:
        anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
        empty: st.SearchStrategy[object] = st.builds(list) | st.builds(dict)
        place[path[-1]] = data.draw(anything | empty)
    try:
        sound = Manifest.from_json(value)
    except BundleError as refusal:
        assert str(refusal)  # no other exception may escape
    else:
        assert Manifest.from_json(json.loads(json.dumps(sound.to_json()))) == sound


@given(
    st.binary(max_size=200)
    | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))
)
def test_any_bytes_are_a_manifest_or_refused(text: bytes) -> None:
    try:
        Manifest.from_json(parse_json(text))
    except BundleError as refusal:
        assert str(refusal)
    else:
        raise AssertionError("no 200 bytes are a manifest")


@given(st.data())
def test_a_latency_table_survives_json(data: st.DataObject) -> None:
    points = data.draw(
        st.sets(
            st.tuples(
                st.integers(1, 1024),
                st.sampled_from(KINDS),
                st.integers(1, 256),
                st.integers(0, 1024),
            ),
            max_size=8,
        )
    )
    times = st.floats(0, 1e6)
    rows = []
    for steps, kind, batch, length in sorted(points):
        median_ms, p95_ms = sorted(data.draw(st.tuples(times, times)))
        rows.append(LatencyEntry(steps, kind, batch, length, median_ms, p95_ms))
    machine = Machine(cpu=data.draw(texts), cores=2, threads=1, runtime=data.draw(texts))
    latency = Latency(machine, data.draw(st.datetimes()).isoformat(), tuple(rows))
    assert Latency.from_json(parse_json(json.dumps(latency.to_json()))) == latency
