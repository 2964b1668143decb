"""The frontier: which rungs are on it and what they are called; how it is printed and drawn."""

import dataclasses
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

from export.__main__ import main
from export.inspect import (
    check_plain,
    compared,
    describe,
    draw,
    flat_in_words,
    labels_of,
    not_comparable,
    plain_in_words,
    range_in_words,
)
from export.quality import Measured, choose_default, dominated, named_rungs
from serve.bundle import (
    AgainstFp32,
    Bundle,
    Calibration,
    Level,
    Metric,
    Quality,
    Range,
    open_staging,
    read_bundle,
    seal_bundle,
    steps_in_words,
    write_latency,
)
from tests.fixtures.tiny_bundles import restage
from tests.fixtures.tiny_folders import (
    classify_bundle,
    generate_bundle,
    image_bundle,
    translate_bundle,
)
from train.tally import PerRow


def measured(metric: Metric, values: list[float]) -> dict[int, Measured]:
    """Rungs of 1, 2, 4, ... steps whose rows are all alike."""
    return {
        2**index: Measured(
            Quality(metric, value, value, value, 100),
            np.full(100, value),
        )
        for index, value in enumerate(values)
    }


def test_a_rung_is_dominated_where_fewer_steps_are_at_least_as_good() -> None:
    assert dominated(measured("accuracy", [0.7, 0.8, 0.8, 0.75, 0.9])) == {4, 8}
    assert dominated(measured("loss", [2.0, 1.9, 1.95, 1.9, 1.8])) == {4, 8}
    assert dominated(measured("loss", [2.0])) == set()
    assert dominated(measured("accuracy", [0.9, 0.8, 0.7])) == {2, 4}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([0.7, 0.8, 0.9], {1: "low", 2: "medium", 4: "max"}),
        ([0.7, 0.9, 0.8], {1: "low", 2: "max"}),
        ([0.9, 0.8, 0.7], {1: "max"}),
        ([0.7, 0.75, 0.75, 0.8, 0.85, 0.84], {1: "low", 2: "medium", 8: "high", 16: "max"}),
    ],
)
def test_words_name_rungs_of_the_frontier_only(values: list[float], named: dict[int, str]) -> None:
    found = measured("accuracy", values)
    rung = image_bundle().manifest.rungs[0]
    rungs = tuple(
        dataclasses.replace(rung, steps=steps, effort=None, graph=f"steps-{steps}.onnx")
        for steps in found
    )
    after = named_rungs(rungs, found)
    assert {rung.steps: rung.effort for rung in after if rung.effort} == named
    assert {rung.steps for rung in after if rung.dominated} == dominated(found)


def test_the_default_is_on_the_frontier() -> None:
    """One step is as good as two, so two are never the default; whether it is worse is open."""
    rows = np.full(100, 2.0)
    noise = np.array([0.2, -0.2] * 50)

    def of(per_row: PerRow, value: float) -> Measured:
        return Measured(Quality("loss", value, value, value, 100), per_row)

    found = {1: of(rows + noise, 2.0), 2: of(rows, 2.0), 8: of(rows - 0.001, 1.999)}
    assert dominated(found) == {2}
    assert choose_default(found) == 1
    found[1] = of(rows + 0.02 + noise / 10, 2.02)  # now it is surely worse, and two are not
    assert choose_default(found) == 2
    assert choose_default({steps: found[steps] for steps in (2, 8)}) == 2


LEVELS = (Level(0.002, None, 4.0, 0.0), Level(0.01, 1.5, 1.25, 0.004))


def changed(bundle: Bundle, **changes: Any) -> Bundle:
    manifest = dataclasses.replace(bundle.manifest, **changes)
    return dataclasses.replace(bundle, manifest=manifest)


def int8(bundle: Bundle, shift: float = -0.001) -> Bundle:
    """The bundle as if quantised: every rung a little different, the last not worth its steps."""
    rungs = tuple(
        dataclasses.replace(
            rung,
            quality=dataclasses.replace(
                rung.quality,
                value=rung.quality.value + shift,
                low=rung.quality.low + shift,
                high=rung.quality.high + shift,
            ),
            against_fp32=AgainstFp32(0.9975, shift, 1000),
            dominated=rung.steps == 4,
            effort=None if rung.steps == 4 else rung.effort,
        )
        for rung in bundle.manifest.rungs
    )
    return changed(bundle, precision="int8", rungs=rungs)


def at(bundle: Bundle, factor: float) -> Bundle:
    """The bundle as if every call took this many times as long."""
    assert bundle.latency is not None
    entries = tuple(
        dataclasses.replace(entry, median_ms=factor * entry.median_ms, p95_ms=factor * entry.p95_ms)
        for entry in bundle.latency.entries
    )
    return dataclasses.replace(bundle, latency=dataclasses.replace(bundle.latency, entries=entries))


def test_the_ladder_says_precision_graphs_frontier_and_early_answers() -> None:
    plain = describe(image_bundle())
    assert "fp32, graphs of one step and of each step count" in plain
    assert "max_disagreement: not measured" in plain and "as fp32" not in plain
    bundle = changed(
        int8(image_bundle()), calibration=Calibration(4321, 0.95, "rows kept for it", LEVELS)
    )
    lines = describe(bundle).splitlines()
    early = lines.index(next(line for line in lines if "max_disagreement of a request" in line))
    row = {line.split()[0]: line for line in lines[:early]}
    assert row["2"].split()[-1] == "yes" and row["4"].split()[-2:] == ["-", "*"]
    assert "99.75%   -0.0010" in row["1"]
    assert lines[early + 2].split() == ["0.2", "%", "0.00", "%", "4.00", "all", "steps"]
    assert lines[early + 3].split() == ["1", "%", "0.40", "%", "1.25", "1.500"]
    assert lines[early + 4].strip() == (
        "each certified with 95 % confidence on 4,321 rows kept for it"
    )
    assert max(map(len, lines)) <= 110


def test_only_a_classifier_is_told_of_early_answers() -> None:
    for bundle in (generate_bundle(), translate_bundle()):
        assert "max_disagreement" not in describe(bundle)
    assert "a graph of each step count" in describe(translate_bundle())


def of(bundle: Bundle, name: str, parameters: int, value: float) -> Bundle:
    """A plain model of one quality."""
    rung = bundle.manifest.rungs[0]
    quality = dataclasses.replace(rung.quality, value=value, low=value, high=value)
    shape = dataclasses.replace(bundle.manifest.shape, parameters=parameters)
    rungs = (dataclasses.replace(rung, quality=quality),)
    bundle = dataclasses.replace(bundle, latency=None)
    return changed(bundle, name=name, shape=shape, rungs=rungs, full_steps=1, default_steps=1)


def test_plain_models_of_the_same_data_say_what_they_are_as_good_as() -> None:
    one = image_bundle()
    size, values = one.manifest.shape.parameters, [r.quality.value for r in one.manifest.rungs]
    small = of(one, "small", size, values[0] - 0.01)
    middle = of(one, "middle", 4 * size, values[1]).manifest
    said = plain_in_words(one.manifest, [middle, small.manifest])
    steps = [steps_in_words(count) for count in one.manifest.steps]
    assert said == [
        f"plain: small has {size:,} parameters and {100 * (values[0] - 0.01):.2f} %, worse than "
        f"{steps[0]} ({100 * values[0]:.2f} %)",
        f"plain: middle has {4 * size:,} parameters and {100 * values[1]:.2f} %, as good as "
        f"{steps[1]} ({100 * values[1]:.2f} %)",
        f"plain: none of up to {4 * size:,} parameters, 4 times as many as here, is as good as "
        f"{steps[-1]} ({100 * values[-1]:.2f} %)",
    ]
    large = of(one, "large", 8 * size, values[-1] + 0.01).manifest
    assert plain_in_words(one.manifest, [middle, large])[-1] == (
        f"plain: {8 * size:,} parameters, 8 times as many as here, are as good as {steps[-1]} "
        f"({100 * values[-1]:.2f} %)"
    )
    assert f"  {said[0]}" in describe(one, [small.manifest]).splitlines()
    with pytest.raises(ValueError, match="tiny-generate is not comparable: the task of A"):
        check_plain(one.manifest, [generate_bundle().manifest])


def test_less_loss_is_better_in_plain_models_too() -> None:
    one = generate_bundle()
    size, values = one.manifest.shape.parameters, [r.quality.value for r in one.manifest.rungs]
    plain = of(one, "plain", 2 * size, values[1] + 1e-4).manifest
    assert (
        f"as good as {steps_in_words(one.manifest.steps[0])}"
        in plain_in_words(one.manifest, [plain])[0]
    )
    check_plain(one.manifest, [plain])


def test_two_bundles_stand_side_by_side() -> None:
    one = image_bundle()
    lines = compared(one, at(int8(one, 0.05), 0.5)).splitlines()
    facts = {line[:15].strip(): line[15:].split() for line in lines}
    assert facts["precision"] == ["fp32", "int8"]
    assert facts["size"][-3:] == ["1.00", "of", "A"]
    row = next(line for line in lines if line.split()[0] == "2").split()
    assert row[:5] == ["2", "0.8200", "0.8700", "+0.0500", "apart"] and row[-1] == "0.50"
    assert "overlap" in compared(one, int8(one)).splitlines()[-2]
    assert "accuracy (higher is better)" in "\n".join(lines)
    assert "loss (lower is better)" in compared(generate_bundle(), generate_bundle())


def test_rungs_that_one_lacks_and_latencies_from_elsewhere_are_said() -> None:
    one = image_bundle()
    assert one.latency is not None
    elsewhere = dataclasses.replace(
        one.latency,
        machine=dataclasses.replace(one.latency.machine, cpu="another"),
        entries=tuple(entry for entry in one.latency.entries if entry.steps != 1),
    )
    fewer = dataclasses.replace(one.manifest, rungs=one.manifest.rungs[1:])
    text = compared(one, dataclasses.replace(one, manifest=fewer, latency=elsewhere))
    row = next(line for line in text.splitlines() if line.split()[0] == "1").split()
    assert row == ["1", "0.8000", "-", "-", "-", row[5], "-", "-"]
    assert "different machines" in text and "different machines" not in compared(one, one)


def test_what_cannot_be_compared_is_said_with_the_reason() -> None:
    images = image_bundle().manifest
    text, letters = classify_bundle().manifest, generate_bundle().manifest
    reason = not_comparable(images, letters)
    assert reason is not None and "task" in reason
    assert not_comparable(images, text) == "they tell different classes apart"
    tokenizer = dataclasses.replace(letters.files["tokenizer.json"], sha256="0" * 64)
    other = dataclasses.replace(letters, files={**letters.files, "tokenizer.json": tokenizer})
    assert "tokenizers differ" in str(not_comparable(letters, other))
    translator = translate_bundle().manifest
    bleu = Quality("bleu", 20.0, 19.0, 21.0, 100)
    rungs = tuple(dataclasses.replace(rung, quality=bleu) for rung in translator.rungs)
    scored = dataclasses.replace(translator, rungs=rungs)
    assert not_comparable(translator, scored) == "the quality of A is its loss, that of B its bleu"
    assert not_comparable(images, images) is None
    said = compared(image_bundle(), classify_bundle())
    assert said.endswith("not comparable: they tell different classes apart")


def test_bundles_of_one_name_are_told_apart_by_their_folders() -> None:
    one = image_bundle()
    other = dataclasses.replace(one, folder=Path("elsewhere/tiny"))
    assert labels_of([one, classify_bundle()]) == ["tiny-image", "tiny-classify"]
    assert labels_of([one, other]) == [str(one.folder), "elsewhere/tiny"]


def drawn(monkeypatch: pytest.MonkeyPatch, bundles: list[Bundle], path: Path) -> Figure:
    """The picture, kept open to look at."""
    figures: list[Figure] = []
    with monkeypatch.context() as patched:
        patched.setattr(pyplot, "close", figures.append)
        draw(bundles, [path])
    pyplot.close(figures[0])
    return figures[0]


def test_the_picture_marks_the_frontier_and_parts_its_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = image_bundle()
    figure = drawn(monkeypatch, [one, at(int8(one), 1.02)], tmp_path / "a.png")
    axes = figure.axes[0]
    assert axes.get_xlabel() == "latency, ms a request (median, one row)"
    assert "hollow" in axes.get_title(loc="left")
    labels = [text for text in axes.texts if text.get_visible()]
    assert {text.get_text() for text in labels} == {"1", "2", "4"}
    boxes = [text.get_window_extent() for text in labels]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    lengths = [np.size(line.get_xdata()) for line in axes.get_lines()]
    assert [length for length in lengths if length > 1] == [3, 2]  # through the frontiers only
    legend = figure.legends[0].get_texts()
    assert [text.get_text() for text in legend] == labels_of([one, one])


def test_without_latencies_the_picture_is_against_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = dataclasses.replace(generate_bundle(), latency=None)
    axes = drawn(monkeypatch, [bundle], tmp_path / "a.png").axes[0]
    assert axes.get_xlabel() == "velocity evaluations" and axes.yaxis_inverted()
    assert "lower is better" in axes.get_ylabel() and "hollow" not in axes.get_title(loc="left")


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_same_bundle_gives_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for path in paths:
        draw([image_bundle()], [path])
    first, second = (path.read_bytes() for path in paths)
    assert first == second and b"dc:date" not in first and b"CreationDate" not in first
    assert matplotlib.rcParams["svg.hashsalt"] is None  # only while drawing


def stored(bundle: Bundle, folder: Path) -> Path:
    """A changed bundle as a folder."""
    assert bundle.latency is not None
    with open_staging(folder) as staging:
        restage(bundle, staging)
        seal_bundle(staging, bundle.manifest, folder)
    write_latency(folder, bundle.latency)
    return folder


def test_the_command_draws_both_kinds_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one = image_bundle()
    a, b = stored(one, tmp_path / "a"), stored(at(int8(one), 0.5), tmp_path / "b")
    assert main(["inspect", str(a)]) == 0 and main(["inspect", str(a), str(b)]) == 0
    assert "plot" not in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}  # none that was not asked for
    assert main(["inspect", str(a), "--plot", "one.png"]) == 0
    assert "plot: one.png" in capsys.readouterr().out
    assert Path("one.png").read_bytes().startswith(b"\x89PNG")
    assert main(["inspect", str(a), str(b), "--plot", "two.svg"]) == 0
    assert not Path("two.png").exists() and "<svg" in Path("two.svg").read_text()
    other = str(generate_bundle().folder)
    assert main(["inspect", str(a), other]) == 0
    assert "not comparable: the task" in capsys.readouterr().out
    assert main(["inspect", str(a), other, "--plot", "three.svg"]) == 2
    assert "three.svg: the task of A" in capsys.readouterr().err
    assert not Path("three.svg").exists()  # no picture of what cannot be compared
    assert main(["inspect", str(a), "--plain", str(b)]) == 0
    assert "plain: tiny-image has" in capsys.readouterr().out
    assert main(["inspect", str(a), str(b), "--plain", str(b)]) == 2
    assert main(["inspect", str(a), "--plain", str(generate_bundle().folder)]) == 2
    assert "tiny-generate is not comparable" in capsys.readouterr().err
    assert main(["inspect", str(a), "--plot", "x.jpeg"]) == 2
    assert main(["inspect", str(a), "--plot", "nowhere/x.png"]) == 2
    assert "no folder nowhere" in capsys.readouterr().err
    assert read_bundle(b).manifest.precision == "int8"


def test_one_step_is_enough_only_where_that_is_shown() -> None:
    manifest = read_bundle(Path(__file__).parents[2] / "zoo" / "shakespeare").manifest
    flat = dataclasses.replace(
        manifest,
        default_steps=1,
        range=Range(low=-0.001, value=0.001, high=0.003),
        rungs=tuple(
            dataclasses.replace(rung, quality=Quality("loss", 1.5, 1.4, 1.6, 1000))
            for rung in manifest.rungs
        ),
    )
    assert str(flat_in_words(flat)).startswith("This model needs one step: up to 8, no")
    assert flat_in_words(dataclasses.replace(flat, range=None)) is None
    assert (
        flat_in_words(dataclasses.replace(flat, range=Range(low=0.0, value=0.01, high=0.03)))
        is None
    )
    between = Quality("loss", 1.4, 1.3, 1.5, 1000)
    rungs = (flat.rungs[0], dataclasses.replace(flat.rungs[1], quality=between), *flat.rungs[2:])
    assert flat_in_words(dataclasses.replace(flat, rungs=rungs)) is None


def test_a_range_that_may_be_chance_is_called_so() -> None:
    manifest = read_bundle(Path(__file__).parents[2] / "zoo" / "logic").manifest
    assert "16 steps are better than 1 step by 42.96 points" in str(range_in_words(manifest))
    doubtful = dataclasses.replace(manifest, range=Range(low=-0.0143, value=0.012, high=0.0383))
    assert range_in_words(doubtful) == (
        "range: 16 steps are not shown to be better than 1 step: a difference of 1.20 points of "
        "accuracy (95 % interval -1.43 to 3.83, row by row on the same data)"
    )
