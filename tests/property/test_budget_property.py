"""Whatever is asked, the decision is a rung of the ladder or one kind of error: never a crash."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from serve.budget import BudgetRequest, decide
from serve.bundle import EFFORTS, Effort, Manifest
from serve.errors import ImpossibleBudget
from tests.fixtures.tiny_folders import classify_bundle

BASE = classify_bundle().manifest
LOWER: tuple[Effort, ...] = ("low", "medium", "high")


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    counts = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=6)))
    words: list[Effort] = [word for word in LOWER if draw(st.booleans())][: len(counts) - 1]
    rungs = []
    for index, steps in enumerate(counts):
        effort: Effort | None = words[index] if index < len(words) else None
        if index == len(counts) - 1 and draw(st.booleans()):
            effort = "max"
        rung = replace(BASE.rungs[0], steps=steps, nfe=steps, effort=effort, graph=f"{steps}.onnx")
        rungs.append(rung)
    default = draw(st.sampled_from(counts))
    return replace(BASE, rungs=tuple(rungs), full_steps=counts[-1], default_steps=default)


@settings(deadline=None)
@given(
    manifest=manifests(),
    steps=st.none() | st.integers(1, 64) | st.integers(),
    effort=st.none() | st.sampled_from(EFFORTS),
    deadline_ms=st.none() | st.floats(1, 1000),
    limits=st.tuples(*[st.none() | st.integers(1, 70)] * 2),
)
def test_every_ask_has_an_answer(
    manifest: Manifest,
    steps: int | None,
    effort: Effort | None,
    deadline_ms: float | None,
    limits: tuple[int | None, int | None],
) -> None:
    ladder = {rung.steps: rung for rung in manifest.rungs}
    efforts = {rung.effort: rung for rung in manifest.rungs if rung.effort is not None}
    try:
        decision = decide(BudgetRequest(steps, effort, None, deadline_ms, *limits), manifest)
    except ImpossibleBudget as error:
        assert error.param in ("steps", "effort", "min_steps", "max_steps")
        if limits == (None, None):
            both = steps is not None and effort is not None
            assert both or (steps is not None and steps not in ladder)
        return
    assert decision.full is manifest.rungs[-1]
    least, most = limits
    for one in (*decision.step_choices, decision.steps):
        assert one in ladder and (least or 0) <= one <= (most or one)
    assert list(decision.choices) == sorted(decision.choices, key=lambda rung: rung.steps)
    if decision.choices:
        assert decision.choices[-1] is decision.rung
    match decision.reason:
        case "exact":
            assert decision.rung is ladder[steps or 0]
        case "effort":
            assert effort is not None and decision.rung is efforts.get(effort, decision.rung)
            assert not decision.rung.dominated
        case "deadline":
            assert steps is None and effort is None and deadline_ms is not None
            assert decision.steps == max(one for one in ladder if one <= (most or one))
        case "default":
            assert steps is None and effort is None and deadline_ms is None
            inside = (least or 0) <= manifest.default_steps <= (most or manifest.default_steps)
            assert not inside or decision.steps == manifest.default_steps
