"""The capacity model: held against simulated queues, and against what docs/deploying.md shows."""

import heapq
import json
import random
import shlex
from pathlib import Path

import pytest

from benchmarks.capacity import (
    Measured,
    Timed,
    main,
    replicas_by_capacity,
    replicas_by_time,
    slowest_s,
)
from tests.page_blocks import prints_like, read_blocks

PAGE = Path(__file__).parents[2] / "docs/deploying.md"
EQUAL = [Timed("equal", 1.0, 0.010)]
MIXED = [Timed("short", 3.0, 0.004), Timed("long", 1.0, 0.030)]


def scaled(mix: list[Timed], busy: float) -> list[Timed]:
    """The mix at the rate that keeps one replica so busy."""
    factor = busy / sum(kind.rate_per_s * kind.service_s for kind in mix)
    return [Timed(kind.name, kind.rate_per_s * factor, kind.service_s) for kind in mix]


def simulated_s(mix: list[Timed], requests: int = 100_000) -> float:
    """The 99th percentile of the slowest kind in a simulated queue, first come first served."""
    draw = random.Random(1)
    total = sum(kind.rate_per_s for kind in mix)
    kinds = draw.choices(mix, [kind.rate_per_s for kind in mix], k=requests)
    slowest = max(mix, key=lambda kind: kind.service_s)
    now_s = free_s = 0.0
    times_s = []
    for kind in kinds:
        now_s += draw.expovariate(total)
        free_s = max(now_s, free_s) + kind.service_s
        if kind is slowest:
            times_s.append(free_s - now_s)
    return heapq.nlargest(len(times_s) // 100, times_s)[-1]


@pytest.mark.parametrize("mix", [EQUAL, MIXED])
@pytest.mark.parametrize("busy", [0.5, 0.7, 0.9])
def test_the_formula_is_a_little_longer_than_a_real_queue(mix: list[Timed], busy: float) -> None:
    loaded = scaled(mix, busy)
    assert 0.97 < slowest_s(loaded, 1) / simulated_s(loaded) < 1.35


def test_as_many_replicas_as_the_objective_needs_and_no_more() -> None:
    mix = scaled(MIXED, 7.3)
    needed = replicas_by_time(mix, objective_s=0.1, headroom=0.0)
    assert slowest_s(mix, needed) <= 0.1 < slowest_s(mix, needed - 1)
    # Without an objective to speak of, the work alone counts.
    assert replicas_by_time(mix, objective_s=1e6, headroom=0.0) == 8
    assert replicas_by_time(mix, objective_s=1e6, headroom=1.0) == 15


def test_measured_capacities_add_up() -> None:
    mix = [Measured("a", 100.0, 80.0), Measured("b", 10.0, 20.0)]
    assert replicas_by_capacity(mix, headroom=0.0) == 2
    assert replicas_by_capacity(mix, headroom=0.5) == 3


def test_a_load_test_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"objective": "p99 <= 100ms", "met_per_s": 80.0}
    (tmp_path / "capacity.json").write_text(json.dumps(found), encoding="utf-8")
    ask = f"{tmp_path / 'capacity.json'}=100"
    assert main(["--ask", ask, "--spare", "2", "--memory-mb", "500"]) == 0
    printed = capsys.readouterr().out
    assert "4 replicas: 2 for the load" in printed and "2.0 GB of memory" in printed
    (tmp_path / "capacity.json").write_text(json.dumps(found | {"met_per_s": None}))
    assert main(["--ask", ask]) == 2
    assert "no rate was found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ask", "nothing=1"], "was not measured; there are"),
        (["--ask", "a"], "send NAME=RATE"),
        (["--ask", "a=-1"], "a rate a second above 0"),
        (["--ask", "a=1", "--ask", "b.json=1"], "not both"),
        (["--ask", "missing/capacity.json=1"], "No such file"),
        (["--ask", "sentiment, a text of 100 tokens, 3 steps=1", "--p99-ms", "1"], "fewer steps"),
    ],
)
def test_what_cannot_be_planned_says_why(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert told in capsys.readouterr().err


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = read_blocks(PAGE.read_text(encoding="utf-8"))
    shown = {block.name: block.text for block in blocks if block.kind == "output"}
    commands = [block for block in blocks if block.kind == "test"]
    assert shown.keys() == {block.name for block in commands}
    for block in commands:
        arguments = shlex.split(block.text.replace("\\\n", " "))
        assert arguments.pop(0) == "python" and arguments[:2] == ["-m", "benchmarks.capacity"]
        assert main(arguments[2:]) == 0
        printed = capsys.readouterr().out
        assert prints_like(shown[block.name], printed, "text"), (
            f"{PAGE.name} is of older results; it should show:\n{printed}"
        )
