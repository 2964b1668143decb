"""Pretrained decoders that have become dials, over HTTP: each rung writes what torch writes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from export.run import ExportRequest, export_run
from serve.bundle import read_bundle
from serve.runtime import open_model
from tests.pretrained_folders import DECODERS, transformers, write_corpus, write_folder
from tests.server_process import ServerProcess, server_process
from tests.tracing import trace_once
from train.checkpoint import load_run
from train.convert import Conversion, convert

pytestmark = pytest.mark.long
STEPS, WINDOW, WRITTEN = (1, 2, 3), 48, 16
WHOLES = ("whole-gpt2", "whole-llama")
PROMPT = "the film was very"
SETTINGS = ("optim.precision=fp32", "run.threads=1", "data.held_out=0.2")
REQUEST = Conversion(
    max_tokens=WINDOW,
    epochs=0.3,
    teacher_epochs=0.1,
    overrides=("optim.lr=0.003", *SETTINGS),
)
# All layers, as good as untrained.
WHOLE = Conversion(
    blocks=0, steps=(1,), max_tokens=WINDOW, epochs=0.02, overrides=("optim.lr=1e-30", *SETTINGS)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each family a pretrained folder, a run and a bundle; of some all layers too.

    All layers of Llama end their texts early.
    """
    folder: Path = tmp_path_factory.mktemp("decoders")
    corpus = str(write_corpus(folder / "corpus.txt"))
    for family in DECODERS:
        write_folder(folder / "hub" / family, family)
        convert(str(folder / "hub" / family), folder / "runs" / family, REQUEST, corpus, quiet=True)
        export(folder, family, STEPS)
    write_folder(folder / "hub/whole-gpt2", "gpt2")
    write_ending(folder / "hub/whole-llama")
    for name in WHOLES:
        convert(str(folder / "hub" / name), folder / "runs" / name, WHOLE, corpus, quiet=True)
        export(folder, name, (1,))
    return folder


def write_ending(folder: Path) -> None:
    """A Llama whose end is half as likely again as the fifth token that it would write."""
    model = write_folder(folder, "llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    written = [*tokenizer(PROMPT).input_ids]
    readout = model.lm_head.weight
    with torch.no_grad():
        for _ in range(5):
            logits = model(torch.tensor([written])).logits[0, -1, : len(tokenizer)]
            written.append(int(logits.argmax()))
        readout[tokenizer.eos_token_id] = 1.5 * readout[written[-1]]
    model.save_pretrained(folder)


def export(folder: Path, name: str, steps: tuple[int, ...], **changes: Any) -> Path:
    target = folder / "".join((name, *changes.values()))
    asked = ExportRequest(target, steps, name=target.name, samples=16, latency=False, **changes)
    with pytest.MonkeyPatch.context() as patch:
        trace_once(patch)
        export_run(folder / "runs" / name, asked, say=lambda _: None)
    return target


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with server_process([folder / name for name in (*DECODERS, *WHOLES)]) as served:
        yield served


def written(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": WRITTEN} | fields
    answer = httpx.post(f"{server.url}/v1/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def greedy(folder: Path, family: str, steps: int) -> tuple[str, int]:
    """What the run writes, without a cache, until the token that ends a text; and how many tokens.

    Padding is never written.
    """
    run = load_run(folder / "runs" / family)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hub" / family)
    kept = read_bundle(folder / family).manifest.text_tokenizer
    prompt = tokenizer(PROMPT).input_ids
    tokens = torch.tensor([prompt])
    for _ in range(WRITTEN):
        with torch.no_grad():
            logits = run.model(tokens, steps=steps).logits[0, -1]
        logits[kept.pad_id] = -torch.inf
        if int(logits.argmax()) == kept.eos_id:
            break
        tokens = torch.cat([tokens, logits.argmax().view(1, 1)], 1)
    text: str = tokenizer.decode(tokens[0, len(prompt) :], skip_special_tokens=True)
    return text, tokens.shape[1] - len(prompt)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("family", DECODERS)
def test_every_rung_writes_what_torch_does(
    server: ServerProcess, folder: Path, family: str, steps: int
) -> None:
    answer = written(server, model=family, steps=steps)
    text, tokens = greedy(folder, family, steps)
    assert answer["text"] == text
    assert answer["budget"]["steps"] == steps
    ended = tokens < WRITTEN
    assert answer["finish_reason"] == ("stop" if ended else "length")
    assert answer["usage"]["completion_tokens"] == tokens + ended  # the end is a token too


@pytest.mark.parametrize("name", WHOLES)
def test_all_layers_give_the_logits_of_transformers(folder: Path, name: str) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "hub" / name).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hub" / name)
    tokens = np.array(tokenizer(PROMPT + " long and lovely story").input_ids)
    bundle = read_bundle(folder / name)
    assert bundle.manifest.keeps_caches and bundle.manifest.shape.layers == 4
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
    expected = expected[:, : bundle.manifest.text_tokenizer.vocab_size]
    batch = open_model(bundle, 1).decoder(1).open_batch()
    found = [batch.add(tokens[:2]), *(batch.step(tokens[i : i + 1])[0] for i in range(2, 6))]
    np.testing.assert_allclose(found, expected[1:6], atol=1e-4)


def test_caches_hold_the_heads_of_keys_and_values(folder: Path) -> None:
    shapes = {name: read_bundle(folder / name).manifest.shape for name in DECODERS}
    assert {name: (one.layers, one.heads) for name, one in shapes.items()} == {
        "gpt2": (2, 2),
        "llama": (2, 2),
        "mistral": (2, 1),
        "qwen2": (2, 2),
        "gpt_neox": (2, 2),
    }


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_caches_of_bytes_are_verified(folder: Path, family: str) -> None:
    bundle = read_bundle(export(folder, family, (1, 3), cache="int8"))
    assert bundle.manifest.cache == "kv_int8"


def test_rows_of_several_rungs_decode_together_as_alone(server: ServerProcess) -> None:
    alone = {steps: written(server, model="llama", steps=steps)["text"] for steps in STEPS}
    with ThreadPoolExecutor(len(STEPS)) as pool:
        asked = {
            steps: [
                pool.submit(written, server, model="llama", steps=steps, seed=seed)
                for seed in range(3)
            ]
            for steps in STEPS
        }
        found = {steps: {one.result()["text"] for one in many} for steps, many in asked.items()}
    assert found == {steps: {text} for steps, text in alone.items()}


def test_an_answer_ends_where_the_model_ends_its_text(server: ServerProcess, folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hub/whole-llama")
    eos_id = read_bundle(folder / "whole-llama").manifest.text_tokenizer.eos_id
    assert eos_id == tokenizer.eos_token_id
    answer = written(server, model="whole-llama")
    assert answer["finish_reason"] == "stop"
    assert 1 <= answer["usage"]["completion_tokens"] <= 5
    text, _ = greedy(folder, "whole-llama", 1)
    assert answer["text"] == text and "</s>" not in text
