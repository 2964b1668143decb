"""Any manifest that can be made survives JSON; any mutilated one is refused or still sound."""

import json
from typing import Any, Literal, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from serve.bundle import (
    EFFORTS,
    EVALUATIONS_PER_STEP,
    BundleError,
    FileEntry,
    InputSpec,
    Latency,
    LatencyEntry,
    Machine,
    Manifest,
    Method,
    Quality,
    Rung,
    Shape,
    Task,
    TokenizerSpec,
    Truncation,
    Verified,
)
from serve.bundle_fields import parse_json

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
    sha256=st.text("0123456789abcdef", min_size=64, max_size=64),
    bytes=st.integers(0, 1 << 40),
)


@st.composite
def qualities(draw: st.DrawFn, metric: str) -> Quality:
    bound = st.floats(0, 1) if metric == "accuracy" else finite
    low, value, high = sorted(draw(st.tuples(bound, bound, bound)))
    samples = draw(st.integers(1, 10**9))
    if metric == "accuracy":
        return Quality("accuracy", value, low, high, samples)
    return Quality("loss", value, low, high, samples)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    task: Task = draw(st.sampled_from(TASKS))
    method: Method = draw(st.sampled_from(get_args(Method)))
    metric = draw(st.sampled_from(["loss", "accuracy"]))
    steps = sorted(draw(st.sets(st.integers(1, 1024), min_size=1, max_size=6)))
    words = sorted(
        draw(st.sets(st.sampled_from(EFFORTS[:3]), max_size=len(steps) - 1)), key=EFFORTS.index
    )
    efforts = [*words, *[None] * (len(steps) - 1 - len(words))]
    efforts.append(draw(st.sampled_from([None, "max"])))
    max_tokens = draw(st.integers(1, 1 << 20))
    truncation = None
    labels = None
    if task == "classify":
        labels = tuple(draw(st.lists(texts, min_size=2, max_size=5, unique=True)))
        if draw(st.booleans()):
            head = draw(st.integers(0, max_tokens))
            tail = draw(st.integers(0 if head else 1, max_tokens - head if head else max_tokens))
            truncation = Truncation(head, tail)
    vocab_size = draw(st.integers(2, 1 << 24))
    rungs = []
    for count, effort in zip(steps, efforts, strict=True):
        error, tolerance = sorted(draw(st.tuples(st.floats(0, 1), st.floats(0, 1))))
        rungs.append(
            Rung(
                steps=count,
                method=method,
                nfe=count * EVALUATIONS_PER_STEP[method],
                effort=effort,
                graph=f"steps-{count}.onnx",
                quality=draw(qualities(metric)),
                verified=Verified(error, tolerance, draw(st.floats(0, 1))),
            )
        )
    names = ["w.bin", "t.json", *(rung.graph for rung in rungs)]
    return Manifest(
        name=draw(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True)),
        task=task,
        method=method,
        T=draw(st.floats(1e-3, 1e3)),
        full_steps=steps[-1],
        default_steps=draw(st.sampled_from(steps)),
        input=InputSpec("text", max_tokens, truncation),
        labels=labels,
        tokenizer=TokenizerSpec(
            draw(st.sampled_from(["chars", "bpe"])),
            "t.json",
            draw(st.integers(0, vocab_size - 1)),
            vocab_size,
        ),
        shape=draw(st.builds(Shape, *[st.integers(1, 1024)] * 5)),
        weights="w.bin",
        rungs=tuple(rungs),
        card=draw(facts),
        provenance=draw(facts),
        files={name: draw(entries) for name in names},
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
def test_a_manifest_survives_json(manifest: Manifest) -> None:
    text = json.dumps(manifest.to_json(), allow_nan=False, ensure_ascii=False)
    again = Manifest.from_json(parse_json(text.encode()))
    assert again == manifest
    assert again.to_json() == manifest.to_json()


@settings(max_examples=300)
@given(manifests(), st.data())
def test_a_mutilated_manifest_is_refused_or_sound(manifest: Manifest, data: st.DataObject) -> None:
    value = json.loads(json.dumps(manifest.to_json()))
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
