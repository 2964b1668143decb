"""The comparison with other servers: those that need nothing more are run, and its tables."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.client import Load
from benchmarks.lab import ROOT, Table
from benchmarks.peers import report, run
from benchmarks.peers.generation import ALONE, SERVED
from benchmarks.peers.report import PLAIN, Found, not_first
from benchmarks.peers.servers import PEERS, STEPDIAL, Cores, Environments, NotInstalled
from benchmarks.peers.speed import (
    CLIENTS,
    LEAVE_AT,
    LEAVERS,
    Departure,
    Ending,
    Overload,
    Refusal,
    Speed,
)
from benchmarks.server import Tree, start
from tests.fixtures.tiny_folders import classify_bundle
from tests.waiting import wait_until

BY_NAME = {one.name: one for one in PEERS}
LOAD = Load(100, 0, 1.0, (0.01,) * 100)
SPEED = Speed(
    start_s=1.0,
    one=LOAD,
    many=LOAD,
    in_time_per_s=80.0,
    one_cpu_ms=5.0,
    cpu_ms=4.0,
    call_rows=8.0,
    rss_mb=200.0,
    pss_mb=150.0,
)


@pytest.mark.long
def test_servers_that_are_installed_here_are_compared() -> None:
    bundle, cores = classify_bundle(), Cores.of_machine()
    founds = [Found(BY_NAME[STEPDIAL]), Found(BY_NAME["FastAPI"])]
    pythons = {one.peer.name: Path(sys.executable) for one in founds}
    model = run.model_of(bundle, bundle.manifest.full_steps)
    with cores.of_clients():
        run.compare(founds, pythons, model, cores, 0.1, quick=True)
    ours, bare = founds
    assert (ours.why, bare.why) == ("", "")
    assert len(ours.overloads) == 3 and list(bare.overloads) == [PLAIN]
    assert bare.speeds[0].call_rows == 1.0, "it has no batches"
    for found, status in ((ours, 400), (bare, 422)):
        assert found.refusal is not None and found.ending is not None
        assert found.refusal.status == status and "JSON" in found.refusal.said
        assert found.departure is not None and found.departure.gone <= LEAVERS - LEAVE_AT
        ending = found.ending
        assert ending.answered + ending.refused + ending.lost == CLIENTS
        assert ending.stayed == 0 and ending.gone_s is not None
    assert ours.ending is not None and ours.ending.lost == 0
    assert ours.departure is not None
    assert ours.departure.rows <= 16, "more than the call under way"
    columns = report.speeds(founds, 100.0).columns
    for row in report.speeds(founds, 100.0).rows:
        memory = row[columns.index("PSS MB")]
        assert isinstance(memory, float) and memory > 20


def test_where_another_is_first_the_figures_of_the_run_say_why() -> None:
    ours = _found(STEPDIAL, SPEED, SPEED)
    mosec = _found("mosec", replace(SPEED, in_time_per_s=90.0, cpu_ms=3.0, rss_mb=100.0))
    unclear = [replace(SPEED, start_s=start_s) for start_s in (0.5, 1.2)]
    lit = _found("LitServe", *unclear)
    missing = Found(BY_NAME["Triton"], why="it needs another Python")
    founds = [ours, mosec, lit, missing]
    losses = {str(row[0]): row for row in report.losses(founds, rungs=4).rows}
    assert losses["requests/s in time"][1:] == [
        *(80.0, "mosec", 90.0),
        "4.00 ms of processor time a request against 3.00, and 8.0 rows a call against 8.0",
    ]
    assert "Stepdial has 4 rungs ready" in str(losses["RSS MB"][4])
    assert str(losses["start s"][4]).startswith("not told apart: starts of Stepdial gave 1 to 1")
    assert "1 client, p50 ms" not in losses, "a shared first place is first"
    shown = {row[0]: row[3] for row in report.compared(founds).rows}
    assert shown["Triton"] == "no: it needs another Python" and shown["mosec"] == "yes"
    assert report.speeds(founds, 100.0).rows[0][0] == "mosec"
    targets = {target.what: target for target in report.targets(founds)}
    assert targets["in time, of mosec's"].value == pytest.approx(80 / 90)
    assert not targets["in time, of mosec's"].met
    assert targets["in time, of the best with a Python front"].met
    assert not_first([mosec, lit], rungs=4) == []


def test_faults_have_a_row_each() -> None:
    ours = _found(STEPDIAL, SPEED)
    lit = _found("LitServe", SPEED)
    lit.ending = Ending(answered=1, lost=31, gone_s=None, stayed=3)
    rows = report.faults([ours, lit]).rows
    assert [row[1] for row in rows] == [400, 400]
    assert rows[1][5:] == [1, 0, 31, "never: 3 processes stay"]
    asked = report.overload([ours, lit], 100.0)
    assert asked.rows[0][5] == "2 x 429" and asked.rows[0][-1] == "yes"
    lost = {str(row[0]) for row in report.losses([ours, lit], rungs=1).rows}
    assert not lost & {"lost at SIGTERM", "gone after SIGTERM, s"}


def test_ways_to_write_are_ordered_and_explained() -> None:
    rates = {(f"{STEPDIAL} fp32{SERVED}", 1): 100.0, (f"{STEPDIAL} fp32{ALONE}", 1): 125.0}
    rates |= {("CTranslate2 fp32", 1): 200.0, ("transformers fp32", 1): 20.0}
    table: Table = report.generation(rates)
    assert table.rows[0][1] == "CTranslate2 fp32"
    assert table.rows[0][3:] == [
        2.0,
        "a token of a row takes it 5.00 ms, our fp32 runtime 8.00 ms, and our server 2.00 ms more",
    ]
    assert [row[4] for row in table.rows[1:]] == ["", "", ""]


def test_what_cannot_be_installed_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="inside the repository"):
        Environments(ROOT / "build")
    with pytest.raises(NotInstalled, match="which is not on this machine"):
        Environments(tmp_path).python("one", ("none==1",), tmp_path / "python")
    with pytest.raises(SystemExit):
        run.main(["--environments", str(ROOT / "build")])


def test_a_tree_is_all_that_was_started(tmp_path: Path) -> None:
    child = "import time; time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    tree = Tree(start([sys.executable, "-c", parent], {}, tmp_path / "log"))
    try:
        wait_until(lambda: len(tree.members()) == 2)
        rss_mb, pss_mb = tree.memory_mb()
        assert rss_mb >= pss_mb > 0
        tree.process.terminate()
        assert tree.gone_s(0.2) is None, "the child outlives what started it"
        assert len(tree.members()) == 1
    finally:
        tree.end(patience_s=0.1)
    assert tree.members() == []


def _found(name: str, *speeds: Speed) -> Found:
    overload = Overload(400.0, 10.0, (0.05, 0.2), {429: 2}, 0, (0.001,), retry_after=True)
    return Found(
        peer=BY_NAME[name],
        speeds=list(speeds),
        processes=1,
        refusal=Refusal(400, "no JSON"),
        departure=Departure(50, 3),
        overloads={PLAIN: overload},
        ending=Ending(answered=32, gone_s=0.1),
    )
