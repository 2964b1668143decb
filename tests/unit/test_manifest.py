"""One test per malformed manifest: each is refused with the field named."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from serve.bundle import BundleError, Manifest
from tests.fixtures.tiny_bundles import build_classify, build_generate

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def generate_json(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return build_generate(tmp_path_factory.mktemp("bundles") / "g").manifest.to_json()


@pytest.fixture(scope="module")
def classify_json(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return build_classify(tmp_path_factory.mktemp("bundles") / "c").manifest.to_json()


def put(*path: str | int, to: object) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        place: Any = manifest
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return change


def drop(*path: str | int) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        place: Any = manifest
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


LEVEL = {"max_disagreement": 0.01, "threshold": 1.5, "evaluations": 1.2, "observed": 0.001}
GENERATE_CASES: dict[str, tuple[Change, str]] = {
    "unknown key": (put("color", to=1), "color is not a known key"),
    "unknown key in a rung": (put("rungs", 0, "color", to=1), "rungs[0].color is not a known key"),
    "unknown key in the input": (put("input", "color", to=1), "input.color is not a known key"),
    "unknown key in a quality": (
        put("rungs", 1, "quality", "mean", to=1.0),
        "rungs[1].quality.mean is not a known key",
    ),
    "missing key": (drop("task"), "task is missing"),
    "missing key in a rung": (drop("rungs", 2, "nfe"), "rungs[2].nfe is missing"),
    "missing key in the tokenizer": (drop("tokenizer", "pad_id"), "tokenizer.pad_id is missing"),
    "missing quality": (drop("rungs", 0, "quality"), "rungs[0].quality is missing"),
    "missing verification": (drop("rungs", 0, "verified"), "rungs[0].verified is missing"),
    "missing schema version": (drop("schema_version"), "schema_version is missing"),
    "older schema": (put("schema_version", to=0), "schema_version is 0, but this release reads"),
    "later schema": (put("schema_version", to=3), "use the release that wrote the bundle"),
    "schema as text": (put("schema_version", to="1"), "schema_version is '1'"),
    "schema as boolean": (put("schema_version", to=True), "schema_version is true"),
    "input is a list": (put("input", to=[]), "input must be an object, not []"),
    "rungs are an object": (put("rungs", to={}), "rungs must be a list, not {}"),
    "a rung is a number": (put("rungs", 1, to=4), "rungs[1] must be an object, not 4"),
    "quality is null": (put("rungs", 0, "quality", to=None), "rungs[0].quality must be an object"),
    "empty name": (put("name", to=""), "name is ''"),
    "name of upper case": (put("name", to="Shakespeare"), "name is 'Shakespeare'"),
    "name with a slash": (put("name", to="a/b"), "name is 'a/b'"),
    "name that ends its line": (put("name", to="a\n"), "name is"),
    "name too long": (put("name", to="a" * 65), "name is"),
    "name is null": (put("name", to=None), "name must be a string, not null"),
    "unknown task": (put("task", to="compose"), "task must be 'generate', 'classify', 'tr"),
    "unknown precision": (
        put("precision", to="fp8"),
        "precision must be 'fp32', 'fp16', 'bf16' or 'int8'",
    ),
    "unknown method": (put("method", to="leapfrog"), "method must be 'euler'"),
    "task is a list": (put("task", to=["generate"]), "task must be 'generate'"),
    "T is zero": (put("T", to=0), "T must be at least 0.000001, not 0"),
    "T is text": (put("T", to="1.0"), "T must be a number, not '1.0'"),
    "T is a boolean": (put("T", to=True), "T must be a number, not true"),
    "T is enormous": (put("T", to=10**400), "T must be a number that is not too large"),
    "no rungs": (put("rungs", to=[]), "rungs must have at least 1 item, not 0"),
    "too many rungs": (put("rungs", to="65 of 0"), "rungs must have at most 64 items"),
    "duplicate rung": (put("rungs", 1, to="copy of 0"), "rungs[1].steps is 1 after 1; sort"),
    "unsorted rungs": (put("rungs", to="reversed"), "sort rungs by steps"),
    "zero steps": (put("rungs", 0, "steps", to=0), "rungs[0].steps must be at least 1, not 0"),
    "absurd steps": (put("rungs", 2, "steps", to=10**9), "rungs[2].steps must be at most 1024"),
    "steps are a float": (put("rungs", 0, "steps", to=1.0), "rungs[0].steps must be an integer"),
    "steps are a boolean": (put("rungs", 0, "steps", to=True), "rungs[0].steps must be an integer"),
    "nfe inconsistent": (
        put("rungs", 1, "nfe", to=4),
        "rungs[1].nfe is 4, but must be 2 for 2",
    ),
    "two methods": (put("rungs", 1, "method", to="ab2"), "rungs[1].method is ab2, but the bundle"),
    "unknown effort": (
        put("rungs", 0, "effort", to="tiny"),
        "rungs[0].effort must be 'low', 'medium'",
    ),
    "duplicate effort": (
        put("rungs", 1, "effort", to="low"),
        "rungs[1].effort is low after low; each word",
    ),
    "efforts descend": (put("rungs", 0, "effort", to="high"), "a greater effort has more steps"),
    "max twice": (
        put("rungs", 1, "effort", to="max"),
        "rungs[2].effort is max after max; each word",
    ),
    "effort of a dominated rung": (
        put("rungs", 0, "dominated", to=True),
        "rungs[0].effort must be null where dominated is true",
    ),
    "dominated is a number": (
        put("rungs", 0, "dominated", to=1),
        "rungs[0].dominated must be a boolean, not 1",
    ),
    "compared in float32": (
        put("rungs", 0, "against_fp32", to={"top1_agreement": 1, "change": 0, "samples": 9}),
        "rungs[0].against_fp32 must be null where precision is fp32",
    ),
    "8 bits, not compared": (
        put("precision", to="int8"),
        "rungs[0].against_fp32 must not be null where precision is int8",
    ),
    "no graphs of one step": (
        put("step", to=None),
        "step must not be null where depth is ode and task is generate",
    ),
    "step without a head": (drop("step", "head"), "step.head is missing"),
    "step graph shared": (put("step", "step", to="steps-1.onnx"), "which is step.step already"),
    "a generator is calibrated": (
        put(
            "calibration",
            to={"rows": 1, "confidence": 0.9, "source": "s", "levels": [LEVEL]},
        ),
        "calibration must be null where task is generate",
    ),
    "graph is a path": (put("rungs", 0, "graph", to="../steps-1.onnx"), "no plain file name"),
    "graph is absolute": (put("rungs", 0, "graph", to="/etc/passwd"), "no plain file name"),
    "graph of a folder": (put("rungs", 0, "graph", to="a\\b.onnx"), "no plain file name"),
    "graph is hidden": (put("rungs", 0, "graph", to=".."), "no plain file name"),
    "graph shared": (
        put("rungs", 1, "graph", to="steps-1.onnx"),
        "rungs[1].graph is steps-1.onnx, which is rungs[0].graph already",
    ),
    "graph is the manifest": (
        put("rungs", 0, "graph", to="manifest.json"),
        "rungs[0].graph is manifest.json, which is the manifest already",
    ),
    "weights escape": (put("weights", to="../weights.bin"), "weights is '../weights.bin', which"),
    "weights are the tokenizer": (put("weights", to="tokenizer.json"), "tokenizer.file is"),
    "weights are unlisted": (put("weights", to="other.bin"), "files does not list other.bin"),
    "weights are a number": (put("weights", to=1), "weights must be a string, not 1"),
    "tokenizer escapes": (put("tokenizer", "file", to="a/b"), "tokenizer.file is 'a/b', which"),
    "tokenizer is unlisted": (put("tokenizer", "file", to="t.json"), "does not list t.json"),
    "unknown tokenizer": (
        put("tokenizer", "kind", to="syllables"),
        "tokenizer.kind must be 'chars', 'bpe'",
    ),
    "padding outside": (
        put("tokenizer", "pad_id", to=10**6),
        "pad_id must be less than vocab_size",
    ),
    "negative padding": (put("tokenizer", "pad_id", to=-1), "tokenizer.pad_id must be at least 0"),
    "absurd vocabulary": (put("tokenizer", "vocab_size", to=1 << 40), "tokenizer.vocab_size must"),
    "full steps wrong": (
        put("full_steps", to=8),
        "full_steps is 8, but the largest step count has 4",
    ),
    "default steps wrong": (
        put("default_steps", to=3),
        "default_steps is 3, which is no step count",
    ),
    "default steps null": (put("default_steps", to=None), "default_steps must be an integer"),
    "input is an image": (put("input", "kind", to="image"), "input.channels is missing"),
    "input is a sound": (
        put("input", "kind", to="sound"),
        "input.kind must be one of 'text', 'image', 'points'",
    ),
    "no tokens": (put("input", "max_tokens", to=0), "input.max_tokens must be at least 1"),
    "absurd tokens": (put("input", "max_tokens", to=1 << 60), "input.max_tokens must be at most"),
    "a prompt of a fixed length": (
        put("input", "exact", to=True),
        "input.exact must be false where task is generate",
    ),
    "truncation of a prompt": (
        put("input", "truncation", to={"head": 1, "tail": 1}),
        "input.truncation must be null where task is generate",
    ),
    "labels of a generator": (
        put("labels", to=["a", "b"]),
        "labels must be null where task is generate",
    ),
    "absurd layers": (put("shape", "layers", to=10**7), "shape.layers must be at most 1024"),
    "no heads": (put("shape", "heads", to=0), "shape.heads must be at least 1"),
    "negative width": (put("shape", "width", to=-1), "shape.width must be at least 1"),
    "absurd head width": (put("shape", "head_width", to=10**5000), "shape.head_width must be"),
    "parameters as text": (put("shape", "parameters", to="2M"), "shape.parameters must be an"),
    "NaN quality": (
        put("rungs", 0, "quality", "value", to=float("nan")),
        "rungs[0].quality.value must be a finite number",
    ),
    "infinite quality": (
        put("rungs", 0, "quality", "high", to=float("inf")),
        "rungs[0].quality.high must be a finite number",
    ),
    "interval beside its value": (
        put("rungs", 0, "quality", "low", to=99.0),
        "rungs[0].quality.low is 99.0, above value (2.0)",
    ),
    "unknown metric": (
        put("rungs", 0, "quality", "metric", to="f1"),
        "quality.metric must be 'loss', 'accuracy' or 'bleu'",
    ),
    "two metrics": (
        put("rungs", 1, "quality", to=dict(metric="accuracy", value=1, low=1, high=1, samples=9)),
        "rungs[1].quality.metric is accuracy, but the first step count's is loss",
    ),
    "percent as accuracy": (
        put(
            "rungs", 1, "quality", to=dict(metric="accuracy", value=85, low=84, high=86, samples=9)
        ),
        "rungs[1].quality.value must be from 0 to 1 where metric is accuracy",
    ),
    "no samples": (
        put("rungs", 0, "quality", "samples", to=0),
        "quality.samples must be at least 1",
    ),
    "failed verification": (
        put("rungs", 0, "verified", "max_abs_error", to=1.0),
        "rungs[0].verified.max_abs_error is 1.0, above tolerance (0.0001)",
    ),
    "negative tolerance": (
        put("rungs", 0, "verified", "tolerance", to=-1.0),
        "rungs[0].verified.tolerance must be at least 0",
    ),
    "card is text": (put("card", to="hello"), "card must be an object, not 'hello'"),
    "card has half a character": (put("card", "title", to="\ud800"), "card cannot be written"),
    "provenance is null": (put("provenance", to=None), "provenance must be an object, not null"),
    "files are a list": (put("files", to=[]), "files must be an object"),
    "a file escapes": (put("files", "../x", to=dict(sha256="0" * 64, bytes=1)), "files is '../x'"),
    "the manifest is a file": (
        put("files", "manifest.json", to=dict(sha256="0" * 64, bytes=1)),
        "files lists manifest.json, which is never hashed",
    ),
    "hash of upper case": (
        put("files", "weights.bin", "sha256", to="A" * 64),
        "but must be 64 lower-case hexadecimal digits",
    ),
    "short hash": (
        put("files", "weights.bin", "sha256", to="0"),
        "files['weights.bin'].sha256 is '0', but must be 64 lower-case",
    ),
    "absurd size": (
        put("files", "weights.bin", "bytes", to=1 << 60),
        "files['weights.bin'].bytes must be at most",
    ),
    "negative size": (put("files", "weights.bin", "bytes", to=-1), "bytes must be at least 0"),
    "too many files": (
        put("files", to={f"f{index}": None for index in range(1025)}),
        "files has 1025 entries",
    ),
    "a file entry is a number": (put("files", "weights.bin", to=3), "files['weights.bin'] must be"),
}

CLASSIFY_CASES: dict[str, tuple[Change, str]] = {
    "no labels": (put("labels", to=None), "labels must not be null where task is classify"),
    "one label": (put("labels", to=["only"]), "labels must have at least 2 items, not 1"),
    "repeated label": (put("labels", to=["a", "a"]), "labels[1] repeats 'a'"),
    "empty label": (put("labels", to=["a", ""]), "labels[1] must have at least 1 character"),
    "label is a number": (put("labels", to=["a", 2]), "labels[1] must be a string, not 2"),
    "label is half a character": (put("labels", to=["a", "\udc00"]), "labels[1] holds half"),
    "labels are text": (put("labels", to="ab"), "labels must be a list, not 'ab'"),
    "a length that is fixed, and cut": (
        put("input", "exact", to=True),
        "input.truncation must be null where exact is true",
    ),
    "a fixed length in words": (put("input", "exact", to="yes"), "input.exact must be a boolean"),
    "truncation too long": (
        put("input", "truncation", "tail", to=40),
        "input.truncation keeps 56 tokens, more than max_tokens (48)",
    ),
    "truncation keeps nothing": (
        put("input", "truncation", to={"head": 0, "tail": 0}),
        "input.truncation.head must be at least 1",
    ),
    "negative truncation": (
        put("input", "truncation", "head", to=-1),
        "input.truncation.head must be at least 0",
    ),
}


def broken(manifest: dict[str, Any], change: Change) -> dict[str, Any]:
    broken = copy.deepcopy(manifest)
    change(broken)
    if broken["rungs"] == "reversed":
        broken["rungs"] = manifest["rungs"][::-1]
    if broken["rungs"] == "65 of 0":
        broken["rungs"] = manifest["rungs"][:1] * 65
    if isinstance(broken["rungs"], list) and "copy of 0" in broken["rungs"]:
        broken["rungs"][1] = {**manifest["rungs"][0], "graph": "again.onnx"}
    return broken


@pytest.mark.parametrize("case", GENERATE_CASES)
def test_malformed_generate_manifest_is_refused(case: str, generate_json: dict[str, Any]) -> None:
    change, message = GENERATE_CASES[case]
    with pytest.raises(BundleError) as refusal:
        Manifest.from_json(broken(generate_json, change))
    assert message in str(refusal.value)


@pytest.mark.parametrize("case", CLASSIFY_CASES)
def test_malformed_classify_manifest_is_refused(case: str, classify_json: dict[str, Any]) -> None:
    change, message = CLASSIFY_CASES[case]
    with pytest.raises(BundleError) as refusal:
        Manifest.from_json(broken(classify_json, change))
    assert message in str(refusal.value)


def test_manifest_survives_json(
    generate_json: dict[str, Any], classify_json: dict[str, Any]
) -> None:
    for value in (generate_json, classify_json):
        manifest = Manifest.from_json(json.loads(json.dumps(value)))
        assert manifest.to_json() == value
        assert Manifest.from_json(manifest.to_json()) == manifest


def test_rung_is_found_by_its_steps(generate_json: dict[str, Any]) -> None:
    manifest = Manifest.from_json(generate_json)
    assert manifest.rung(2).graph == "steps-2.onnx"
    with pytest.raises(BundleError, match="does not offer 3 steps; it has 1, 2, 4"):
        manifest.rung(3)
