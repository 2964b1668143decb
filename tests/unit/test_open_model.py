"""Opening a bundle for running: threads, warming up, and graphs that break their promise."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from serve.bundle import (
    Bundle,
    BundleError,
    Manifest,
    StepFiles,
    open_staging,
    seal_bundle,
)
from serve.runtime import open_model, session
from serve.runtime.decoder import OrtDecoder
from serve.runtime.model import OrtModel
from serve.runtime.session import usable_cores
from tests.fixtures.tiny_bundles import build_classify, build_generate, restage


@pytest.fixture(scope="module")
def generate_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return build_generate(tmp_path_factory.mktemp("bundles") / "g", steps=(1, 2))


def promise(bundle: Bundle, target: Path, manifest: Manifest) -> Bundle:
    """A sealed bundle of the same graphs under another manifest."""
    with open_staging(target) as staging:
        restage(bundle, staging)
        return seal_bundle(staging, manifest, target)


@pytest.mark.parametrize("threads", [1, 2, None])
def test_the_thread_setting_is_honoured(generate_bundle: Bundle, threads: int | None) -> None:
    model = OrtModel(generate_bundle, threads)
    decoder = model.decoder(1)
    assert isinstance(decoder, OrtDecoder)
    options = decoder._passes.sessions.step.get_session_options()
    assert options.intra_op_num_threads == (threads or usable_cores())
    assert options.inter_op_num_threads == 1
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"
    assert options.get_session_config_entry("session.intra_op.spin_duration_us") == "200"


def test_two_threads_answer_as_one(generate_bundle: Bundle) -> None:
    tokens = np.arange(1, 61).reshape(1, 60)
    one, two = (open_model(generate_bundle, count).decoder(2).forward(tokens) for count in (1, 2))
    np.testing.assert_allclose(one, two, rtol=0, atol=2e-5)


def test_no_threads_are_refused(generate_bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="threads must be at least 1, not 0"):
        open_model(generate_bundle, threads=0)


def test_usable_cores_respect_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr("serve.runtime.session._CPU_QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert usable_cores() == 4
    for text, cores in (
        ("max 100000", 4),
        ("200000 100000", 2),
        ("50000 100000", 1),
        ("900000 100000", 4),
        ("nonsense", 4),
    ):
        quota.write_text(text)
        assert usable_cores() == cores


def test_warm_up_opens_and_runs_every_rung(tmp_path: Path) -> None:
    for bundle in (build_generate(tmp_path / "g"), build_classify(tmp_path / "c")):
        model = OrtModel(bundle, 1)
        model.warm_up()
        assert model.open_steps == (1, 2, 4)


def test_a_trace_needs_no_files_after_warm_up(tmp_path: Path) -> None:
    """Another bundle may have taken their place by then."""
    model = OrtModel(build_classify(tmp_path / "c"), 1)
    model.warm_up()
    shutil.rmtree(tmp_path / "c")
    found = model.step_classifier(2).traced(np.ones((1, 3), np.int64), None)
    assert found.readouts is not None and len(found.readouts) == 2


def test_rungs_open_when_first_asked_for(generate_bundle: Bundle) -> None:
    model = OrtModel(generate_bundle, 1)
    assert not model.open_steps
    decoder = model.decoder(2)
    assert model.open_steps == (2,)
    assert model.decoder(2) is decoder


def test_a_model_says_when_it_opens_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog gives such a call more time."""
    model = OrtModel(build_classify(tmp_path / "c"), 1)
    said: list[tuple[str, bool]] = []

    def watched(name: str) -> Callable[..., Any]:
        opens: Callable[..., Any] = getattr(session, name)

        def look(*given: Any) -> Any:
            said.append((name, model.opening))
            return opens(*given)

        return look

    for name in ("open_session", "open_steps"):
        monkeypatch.setattr(f"serve.runtime.model.{name}", watched(name))
    model.classifier(1)
    model.step_classifier(1)
    assert said == [("open_session", True), ("open_steps", True)] and not model.opening


def test_warm_up_of_a_window_of_one_token(tmp_path: Path) -> None:
    open_model(build_generate(tmp_path / "g", max_tokens=1, steps=(1,)), threads=1).warm_up()


Change = Callable[[Manifest], Manifest]
PROMISES: dict[str, tuple[Change, str]] = {
    "fewer layers": (
        lambda m: replace(m, shape=replace(m.shape, layers=1)),
        "step.onnx: has the unknown input k_0_1",
    ),
    "more layers": (
        lambda m: replace(m, shape=replace(m.shape, layers=3)),
        "step.onnx: has no input k_0_2",
    ),
    "other heads": (
        lambda m: replace(m, shape=replace(m.shape, heads=4)),
        "step.onnx: has the input k_0_0 as tensor(float) ['batch', 2, 'capacity', 16] instead",
    ),
    "another width": (
        lambda m: replace(m, shape=replace(m.shape, width=64)),
        "embed.onnx: has the output x as tensor(float) ['batch', 'length', 32] instead",
    ),
    "other vocabulary": (
        lambda m: replace(m, tokenizer=replace(m.text_tokenizer, vocab_size=99)),
        "head.onnx: has the output logits as tensor(float)",
    ),
    "another task": (
        lambda m: replace(
            m,
            task="classify",
            cache="none",
            labels=("a", "b"),
            step=StepFiles("embed.onnx", "step.onnx", "head.onnx"),
        ),
        "steps-1.onnx: has the unknown input keep",
    ),
    "another method": (
        lambda m: replace(m, method="ab2", rungs=tuple(replace(r, method="ab2") for r in m.rungs)),
        "step.onnx: has no input previous",
    ),
    "graphs swapped": (
        lambda m: replace(m, step=StepFiles("step.onnx", "embed.onnx", "head.onnx")),
        "step.onnx: has no input tokens",
    ),
}


@pytest.mark.parametrize("case", PROMISES)
def test_a_graph_that_breaks_its_promise_is_refused(
    generate_bundle: Bundle, tmp_path: Path, case: str
) -> None:
    change, message = PROMISES[case]
    bundle = promise(generate_bundle, tmp_path / "b", change(generate_bundle.manifest))
    with pytest.raises(BundleError) as refusal:
        open_model(bundle, threads=1).warm_up()
    assert message in str(refusal.value)


@pytest.mark.parametrize("task", ["generate", "classify"])
def test_a_longer_window_than_the_graph_has_is_refused(
    generate_bundle: Bundle, tmp_path: Path, task: str
) -> None:
    bundle = generate_bundle if task == "generate" else build_classify(tmp_path / "c")
    spec = bundle.manifest.text_input
    longer = replace(spec, max_tokens=spec.max_tokens + 1)
    bundle = promise(bundle, tmp_path / "b", replace(bundle.manifest, input=longer))
    with pytest.raises(
        BundleError, match=r"steps?(-1)?\.onnx: fails on \d+ tokens .* export the bundle"
    ):
        open_model(bundle, threads=1).warm_up()


def test_a_larger_vocabulary_than_a_classifier_has_is_refused(tmp_path: Path) -> None:
    bundle = build_classify(tmp_path / "c")
    larger = replace(bundle.manifest.text_tokenizer, vocab_size=4096)
    bundle = promise(bundle, tmp_path / "b", replace(bundle.manifest, tokenizer=larger))
    with pytest.raises(BundleError, match=r"steps-1\.onnx: fails on 48 tokens .* of 4096"):
        open_model(bundle, threads=1).warm_up()


def test_a_graph_that_is_no_graph_is_refused(generate_bundle: Bundle, tmp_path: Path) -> None:
    with open_staging(tmp_path / "b") as staging:
        restage(generate_bundle, staging)
        (staging / "step.onnx").write_bytes(b"no graph")
        bundle = seal_bundle(staging, generate_bundle.manifest, tmp_path / "b")
    with pytest.raises(BundleError, match=r"step\.onnx: cannot be opened by onnxruntime"):
        open_model(bundle, threads=1).warm_up()


def test_weights_that_are_too_short_are_refused(generate_bundle: Bundle, tmp_path: Path) -> None:
    with open_staging(tmp_path / "b") as staging:
        restage(generate_bundle, staging)
        (staging / "weights.bin").write_bytes(b"short")
        bundle = seal_bundle(staging, generate_bundle.manifest, tmp_path / "b")
    with pytest.raises(BundleError, match=r"embed\.onnx: cannot be opened by onnxruntime"):
        open_model(bundle, threads=1).warm_up()


@pytest.mark.parametrize("absolute", [True, False])
def test_a_graph_whose_weights_lie_elsewhere_is_refused(
    generate_bundle: Bundle, tmp_path: Path, absolute: bool
) -> None:
    elsewhere = tmp_path / "elsewhere.bin"
    elsewhere.write_bytes(generate_bundle.weights_path.read_bytes())
    with open_staging(tmp_path / "b") as staging:
        restage(generate_bundle, staging)
        graph = onnx.load(staging / "step.onnx", load_external_data=False)
        for tensor in graph.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = str(elsewhere) if absolute else f"../{elsewhere.name}"
        (staging / "step.onnx").write_bytes(graph.SerializeToString())
        bundle = seal_bundle(staging, generate_bundle.manifest, tmp_path / "b")
    with pytest.raises(BundleError, match=r"step\.onnx: cannot be opened .*External file"):
        open_model(bundle, threads=1).warm_up()
