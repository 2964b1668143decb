"""docs/bundle.schema.json takes what the reader takes, and refuses what a schema can refuse.

It is written from the reader's classes; the reader is the measure here too.
"""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from jsonschema import Draft202012Validator

from docs import generate
from serve.bundle import (
    EFFORTS,
    METHODS,
    SCHEMA_VERSION,
    AgainstFp32,
    Bundle,
    Cache,
    Calibration,
    Depth,
    Dial,
    FileEntry,
    ImageInput,
    Latency,
    LatencyEntry,
    Level,
    Machine,
    Manifest,
    Metric,
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
from tests.fixtures.tiny_folders import (
    classify_bundle,
    generate_bundle,
    image_bundle,
    points_bundle,
    prefix_bundle,
    tag_bundle,
    translate_bundle,
    words_tag_bundle,
)
from tests.property.test_manifest_round_trip import manifests
from tests.unit.test_manifest import CLASSIFY_CASES, GENERATE_CASES, broken
from tests.unit.test_manifest_families import CASES, changed

ROOT = Path(__file__).resolve().parent.parent.parent
SCHEMA = json.loads((ROOT / "docs" / "bundle.schema.json").read_text(encoding="utf-8"))
DEFINED = SCHEMA["$defs"]
SEAL = {"seal": "0" * 64}
PARTS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Manifest,
        Latency,
        FileEntry,
        TextInput,
        Truncation,
        ImageInput,
        PointsInput,
        TokenizerSpec,
        Shape,
        StepFiles,
        Rung,
        Quality,
        Range,
        Verified,
        AgainstFp32,
        Calibration,
        Level,
        Machine,
        LatencyEntry,
    )
}
# What only a reader can tell: sums and products, order, what two members share, what JSON itself
# has no words for, and the seal.
READER_ONLY = {
    *("steps are a float", "name that ends its line", "NaN quality", "card has half a character"),
    *("label is half a character", "interval beside its value", "failed verification"),
    *("duplicate rung", "unsorted rungs", "nfe inconsistent", "two methods", "two metrics"),
    *("duplicate effort", "efforts descend", "max twice"),
    *("graph shared", "step graph shared", "graph is the manifest", "weights are the tokenizer"),
    *("weights are unlisted", "tokenizer is unlisted"),
    *("padding outside", "full steps wrong", "default steps wrong"),
    *("truncation too long", "truncation keeps nothing"),
}
READER_ONLY_OF_FAMILIES = (
    "for 1 channels",
    "of euler",
    "is 1, like bos_id",
    "is 0, like pad_id",
    "tokenizer.bos_id must be less than",
    "is encoder-1.onnx, which is",
    "is weights already",
    "files does not list",
    "for one step count",
    "range.value is 0.1, above high",
    "shape.width is 32, above state",
    "is tokenizer.file already",
)


# Bundles of earlier releases have none.
OPTIONAL = {
    "TokenizerSpec": {"chat_template"},
    "Manifest": {"dial", "grid_steps", "range", "embedding"},
    "Shape": {"state"},
    "Quality": {"exact"},
    "TextInput": {"exact"},
    "StepFiles": {"endings"},
}


def validator(part: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/$defs/{part}", "$defs": DEFINED})


def accepts(manifest: dict[str, Any]) -> bool:
    return bool(validator("Manifest").is_valid({**manifest, **SEAL}))


TINY = (
    *(classify_bundle, generate_bundle, image_bundle, points_bundle),
    *(prefix_bundle, translate_bundle, tag_bundle, words_tag_bundle),
)
KEPT = sorted(
    path.parent
    for where in ("zoo", f"tests/golden/version-{SCHEMA_VERSION}")
    for path in ROOT.glob(f"{where}/*/manifest.json")
)


def test_the_schema_is_that_of_the_code() -> None:
    written = (ROOT / "docs" / "bundle.schema.json").read_text(encoding="utf-8")
    assert written == generate.bundle_schema(), "write it again: python -m docs.generate"


def test_the_schema_is_one_and_has_the_keys_of_the_code() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    for part, kind in PARTS.items():
        expected = {field.name for field in fields(kind)}
        keys = set(DEFINED[part]["properties"])
        assert keys - SEAL.keys() == expected, part
        assert set(DEFINED[part]["required"]) == keys - OPTIONAL.get(part, set()), part
        assert DEFINED[part]["additionalProperties"] is False, part
    objects = {name for name, part in DEFINED.items() if part.get("additionalProperties") is False}
    assert objects == PARTS.keys()


def test_the_schema_has_the_words_of_the_code() -> None:
    manifest, rung = DEFINED["Manifest"]["properties"], DEFINED["Rung"]["properties"]
    for key, words in (
        ("task", Task),
        ("depth", Depth),
        ("dial", Dial),
        ("cache", Cache),
        ("precision", Precision),
    ):
        assert set(manifest[key]["enum"]) == set(get_args(words))
    assert manifest["method"]["enum"] == rung["method"]["enum"] == list(METHODS)
    assert rung["effort"]["anyOf"][0]["enum"] == list(EFFORTS)
    assert set(DEFINED["Quality"]["properties"]["metric"]["enum"]) == set(get_args(Metric))
    assert manifest["schema_version"]["const"] == SCHEMA_VERSION


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_every_bundle_that_is_kept_is_of_the_schema(folder: Path) -> None:
    check(folder)


@pytest.mark.parametrize("bundle", TINY)
def test_every_tiny_bundle_is_of_the_schema(bundle: Callable[[], Bundle]) -> None:
    check(bundle().folder)


def check(folder: Path) -> None:
    for part in ("Manifest", "Latency"):
        path = folder / f"{part.lower()}.json"
        if path.exists():
            value = json.loads(path.read_text(encoding="utf-8"))
            validator(part).validate(value)
            assert Draft202012Validator(SCHEMA).is_valid(value)


# Without the number that Python itself refuses to read from JSON, or to show.
@pytest.mark.parametrize(
    "case", [case for case in GENERATE_CASES | CLASSIFY_CASES if case != "absurd head width"]
)
def test_a_malformed_manifest_is_refused_where_a_schema_can_tell(case: str) -> None:
    sound = (generate_bundle if case in GENERATE_CASES else classify_bundle)().manifest.to_json()
    change = (GENERATE_CASES | CLASSIFY_CASES)[case][0]
    assert accepts(sound)
    assert accepts(broken(sound, change)) == (case in READER_ONLY)


@pytest.mark.parametrize(("bundle", "path", "value", "message"), CASES)
def test_a_malformed_family_is_refused_where_a_schema_can_tell(
    bundle: Callable[[], Bundle], path: str, value: object, message: str
) -> None:
    known = any(part in message for part in READER_ONLY_OF_FAMILIES)
    assert accepts(changed(bundle, path, value)) == known, message


def test_a_broken_seal_or_latency_table_is_refused() -> None:
    bundle = generate_bundle()
    sealed = {**bundle.manifest.to_json(), **SEAL}
    for seal in (None, "0" * 63, "A" * 64):
        assert not validator("Manifest").is_valid({**sealed, "seal": seal})
    assert bundle.latency is not None
    table = bundle.latency.to_json()
    for key, value in (("kind", "train"), ("batch", 0), ("median_ms", "1"), ("steps", 1025)):
        entry = {**table["entries"][0], key: value}
        assert not validator("Latency").is_valid({**table, "entries": [entry]})


@settings(max_examples=60, deadline=None)
@given(manifests())
def test_what_the_reader_takes_is_of_the_schema(manifest: Manifest) -> None:
    validator("Manifest").validate({**json.loads(json.dumps(manifest.to_json())), **SEAL})
