"""A pretrained encoder that has become a dial, over HTTP: each rung answers as torch does.

With labels, and with embeddings, which are asked for by the official client.
"""

import base64
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import OpenAI

from export.run import ExportRequest, export_run
from serve.bundle import Precision, read_bundle
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
from tests.openai_clients import sync_client
from tests.pretrained_folders import transformers, write_folder, write_table
from tests.server_process import ServerProcess, server_process
from tests.tracing import trace_once
from train.checkpoint import load_run
from train.convert import Conversion, convert

pytestmark = pytest.mark.long
STEPS, TOKENS, WIDTH = (1, 2, 3), 12, 64
TEXTS = ["the film was lovely", "an awful scene, it's", "a very long story " * 9, "Ünknown"]
FAR: dict[Precision, float] = {"fp32": 1e-5, "int8": 0.02}
SETTINGS = (
    "optim.precision=fp32",
    "optim.batch=16",
    "run.threads=1",
    "data.held_out=0.2",
    'data.text="body"',
    'data.label="topic"',
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dial of each precision; and all layers as they were, only their readout trained."""
    folder: Path = tmp_path_factory.mktemp("converted")
    # So wide that some of its matrices become bytes.
    write_folder(folder / "bert", "bert", hidden_size=WIDTH, intermediate_size=512)
    table = write_table(folder / "table.csv")
    dial = Conversion(
        max_tokens=TOKENS,
        epochs=1,
        teacher_epochs=1,
        overrides=("optim.lr=0.003", *SETTINGS),
    )
    still = ("optim.lr=1e-30", *SETTINGS)
    whole = Conversion(blocks=0, steps=(1,), max_tokens=TOKENS, epochs=1, overrides=still)
    for name, request in (("run", dial), ("whole-run", whole)):
        convert(str(folder / "bert"), folder / name, request, str(table), quiet=True)
    for name, run, steps, precision in (
        ("fp32", "run", STEPS, "fp32"),
        ("int8", "run", STEPS, "int8"),
        ("whole", "whole-run", (1,), "fp32"),
    ):
        asked = ExportRequest(
            folder / name,
            steps,
            name=name,
            precision=precision,  # type: ignore[arg-type]  # one of the two
            samples=16,
            latency=False,
        )
        with pytest.MonkeyPatch.context() as patch:
            trace_once(patch)
            export_run(folder / run, asked, say=lambda _: None)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    bundles = [folder / name for name in ("fp32", "int8", "whole")]
    old = [bundle.folder for bundle in (classify_bundle(), generate_bundle())]
    with server_process([*old, *bundles]) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with sync_client(server) as connected:
        yield connected


def post(server: ServerProcess, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=30)


def tokenizer_of(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder / "bert")


def batch_of(folder: Path) -> Any:
    tokenizer = tokenizer_of(folder)
    return tokenizer(TEXTS, truncation=True, max_length=TOKENS, padding=True, return_tensors="pt")


def unit(states: torch.Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(states, dim=-1).numpy()


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("precision", FAR)
def test_every_rung_gives_the_pooled_state_of_torch(
    client: OpenAI, folder: Path, precision: Precision, steps: int
) -> None:
    found = client.embeddings.create(model=precision, input=TEXTS, extra_body={"steps": steps})
    batch = batch_of(folder)
    model = load_run(folder / "run").model
    with torch.no_grad():
        out = model(batch.input_ids, steps=steps)
        # To its types, what a module holds may be a tensor.
        pooled = model.head.pooled(out.trajectories[-1].end, *out.context)  # type: ignore[operator]
    vectors = np.array([one.embedding for one in found.data])
    assert vectors.shape == (len(TEXTS), WIDTH)
    np.testing.assert_allclose(vectors, unit(pooled), atol=FAR[precision])
    assert [one.index for one in found.data] == [0, 1, 2, 3]
    assert found.usage.prompt_tokens == found.usage.total_tokens == int(batch.attention_mask.sum())
    report: Any = found.model_extra
    assert report["stepdial"]["budget"]["steps"] == steps
    assert report["stepdial"]["truncated"] == [2]


def test_embeddings_of_rungs_differ(client: OpenAI) -> None:
    vectors = [
        client.embeddings.create(model="fp32", input=TEXTS[0], extra_body={"steps": steps})
        .data[0]
        .embedding
        for steps in STEPS
    ]
    for one, other in pairwise(vectors):
        assert np.abs(np.subtract(one, other)).max() > 1e-3


def test_all_layers_give_the_mean_of_transformers_states(client: OpenAI, folder: Path) -> None:
    # As sentence-transformers pools them.
    batch = batch_of(folder)
    with torch.no_grad():
        states = transformers.AutoModel.from_pretrained(folder / "bert")(**batch).last_hidden_state
    present = batch.attention_mask[..., None]
    expected = unit((states * present).sum(1) / present.sum(1))
    found = client.embeddings.create(model="whole", input=TEXTS)
    np.testing.assert_allclose([one.embedding for one in found.data], expected, atol=1e-5)


def test_both_encodings_hold_the_same_floats(server: ServerProcess) -> None:
    asked = {"model": "fp32", "input": TEXTS[0]}
    numbers = post(server, **asked, encoding_format="float").json()["data"][0]["embedding"]
    text = post(server, **asked, encoding_format="base64").json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == numbers
    assert np.linalg.norm(numbers) == pytest.approx(1.0, abs=1e-6)
    assert post(server, **asked).json()["data"][0]["embedding"] == numbers


def test_without_a_model_the_first_that_embeds_answers_at_its_default(
    server: ServerProcess, folder: Path
) -> None:
    body = post(server, input=TEXTS, user="me", dimensions=WIDTH).json()
    assert body["object"] == "list" and body["model"] == "fp32"
    default = read_bundle(folder / "fp32").manifest.default_steps
    assert [one["steps"] for one in body["data"]] == [default] * len(TEXTS)
    assert body["stepdial"]["budget"]["reason"] == "default"


def test_effort_and_deadline_choose_a_rung(server: ServerProcess) -> None:
    body = post(server, model="fp32", input=TEXTS[0], effort="low").json()
    assert body["stepdial"]["budget"]["reason"] == "effort"
    assert body["stepdial"]["budget"]["steps"] == 1
    body = post(server, model="fp32", input=TEXTS, deadline_ms=60_000).json()
    assert [one["steps"] for one in body["data"]] == [3] * len(TEXTS)


REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"model": "tiny-classify"}, "no_embeddings", "model", "export its run again"),
    ({"model": "tiny-generate"}, "no_embeddings", "model", "only classifiers of texts"),
    ({"steps": 4}, "impossible_budget", "steps", "1, 2, 3"),
    ({"dimensions": 8}, "invalid_field", "dimensions", "have 64 numbers"),
    ({"max_disagreement": 0.1}, "invalid_field", "max_disagreement", "about labels"),
    ({"encoding_format": "int8"}, "invalid_field", "encoding_format", "float"),
    ({"input": [1, 2]}, "invalid_field", "input[0]", "texts, not tokens"),
    ({"input": [[1, 2]]}, "invalid_field", "input[0]", "texts, not tokens"),
    ({"input": ["a", ""]}, "invalid_field", "input[1]", "is empty"),
    ({"input": []}, "invalid_field", "input", "empty list"),
    ({"input": ["a"] * 65}, "invalid_field", "input", "at most 64"),
    ({"stream": True}, "invalid_field", "stream", "stream"),
]


@pytest.mark.parametrize(("changes", "code", "param", "said"), REFUSED, ids=lambda one: str(one))
def test_embeddings_that_it_cannot_give_are_refused(
    server: ServerProcess, changes: dict[str, Any], code: str, param: str, said: str
) -> None:
    answer = post(server, **({"model": "fp32", "input": "a"} | changes))
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
    assert said in error["message"]


def classify(server: ServerProcess, texts: Any, **fields: Any) -> httpx.Response:
    body = {"input": texts, "top_k": 2} | fields
    return httpx.post(f"{server.url}/v1/classify", json=body, timeout=30)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("precision", FAR)
def test_every_rung_gives_the_labels_of_torch(
    server: ServerProcess, folder: Path, precision: Precision, steps: int
) -> None:
    answer = classify(server, TEXTS, model=precision, steps=steps)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["results"][0]["budget"]["steps"] == steps
    with torch.no_grad():
        logits = load_run(folder / "run").model(batch_of(folder).input_ids, steps=steps).logits
    expected = logits.softmax(-1).tolist()
    for text, result, scores in zip(TEXTS, body["results"], expected, strict=True):
        found = {each["label"]: each["score"] for each in result["top"]}
        known = dict(zip(("bad", "good"), scores, strict=True))
        assert found == pytest.approx(known, abs=FAR[precision])
        assert result["score"] == found[result["label"]] == max(found.values())
        assert result["truncated"] == (len(tokenizer_of(folder)(text).input_ids) > TOKENS)


def test_rungs_differ_and_8_bits_are_8_bits(server: ServerProcess, folder: Path) -> None:
    scores = {
        (precision, steps): classify(server, TEXTS[0], model=precision, steps=steps).json()[
            "results"
        ][0]["score"]
        for precision in FAR
        for steps in STEPS
    }
    assert len(set(scores.values())) == len(scores)
    sizes = [(folder / precision / "weights.bin").stat().st_size for precision in FAR]
    assert sizes[1] < 0.75 * sizes[0]  # the rest is matrices that are too small


def test_what_it_cannot_do_is_refused(server: ServerProcess) -> None:
    answer = classify(server, TEXTS[0], model="fp32", steps=4)
    assert answer.status_code == 422 and "1, 2, 3" in answer.text
    answer = httpx.post(f"{server.url}/v1/generate", json={"model": "fp32", "prompt": "a"})
    assert answer.status_code in (404, 422), answer.text
