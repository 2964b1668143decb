"""Bundles that were exported once are read as they were meant: today's answers are those of then.

The files of tests/golden/version-N are never made anew within version N of the format, whatever
export writes today: they are what someone has on a disk. A release that cannot pass this test must
raise the version, say so in docs/bundle.md, and make golden bundles of the new one beside the old.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from serve.bundle import SCHEMA_VERSION, read_bundle
from serve.runtime import open_model
from tests.golden.answers import answer, rows_of

FOLDER = Path(__file__).resolve().parent.parent / "golden" / f"version-{SCHEMA_VERSION}"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/manifest.json"))
# Logits are of order one: float32 in another order of sums; and activations of 8 bits, which
# processors with and without instructions for them round differently.
ABSOLUTE = {"fp32": 2e-5, "int8": 0.05}


def test_every_task_input_and_precision_has_a_golden_bundle() -> None:
    manifests = [read_bundle(FOLDER / name).manifest for name in NAMES]
    assert {(m.task, m.depth) for m in manifests} >= {
        ("generate", "ode"),
        ("generate", "fixed"),
        ("classify", "ode"),
        ("classify", "chain"),
        ("translate", "ode"),
    }
    assert {m.input.kind for m in manifests} == {"text", "image", "points"}
    assert {m.precision for m in manifests} == {"fp32", "int8"}
    assert {m.method for m in manifests} >= {"euler", "heun", "midpoint", "ab2"}
    assert any(m.calibration is not None for m in manifests)
    assert any(rung.dominated for m in manifests for rung in m.rungs)


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_bundle_answers_as_it_did(name: str) -> None:
    kept = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    bundle = read_bundle(FOLDER / name)
    manifest, opened = bundle.manifest, open_model(bundle, threads=1)
    absolute = ABSOLUTE[manifest.precision]
    rows = rows_of(bundle, kept["asked"])
    np.testing.assert_allclose(rows, kept["rows"], atol=1e-6)  # a text becomes the same tokens
    target = np.array(kept["target"], dtype=np.int64)  # (1, N)
    opened.warm_up()
    assert [str(steps) for steps in manifest.steps] == list(kept["logits"])
    for steps in manifest.steps:
        expected = np.array(kept["logits"][str(steps)])  # (C,) or (S, V)
        given = [answer(opened, steps, rows, target)]
        if manifest.task != "translate":
            given.append(opened.unrolled(steps).forward(rows)[0])
        if manifest.task == "classify" and manifest.step is not None:
            given.append(opened.step_classifier(steps).run(rows)[0])
        if manifest.task == "generate":
            given.append(token_by_token(opened.decoder(steps), rows[0]))
        for each in given:
            np.testing.assert_allclose(each, expected, atol=absolute, rtol=0)


def token_by_token(decoder: Any, tokens: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Logits (S, V)."""
    batch = decoder.open_batch()
    logits = [batch.add(tokens[:1])]
    logits += [batch.step(tokens[at : at + 1])[0] for at in range(1, len(tokens))]
    return np.array(logits)
