"""Manifests of every family: what each task and depth asks is checked, and version 1 is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from serve.bundle import Bundle, BundleError, Manifest
from tests.fixtures.tiny_folders import (
    classify_bundle,
    generate_bundle,
    image_bundle,
    points_bundle,
    prefix_bundle,
    tag_bundle,
    translate_bundle,
)

STEP = {"embed": "a.onnx", "step": "b.onnx", "head": "c.onnx"}

IMAGES = {
    "kind": "image",
    "channels": 1,
    "height": 6,
    "width": 5,
    "mean": [0.5],
    "std": [0.25],
}
CASES: list[tuple[Callable[[], Bundle], str, object, str]] = [
    (image_bundle, "input.kind", "sound", "input.kind must be one of 'text', 'image', 'points'"),
    (image_bundle, "input.channels", 5, "input.channels must be at most 4"),
    (image_bundle, "input.height", 0, "input.height must be at least 1"),
    (image_bundle, "input.mean", [0.5, 0.5], "input.mean has 2 numbers for 1 channels"),
    (image_bundle, "input.std", [0], "input.std[0] must be at least 0.000001"),
    (image_bundle, "input.std", "1", "input.std must be a list"),
    (image_bundle, "input.max_tokens", 3, "input.max_tokens is not a known key"),
    (image_bundle, "tokenizer", {}, "tokenizer.kind is missing"),
    (image_bundle, "task", "generate", "labels must be null where task is generate"),
    (image_bundle, "cache", "kv", "cache must be none where task is classify"),
    (image_bundle, "cache", "kv_int8", "cache must be none where task is classify"),
    (image_bundle, "cache", "lru", "cache must be 'kv', 'kv_fp16', 'kv_int8' or 'none'"),
    (image_bundle, "rungs.0.encoder", "e.onnx", "rungs[0].encoder must be null"),
    (image_bundle, "target_max_tokens", 3, "target_max_tokens must be null"),
    (points_bundle, "input.max_points", 0, "input.max_points must be at least 1"),
    (points_bundle, "input.dimensions", 17, "input.dimensions must be at most 16"),
    (points_bundle, "labels", None, "labels must not be null where task is classify"),
    (classify_bundle, "tokenizer", None, "tokenizer must not be null where input.kind is text"),
    (classify_bundle, "tokenizer.bos_id", 3, "tokenizer.bos_id must be null"),
    (classify_bundle, "depth", "deep", "depth must be 'ode', 'fixed' or 'chain'"),
    (classify_bundle, "depth", "fixed", "rungs[1].steps must be 1 where depth is fixed"),
    (
        classify_bundle,
        "rungs.1.quality.metric",
        "bleu",
        "must be loss or accuracy where task is cl",
    ),
    (
        generate_bundle,
        "cache",
        "kv_int8",
        "against_fp32 must not be null where cache is kv_int8",
    ),
    (generate_bundle, "depth", "chain", "cache must be none where depth is chain"),
    (generate_bundle, "rungs.2.nfe", 8, "rungs[2].nfe is 8, but must be 4 for 4 steps of euler"),
    (generate_bundle, "schema_version", 1, "is 1, but this release reads version 2"),
    (translate_bundle, "step", STEP, "step must be null where task is translate"),
    (prefix_bundle, "step", STEP, "step must be null where depth is fixed and cache is none"),
    (prefix_bundle, "method", "heun", "method must be euler where depth is fixed"),
    (prefix_bundle, "rungs.0.nfe", 2, "rungs[0].nfe is 2, but must be 1 for 1 step of euler"),
    (
        prefix_bundle,
        "rungs.0.quality.metric",
        "bleu",
        "metric must be loss or accuracy where task is",
    ),
    (translate_bundle, "target_max_tokens", None, "target_max_tokens must not be null where"),
    (translate_bundle, "target_max_tokens", 1, "target_max_tokens must be at least 2"),
    (translate_bundle, "tokenizer.eos_id", None, "tokenizer.eos_id must not be null where"),
    (translate_bundle, "tokenizer.eos_id", 1, "tokenizer.eos_id is 1, like bos_id"),
    (
        translate_bundle,
        "tokenizer.bos_id",
        1 << 20,
        "tokenizer.bos_id must be less than vocab_size",
    ),
    (translate_bundle, "rungs.0.encoder", None, "rungs[0].encoder must not be null where"),
    (
        translate_bundle,
        "rungs.1.encoder",
        "encoder-1.onnx",
        "is encoder-1.onnx, which is rungs[0].encoder already",
    ),
    (translate_bundle, "rungs.1.encoder", "weights.bin", "which is weights already"),
    (translate_bundle, "rungs.1.encoder", "absent.onnx", "files does not list absent.onnx"),
    (translate_bundle, "rungs.1.nfe", 2, "rungs[1].nfe is 2, but must be 4 for 2 steps of euler"),
    (classify_bundle, "tokenizer.chat_template", "c.jinja", "chat_template must be null where"),
    (translate_bundle, "tokenizer.chat_template", "c.jinja", "chat_template must be null where"),
    (generate_bundle, "tokenizer.chat_template", 3, "tokenizer.chat_template must be a string"),
    (generate_bundle, "tokenizer.chat_template", "../c", "which is no plain file name"),
    (generate_bundle, "tokenizer.chat_template", "c.jinja", "files does not list c.jinja"),
    (generate_bundle, "tokenizer.chat_template", "tokenizer.json", "is tokenizer.file already"),
    (translate_bundle, "cache", "kv", "cache must be none where task is translate"),
    (tag_bundle, "labels", None, "labels must not be null where task is tag"),
    (tag_bundle, "labels", ["1"], "labels must have at least 2 items, not 1"),
    (tag_bundle, "cache", "kv", "cache must be none where task is tag"),
    (tag_bundle, "input", IMAGES, "input.kind must be text where task is tag"),
    (tag_bundle, "step", None, "step must not be null where depth is ode and task is tag"),
    (tag_bundle, "target_max_tokens", 8, "target_max_tokens must be null where task is tag"),
    (tag_bundle, "tokenizer.bos_id", 3, "tokenizer.bos_id must be null where task is tag"),
    (tag_bundle, "tokenizer.eos_id", 3, "tokenizer.eos_id must be null where task is tag"),
    (
        classify_bundle,
        "tokenizer.eos_id",
        3,
        "tokenizer.eos_id must be null where task is classify",
    ),
    (
        generate_bundle,
        "tokenizer.bos_id",
        3,
        "tokenizer.bos_id must be null where task is generate",
    ),
    (generate_bundle, "tokenizer.eos_id", 0, "tokenizer.eos_id is 0, like pad_id"),
    (tag_bundle, "rungs.0.encoder", "e.onnx", "encoder must be null where task is tag"),
    (tag_bundle, "rungs.0.quality.exact", 1.5, "rungs[0].quality.exact must be at most 1"),
    (tag_bundle, "rungs.0.quality.exact", True, "rungs[0].quality.exact must be a number"),
    (
        tag_bundle,
        "rungs.0.quality.metric",
        "bleu",
        "metric must be loss or accuracy where task is tag",
    ),
    (classify_bundle, "rungs.0.quality.exact", 0.5, "exact must be null where task is classify"),
    (generate_bundle, "rungs.0.quality.exact", 0.5, "exact must be null where task is generate"),
    (tag_bundle, "dial", "depth", "dial must be 'resolution' or 'time'"),
    (tag_bundle, "dial", "resolution", "grid_steps must be null where dial is resolution"),
    (tag_bundle, "grid_steps", None, "grid_steps must not be null where dial is time"),
    (tag_bundle, "grid_steps", 0, "grid_steps must be at least 1"),
    (tag_bundle, "grid_steps", 4.5, "grid_steps must be an integer, not 4.5"),
    (classify_bundle, "grid_steps", 4, "grid_steps must be null where dial is resolution"),
    (classify_bundle, "dial", "time", "grid_steps must not be null where dial is time"),
    (translate_bundle, "dial", "time", "grid_steps must not be null where dial is time"),
    (tag_bundle, "depth", "chain", "dial must be resolution where depth is chain"),
    (tag_bundle, "range", {"value": 0.1}, "range.low is missing"),
    (
        tag_bundle,
        "range",
        {"value": 0.1, "low": 0, "high": 0},
        "range.value is 0.1, above high (0.0)",
    ),
    (generate_bundle, "shape.state", 31, "shape.width is 32, above state (31)"),
    (generate_bundle, "shape.state", 64.5, "shape.state must be an integer"),
    (classify_bundle, "embedding", 0, "embedding must be at least 1"),
    (classify_bundle, "embedding", 16.5, "embedding must be an integer"),
    (tag_bundle, "embedding", 16, "embedding must be null where task is tag"),
    (generate_bundle, "embedding", 16, "embedding must be null where task is generate"),
    (tag_bundle, "shape.state", 32, "shape.state must be null where cache is none"),
    (tag_bundle, "range", [0.1], "range must be an object, not [0.1]"),
    (
        prefix_bundle,
        "range",
        {"value": 0, "low": 0, "high": 0},
        "range must be null for one step count",
    ),
]


def changed(bundle: Callable[[], Bundle], path: str, value: object) -> dict[str, Any]:
    """The manifest of a bundle with one value put in."""
    manifest = copy.deepcopy(bundle().manifest.to_json())
    place: Any = manifest
    *above, last = path.split(".")
    for key in above:
        place = place[int(key) if key.isdigit() else key]
    place[last] = value
    return manifest


@pytest.mark.parametrize(
    ("bundle", "path", "value", "message"), CASES, ids=lambda part: str(part)[:40]
)
def test_what_a_family_must_not_say_is_refused(
    bundle: Callable[[], Bundle], path: str, value: object, message: str
) -> None:
    with pytest.raises(BundleError) as refusal:
        Manifest.from_json(changed(bundle, path, value))
    assert message in str(refusal.value)


def test_a_generator_may_have_a_token_that_ends_its_texts() -> None:
    value = changed(generate_bundle, "tokenizer.eos_id", 3)
    assert Manifest.from_json(value).text_tokenizer.eos_id == 3


def test_a_manifest_that_says_no_dial_has_that_of_resolution() -> None:
    value = classify_bundle().manifest.to_json()
    for key in ("dial", "grid_steps", "range", "embedding"):
        del value[key]
    del value["shape"]["state"]
    for rung in value["rungs"]:
        del rung["quality"]["exact"]
    manifest = Manifest.from_json(value)
    assert manifest == classify_bundle().manifest
    assert [manifest.step_size(steps) for steps in (1, 2, 4)] == [1.0, 0.5, 0.25]


def test_all_rungs_of_the_dial_of_time_have_steps_of_one_size() -> None:
    manifest = tag_bundle().manifest
    assert (manifest.dial, manifest.grid_steps, manifest.full_steps) == ("time", 4, 8)
    assert {manifest.step_size(steps) for steps in manifest.steps} == {1.0}


def test_a_chain_spends_a_multiple_of_its_steps() -> None:
    value = classify_bundle().manifest.to_json()
    value["depth"], value["step"] = "chain", None
    for rung in value["rungs"]:
        rung["nfe"] = 3 * rung["steps"]
    assert Manifest.from_json(value).rungs[2].nfe == 12
    value["rungs"][2]["nfe"] = 11
    with pytest.raises(BundleError, match="must be a multiple of 4 for"):
        Manifest.from_json(value)
