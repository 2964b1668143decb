"""Files of a bundle that change while it is served, or while it is opened: never a wrong answer."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import onnx
import onnxruntime
import pytest

from serve.bundle import Bundle, BundleError, read_bundle
from serve.catalog import open_catalog
from serve.runtime import open_model
from tests.fixtures.tiny_bundles import build_classify, build_generate
from tests.server_process import server_process

STEPS = (1, 2, 4)


def zeros(folder: Path) -> None:
    with (folder / "weights.bin").open("r+b") as file:
        file.write(bytes((folder / "weights.bin").stat().st_size))


def cut(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)


def another(folder: Path) -> None:
    shutil.rmtree(folder)
    build_generate(folder, seed=7)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "zeros": zeros,
    "cut": cut,
    "another": another,
    "gone": shutil.rmtree,
}


@pytest.mark.long
def test_bundles_that_are_changed_while_they_are_served_change_no_answer(tmp_path: Path) -> None:
    folders = {
        name: build_generate(tmp_path / name, name=name, steps=STEPS, seed=seed).folder
        for seed, name in enumerate(DAMAGES)
    }
    classifier = build_classify(tmp_path / "classifier").folder
    with (
        server_process([*folders.values(), classifier], "--threads", "1") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):

        def text(name: str, steps: int) -> str:
            body = {"model": name, "prompt": "To be", "steps": steps, "temperature": 0}
            answer = client.post("/v1/generate", json=body | {"max_tokens": 100})
            return str(answer.raise_for_status().json()["text"])

        def label() -> Any:
            answer = client.post("/v1/classify", json={"input": "good", "steps": 2})
            return answer.raise_for_status().json()["results"]

        sound = {(name, steps): text(name, steps) for name in folders for steps in STEPS}
        sound_label = label()
        for name, damage in DAMAGES.items():
            damage(folders[name])
        cut(classifier)
        asked = [*sound] * 2
        with ThreadPoolExecutor(len(asked)) as pool:  # rungs share calls
            assert list(pool.map(text, *zip(*asked, strict=True))) == [sound[one] for one in asked]
        assert label() == sound_label
        assert client.get("/health/ready").status_code == 200
        server.terminate()
        assert server.wait() == 0


@pytest.mark.parametrize("name", ["weights.bin", "step.onnx", "tokenizer.json"])
def test_a_bundle_that_is_swapped_between_its_check_and_its_opening_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    build_generate(tmp_path / "one", seed=0)
    other = tmp_path / name
    shutil.copyfile(tmp_path / "one" / name, other)
    if name.endswith(".onnx"):
        graph = onnx.load(other, load_external_data=False)
        graph.doc_string = "another"
        onnx.save(graph, other)
    else:
        other.write_bytes(other.read_bytes() + b" ")

    def swapped(folder: Path, verify: bool = True) -> Bundle:
        bundle = read_bundle(folder, verify)
        shutil.copyfile(other, folder / name)
        return bundle

    monkeypatch.setattr("serve.catalog.read_bundle", swapped)
    with pytest.raises(BundleError, match=rf"{name}: has \d+ bytes instead of"):
        open_catalog([tmp_path / "one"], threads=1)


def test_a_model_that_does_not_fit_into_memory_is_told_apart_from_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = build_generate(tmp_path / "one")

    def full(*_: object, **__: object) -> None:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(onnxruntime, "InferenceSession", full)
    with pytest.raises(BundleError, match="there is not enough memory: give the server more"):
        open_model(bundle).warm_up()
