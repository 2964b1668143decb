"""A pretrained encoder that has become a dial, over HTTP: each rung answers as torch does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from export.run import ExportRequest, export_run
from serve.bundle import Precision
from tests.pretrained_folders import transformers, write_folder, write_table
from tests.server_process import ServerProcess, server_process
from train.checkpoint import load_run
from train.convert import Conversion, convert

pytestmark = pytest.mark.long
STEPS = (1, 2, 3)
TOKENS = 12
TEXTS = ("the film was lovely", "an awful scene, it's", "a very long story " * 9, "Ünknown")
WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 512,
}  # so that some of its matrices become bytes
FAR: dict[Precision, float] = {"fp32": 1e-4, "int8": 0.02}
SETTINGS = (
    "optim.precision=fp32",
    "optim.lr=0.003",
    "optim.batch=16",
    "run.threads=1",
    "data.held_out=0.2",
    'data.text="body"',
    'data.label="topic"',
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained folder, a run of it, and a bundle of each precision."""
    folder: Path = tmp_path_factory.mktemp("converted")
    write_folder(folder / "bert", "bert", **WIDE)
    table = write_table(folder / "table.csv")
    request = Conversion(max_tokens=TOKENS, epochs=2, teacher_epochs=2, overrides=SETTINGS)
    convert(str(folder / "bert"), folder / "run", request, str(table), quiet=True)
    for precision in FAR:
        asked = ExportRequest(
            folder / precision,
            STEPS,
            name=precision,
            precision=precision,
            samples=16,
            latency=False,
        )
        export_run(folder / "run", asked, say=lambda _: None)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with server_process([folder / precision for precision in FAR]) as served:
        yield served


def classify(server: ServerProcess, texts: Any, **fields: Any) -> httpx.Response:
    body = {"input": texts, "top_k": 2} | fields
    return httpx.post(f"{server.url}/v1/classify", json=body, timeout=30)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("precision", FAR)
def test_every_rung_answers_as_torch_does(
    server: ServerProcess, folder: Path, precision: Precision, steps: int
) -> None:
    answer = classify(server, list(TEXTS), model=precision, steps=steps)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["results"][0]["budget"]["steps"] == steps
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "bert")
    batch = tokenizer(
        list(TEXTS), truncation=True, max_length=TOKENS, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        logits = load_run(folder / "run").model(batch.input_ids, steps=steps).logits
    expected = logits.softmax(-1).tolist()
    for text, result, scores in zip(TEXTS, body["results"], expected, strict=True):
        found = {each["label"]: each["score"] for each in result["top"]}
        known = dict(zip(("bad", "good"), scores, strict=True))
        assert found == pytest.approx(known, abs=FAR[precision])
        assert result["score"] == found[result["label"]] == max(found.values())
        assert result["truncated"] == (len(tokenizer(text).input_ids) > TOKENS)


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
