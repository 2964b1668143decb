"""The benchmarks run, and keep what they found."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import (
    classify_speed,
    decode,
    dial,
    export_time,
    first_answer,
    memory,
    overhead,
    precision,
    quality,
    served_memory,
    soak,
    throughput,
)
from benchmarks.lab import (
    Machine,
    Result,
    Table,
    Target,
    command_line,
    format_cell,
    interleave,
    median_ratio,
)
from benchmarks.run import SCRIPTS
from benchmarks.served_memory import folder_bytes, one_rung
from benchmarks.texts import text_of, window_of
from serve.bundle import AgainstFp32, Bundle, open_staging, seal_bundle
from serve.inputs.text import TextCodec
from serve.runtime import open_model
from tests.tiny_bundles import build_classify, build_generate

pytestmark = pytest.mark.long

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


def _met(result: Result) -> dict[str, bool]:
    return {target.what: target.met for target in result.targets}


def test_dial_asks_for_every_rung_and_is_told_so(bundles: list[Bundle], tmp_path: Path) -> None:
    result = _run(dial, "dial", bundles, tmp_path)
    rows = result.tables[0].rows
    assert {row[1] for row in rows} == {1, 2, 4}
    assert len(rows) == 3 * 2  # the window of the tiny classifier is shorter than 100 tokens
    assert _met(result)["answers that took the steps they were asked for"]
    assert result.targets[-1].value == sum(int(row[5] or 0) for row in rows)


def test_overhead_compares_the_same_work(bundles: list[Bundle], tmp_path: Path) -> None:
    result = _run(overhead, "overhead", bundles, tmp_path)
    assert len(result.tables[0].rows) == 2 * (3 + 1)
    for _, _, bare_ms, http_ms, added_ms, _, times in result.tables[0].rows:
        assert isinstance(bare_ms, float) and isinstance(http_ms, float)
        assert added_ms == pytest.approx(http_ms - bare_ms)
        assert isinstance(times, int) and times >= 2


def test_speed_is_measured_in_every_way_and_answers_are_right(tmp_path: Path) -> None:
    decoding = _run(decode, "decode", [], tmp_path)
    assert len(decoding.tables[0].rows) == 3 * 2 + 1 + 3 * 2 + 1
    classifying = _run(classify_speed, "classify_speed", [], tmp_path)
    assert len(classifying.tables[0].rows) == 2 + 2 * 2 + 1
    for result in (decoding, classifying):
        assert _met(result)["largest difference of a logit from torch"]


def test_an_export_is_timed_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = export_time._in_own_process("fp32", (1,), quick=True)
    stages_s = found["stages_s"]
    assert set(stages_s) == {"before", *export_time.STAGES} - {"compare"}
    assert min(stages_s.values()) > 0 and sum(stages_s.values()) < found["cpu_s"]
    assert found["bytes"] > 160_000 and found["peak_bytes"] > 1e8
    monkeypatch.setattr(export_time, "_in_own_process", lambda *_: found)
    result = _run(export_time, "export_time", [], tmp_path)
    assert [row[1] for row in result.tables[0].rows] == ["2", "2, quality on two rows", "1"]
    assert result.targets[-1].value == 1


def test_a_served_ladder_is_weighed_beside_one_rung(bundles: list[Bundle], tmp_path: Path) -> None:
    result = _run(served_memory, "served_memory", bundles, tmp_path)
    *served, bare = result.tables[0].rows
    assert [row[2] for row in served] == [1, 3, 1, 3]
    assert all(float(row[3] or 0) > float(bare[3] or 0) > 10 for row in served)


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


def test_memory_grows_by_the_states_and_is_the_same_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(steps: int, checkpoint: bool, quick: bool) -> int:
        return memory.training_peak(memory.QUICK, steps, checkpoint)

    alone = memory._in_own_process(memory.FEW, True, quick=True)
    assert alone == pytest.approx(here(memory.FEW, True, quick=True), rel=0.01)
    monkeypatch.setattr(memory, "_in_own_process", here)
    result = _run(memory, "memory", [], tmp_path)
    assert all(_met(result).values())
    with_checkpoints, without = (float(row[4] or 0) for row in result.tables[0].rows)
    assert 1 <= with_checkpoints < 1.2 and without > 10


def test_soak_ends_without_an_error_and_with_empty_gauges(
    bundles: list[Bundle], tmp_path: Path
) -> None:
    result = _run(soak, "soak", bundles, tmp_path)
    met = _met(result)
    del met["RSS added by the second load"]  # two seconds are too short to tell
    assert all(met.values()), result.text
    assert "stepdial_in_flight after a load" in met


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


def test_first_answer_measures_the_zoo_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        first_answer.main(["--bundles", "some"])
    assert "the demo serves the zoo" in capsys.readouterr().err


def test_texts_have_the_wanted_number_of_tokens(bundles: list[Bundle]) -> None:
    codec, window = TextCodec(bundles[1]), window_of(bundles[1].manifest)
    assert window == 48
    for wanted in (1, 20, window):
        found = len(codec.encode_input(text_of(codec, wanted), truncate=True).tokens)
        assert wanted <= found <= wanted + 12


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


def test_targets_that_are_missed_say_so() -> None:
    text = _result().markdown
    assert "| fast | <= 2 ms | 1.50 ms | met |" in text
    assert "| right | == 4 | 3 | MISSED |" in text
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


MODULES = (
    *(quality, precision, export_time, served_memory, dial, overhead, decode),
    *(classify_speed, throughput, memory, soak, first_answer),
)


def test_every_script_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for module in MODULES:
        assert module.NAME in SCRIPTS
        with pytest.raises(SystemExit) as ended:
            module.main(["--help"])
        assert ended.value.code == 0
    assert capsys.readouterr().out.count("--quick") >= len(SCRIPTS)


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
