"""Loading models while others are served: what goes wrong with one folder stays with it."""

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from serve.bundle import Bundle, read_bundle
from serve.catalog import Catalog, Served, open_catalog
from serve.command import serving
from serve.engine.cost import Cost, CostKey
from serve.engine.engine import Engine
from serve.engine.job import Limits
from serve.loading import Loading, measure_first_calls
from serve.metrics import Metrics
from serve.runtime import open_model
from serve.settings import Settings
from tests.fixtures.tiny_bundles import build_classify, build_generate
from tests.fixtures.tiny_folders import generate_bundle, translate_bundle


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    build_classify(tmp_path / "one")
    build_generate(tmp_path / "two")
    return open_catalog([tmp_path / "one", tmp_path / "two"], threads=1)


def test_an_error_of_ours_with_one_folder_does_not_keep_the_others_from_being_renewed(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (served.bundle.folder for served in catalog)
    loading = Loading(Engine(catalog, Limits(), Metrics()), Settings(threads=1))
    build_generate(second, seed=1)
    edition = {served.name: served.edition for served in catalog}

    def broken(folder: Path, verify: bool = True) -> Bundle:
        if folder == first.absolute():
            raise RuntimeError("a bug")
        return read_bundle(folder, verify)

    monkeypatch.setattr("serve.loading.read_bundle", broken)
    asyncio.run(loading.reload())
    assert f"bundle not loaded from {first}: this is our bug" in caplog.text
    found = {served.name: served.edition for served in loading._engine.catalog}
    assert found["tiny-classify"] == edition["tiny-classify"]
    assert found["tiny-generate"] > edition["tiny-generate"]


def test_a_bundle_with_a_new_name_does_not_replace_the_model_of_another_folder(
    catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = catalog
    loading = Loading(Engine(catalog, Limits(), Metrics()), Settings(threads=1))
    build_classify(first.bundle.folder, name=second.name)
    asyncio.run(loading.reload())
    assert f"is named {second.name}, like {second.bundle.folder}" in caplog.text
    assert [*loading._engine.catalog] == [first, second]
    build_classify(first.bundle.folder, name="renamed")
    asyncio.run(loading.reload())
    assert [one.name for one in loading._engine.catalog] == [first.name, second.name, "renamed"]


@pytest.mark.parametrize("needs_key", [False, True])
def test_the_example_at_start_has_a_key_where_one_is_needed(
    catalog: Catalog, needs_key: bool
) -> None:
    said = serving(catalog, "http://127.0.0.1:8000", needs_key=needs_key)
    (example,) = [line for line in said.splitlines() if line.startswith("  curl ")]
    assert ("-H 'Authorization: Bearer KEY' http://" in example) == needs_key


def test_the_first_calls_of_every_task_that_writes_are_timed() -> None:
    for bundle in (generate_bundle(), translate_bundle()):
        cost = Cost()
        with closing(open_model(bundle, threads=1)) as model:
            measure_first_calls(Served.open(replace(bundle, latency=None), model), cost)
        for steps in bundle.manifest.steps:
            assert cost.knows(CostKey("prefill", steps)) and cost.knows(CostKey("decode", steps))
