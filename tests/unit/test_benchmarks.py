"""The benchmarks run, and keep what they found."""

import importlib
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from fastapi.testclient import TestClient
from pydantic import TypeAdapter

from benchmarks import precision, quality
from benchmarks.bare_app import bare_app, constant_answer
from benchmarks.lab import (
    Machine,
    Result,
    Table,
    Target,
    command_line,
    format_cell,
    interleave,
    median_ratio,
    percentile,
)
from benchmarks.run import SCRIPTS
from benchmarks.served_memory import folder_bytes, one_rung
from benchmarks.texts import text_of, window_of
from serve.api.native import ClassifyResponse
from serve.bundle import AgainstFp32, Bundle, open_staging, seal_bundle
from serve.inputs.text import TextCodec
from serve.runtime import open_model
from tests.fixtures.tiny_bundles import build_classify, build_generate

MACHINE = Machine("a chip", 2, 8.0, "Linux x86_64", "3.11.0", "1.31.1", 0.0)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    return [build_generate(folder / "generate"), build_classify(folder / "classify")]


def _run(module: ModuleType, name: str, bundles: list[Bundle], folder: Path) -> Result:
    folders = [str(bundle.folder) for bundle in bundles]
    arguments = ["--quick", "--results", str(folder)]
    arguments += ["--bundles", *folders] if folders else []
    assert module.main(arguments) == 0
    return Result.read(folder / f"{name}.json")


def test_precision_shows_what_manifests_say(bundles: list[Bundle], tmp_path: Path) -> None:
    same, other = AgainstFp32(0.995, 0.001, 100), AgainstFp32(0.98, -0.003, 100)
    manifest = bundles[0].manifest
    told = (same, other, same)
    rungs = tuple(
        replace(rung, against_fp32=against)
        for rung, against in zip(manifest.rungs, told, strict=True)
    )
    with open_staging(tmp_path / "int8") as staging:
        for name in manifest.files:
            shutil.copyfile(bundles[0].folder / name, staging / name)
        fewer_bits = replace(manifest, precision="int8", rungs=rungs)
        made = seal_bundle(staging, fewer_bits, tmp_path / "int8")
    result = _run(precision, "precision", [*bundles, made], tmp_path)
    assert [row[-1] for row in result.tables[0].rows] == ["within", "OUTSIDE", "within"]
    assert [target.value for target in result.targets] == [0.98, 0.003]


def test_quality_sets_the_ladder_beside_the_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = build_generate(tmp_path / "bundle", name="shakespeare")
    found = {"metric": "loss", "value": 1.7, "low": 1.6, "high": 1.8, "samples": 10}
    kept = tmp_path / "baselines.json"
    kept.write_text(json.dumps({"shakespeare": {"discrete": {"rungs": {"1": found}}}}))
    monkeypatch.setattr(quality, "BASELINES", kept)
    result = _run(quality, "quality", [ladder], tmp_path)
    assert [row[3] for row in result.tables[0].rows] == ["2.0000", "1.9000", "1.8000", "1.7000"]
    assert {target.what: round(target.value, 6) for target in result.targets} == {
        "shakespeare: loss at its best rung": 1.8,
        "shakespeare: worse at 1 than at 4 steps by": 0.2,
        "shakespeare: worse at 2 than at 4 steps by": 0.1,
        "shakespeare: worse at 4 than at 4 steps by": 0.0,
        "shakespeare: above the discrete transformer by": 0.1,
    }


def test_one_rung_is_what_the_exporter_would_write(bundles: list[Bundle], tmp_path: Path) -> None:
    alone = build_generate(tmp_path / "one", steps=[4], name="tiny-generate", latency=False)
    for bundle in bundles:
        made = one_rung(bundle, tmp_path / bundle.manifest.name)
        assert made.manifest.steps == (4,)
        open_model(made).warm_up()
        if bundle.manifest.task == "generate":
            assert folder_bytes(made) == pytest.approx(folder_bytes(alone), abs=200)


def test_texts_have_the_wanted_number_of_tokens(bundles: list[Bundle]) -> None:
    codec, window = TextCodec(bundles[1]), window_of(bundles[1].manifest)
    assert window == 48
    for wanted in (1, 20, window):
        found = len(codec.encode_input(text_of(codec, wanted), truncate=True).tokens)
        assert wanted <= found <= wanted + 12


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    assert name == module.NAME
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0 and "--quick" in capsys.readouterr().out


def test_percentiles() -> None:
    assert percentile(range(1, 101), 0.99) == 99, "as many as 99 of the 100 are at most that"
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert percentile([1.0], 0.99) == 1.0


def test_the_bare_handler_checks_the_request_and_answers_in_our_shape() -> None:
    with TestClient(bare_app(constant_answer(["yes", "no"]))) as client:
        answer = client.post("/v1/classify", json={"input": "text"})
        shown = TypeAdapter(ClassifyResponse).validate_python(answer.json(), strict=True)
        assert [result.get("label") for result in shown["results"]] == ["yes"]
        assert client.post("/v1/classify", json={"inputs": "text"}).status_code == 422


def test_rounds_take_turns_and_keep_no_first_call() -> None:
    made: list[str] = []

    def call(name: str) -> int:
        made.append(name)
        return len(made)

    calls = {name: partial(call, name) for name in "ab"}
    samples = interleave(calls, seconds=0.0, least=3)
    assert sorted(made[:2]) == ["a", "b"]
    assert [set(made[at : at + 2]) for at in (2, 4, 6)] == [{"a", "b"}] * 3
    assert len(made) == 8 and all(len(column) == 3 for column in samples.values())
    assert min(*samples["a"], *samples["b"]) == 3


def test_median_ratio_pairs_the_rounds() -> None:
    assert median_ratio([1.0, 10.0, 4.0], [2.0, 20.0, 2.0]) == 0.5


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = _result().write(tmp_path)
    assert json.loads(path.read_text())["schema_version"] == 1
    assert Result.read(path).markdown == _result().markdown
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(ValueError, match="another schema version"):
        Result.read(path)


def test_the_page_shows_figures_and_the_terminal_what_was_missed() -> None:
    text = _result().markdown
    assert "| fast | 1.50 ms |" in text and "| right | 3 |" in text and "MISSED" not in text
    lines = [line.split() for line in _result().text.splitlines()]
    assert ["fast", "<=", "2", "ms", "1.50", "ms", "met"] in lines
    assert ["right", "==", "4", "3", "MISSED"] in lines
    assert "a chip" in text and "abc1234" in text and "python -m benchmarks.one" in text


def test_rows_fit_their_columns() -> None:
    with pytest.raises(ValueError, match="2 cells under 1"):
        Table("t", ("a",), [[1, 2]])


@pytest.mark.parametrize(
    ("cell", "shown"),
    [(None, "–"), ("x", "x"), (7, "7"), (1234.5, "1234"), (12.34, "12.3"), (0.0456, "0.0456")],
)
def test_cells_show_the_digits_that_mean_something(
    cell: str | int | float | None, shown: str
) -> None:
    assert format_cell(cell) == shown


def test_commands_name_no_folder_of_this_machine(tmp_path: Path) -> None:
    shown = command_line("benchmarks.dial", ["--bundles", str(tmp_path / "mine"), "--quick"])
    assert shown == "python -m benchmarks.dial --bundles .../mine --quick"
    shown = command_line("benchmarks.early_answers", ["--data", f"digits={tmp_path / 'rows'}"])
    assert shown == "python -m benchmarks.early_answers --data digits=.../rows"


def _result() -> Result:
    return Result(
        name="one",
        title="One",
        about="About one.",
        command="python -m benchmarks.one",
        commit="abc1234",
        date="2026-01-01 00:00 UTC",
        machine=MACHINE,
        tables=[Table("A table.", ("what", "ms"), [["a", 1.5]])],
        targets=[Target("fast", 1.5, "<=", 2.0, "ms"), Target("right", 3, "==", 4)],
    )
