"""Writes the figures of README.md and of two pages of docs from the zoo and from kept results.

    python -m benchmarks.readme                       # write the pages again
    python -m benchmarks.readme --check               # status 1 if one differs
    python -m benchmarks.readme --measure --plain FOLDER --data DATA

The last form measures every figure of speed in one go on a machine at rest, takes the picture of
the page, and writes the pages. FOLDER holds trained bundles of the plain models of `logic`, called
logic-plain and logic-plain4 (four times the size), and of `topics` and `sentiment`: topics-plain
and sentiment-plain. Those of the other models are only timed, which does not depend on what they
learnt: where FOLDER has no MODEL-plain, a run of two iterations is exported into it. DATA holds
`ag_news/`, `mnist/` and `tinyshakespeare/`.

What is between `<!-- figures: NAME -->` and `<!-- end -->` in a page is written here; a cell
whose measurement is missing says so.
"""

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import capacity
from benchmarks.lab import BASELINES, RESULTS, ROOT, ZOO, Cell, Result
from benchmarks.texts import window_of
from serve.bundle import Bundle, read_bundle
from serve.bundle.manifest import steps_in_words

PAGES = (ROOT / "README.md", ROOT / "docs" / "budgets.md", ROOT / "docs" / "deploying.md")
NOT_TIMED = "not timed"
_MARKED = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_MODELS = {
    "logic": "fills a sudoku of 6 x 6 cells",
    "sentiment": "film review: positive or negative",
    "topics": "news: World, Sports, Business, Sci/Tech",
    "shakespeare": "writes verse, character by character",
    "digits": "reads a handwritten digit",
}
# Of the models of which a plain one is only timed.
_RECIPES = {
    "shakespeare": ("shakespeare", "tinyshakespeare/input.txt"),
    "digits": ("mnist-any", "mnist"),
}
# What stands for a model in the table of times, as benchmarks.dial calls it; of the others a text
# as long as they take.
_REQUESTS = {
    "logic": "a text of 36 tokens",
    "shakespeare": "a token of an answer of 200",
    "digits": "an image",
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it differs")
    parser.add_argument("--measure", action="store_true", help="measure the figures of speed first")
    parser.add_argument("--plain", type=Path, metavar="FOLDER", help="bundles of plain models")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parsed = parser.parse_args(arguments)
    if parsed.measure:
        if parsed.plain is None or parsed.data is None:
            parser.error("--measure needs --plain and --data")
        measure(parsed.plain, parsed.data)
    differ = False
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        written = with_figures(text)
        if written == text:
            continue
        differ = True
        if parsed.check:
            print(f"{page.name} differs from what was measured: python -m benchmarks.readme")
        else:
            page.write_text(written, encoding="utf-8")
    return int(parsed.check and differ)


def measure(plain: Path, data: Path) -> None:
    """One script after another; each keeps its result."""
    for name, (recipe, part) in _RECIPES.items():
        if not (plain / f"{name}-plain").is_dir():
            _untrained(recipe, data / part, f"{name}-plain", plain)
    zoo = [str(ZOO / name) for name in _MODELS]
    beside = [str(path.parent) for path in sorted(plain.glob("*/manifest.json"))]
    rivals = [one for one in beside if Path(one).name.startswith("logic-plain")]
    for module, flags in (
        ("dial", ["--bundles", *zoo, *beside]),
        ("deadlines", ["--bundles", str(ZOO / "topics"), "--data", str(data / "ag_news")]),
        ("overload", ["--bundles", str(ZOO / "logic"), *rivals]),
    ):
        _run(f"benchmarks.{module}", *flags)
    _run("docs.screenshot")


def _untrained(recipe: str, data: Path, name: str, folder: Path) -> None:
    """A plain bundle that takes as long as a trained one."""
    short = ["model.depth=discrete", "optim.iterations=2", "run.evaluate_every=2"]
    settings = [word for each in short for word in ("--set", each)]
    with tempfile.TemporaryDirectory() as runs:
        run = str(Path(runs) / name)
        _run("stepdial", "train", recipe, "--data", str(data), "--out", run, *settings)
        out = ["--name", name, "--out", str(folder / name), "--no-calibrate"]
        _run("stepdial", "export", run, *out)


def _run(module: str, *flags: str) -> None:
    subprocess.run([sys.executable, "-m", module, *flags], check=True, cwd=ROOT)


def with_figures(text: str) -> str:
    """The page with every marked part written again."""
    return _MARKED.sub(lambda found: found[1] + PARTS[found[2]]() + found[3], text)


# What is kept.


@cache
def _bundle(name: str) -> Bundle:
    return read_bundle(ZOO / name)


@cache
def _baselines() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BASELINES.read_text(encoding="utf-8"))
    return found


@cache
def _result(name: str) -> Result:
    return Result.read(RESULTS / f"{name}.json")


def _quality(name: str, steps: int) -> float:
    return _bundle(name).manifest.rung(steps).quality.value


def _baseline(name: str, kind: str) -> float | None:
    found = _baselines().get(name, {}).get(kind)
    return None if found is None else float(found["value"])


def _plain_logic() -> list[tuple[int, float]]:
    """Parameters and accuracy of plain models of one and four blocks, on the puzzles of `logic`."""
    found = {str(row["run"]): row for row in _rows("dial_range_logic")}
    beside = [found[f"logic-plain{blocks}-s0"] for blocks in (1, 4)]
    return [(int(row["parameters"] or 0), float(row["value"] or 0)) for row in beside]


def _rows(name: str) -> list[dict[str, Cell]]:
    """The first table of a result, by its columns."""
    table = _result(name).tables[0]
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def _compute_ms(model: str, request: str, steps: int) -> float | None:
    """Of one answer on an otherwise idle server; None if it was not timed."""
    for row in _rows("dial"):
        if (row["request"], row["steps"]) == (f"{model}, {request}", steps):
            return float(row["compute ms"] or 0)
    return None


def _source(name: str) -> str:
    result = _result(name)
    machine = f"{result.machine.cores} cores of {result.machine.cpu}"
    return f"`{result.command}` at {result.commit}, {result.date[:10]}, {machine}"


# The parts of the page.


def why() -> str:
    """The lines, each figure beside its opponent."""
    (small, at_small), (large, at_large) = _plain_logic()
    logic = _bundle("logic").manifest
    lines = [
        "**More steps buy accuracy where a task needs several.** A sudoku model of "
        f"{logic.shape.parameters:,} parameters (the best of three seeds) gets "
        f"{_percent(_quality('logic', 1))} of the empty cells right at 1 step"
        f"{_in_ms('logic', 1, 2)} and {_percent(_quality('logic', logic.full_steps))} at "
        f"{logic.full_steps}{_in_ms('logic', logic.full_steps, 2)}. A plain transformer of one "
        f"block and {small:,} parameters gets {_percent(at_small)}{_in_ms('logic-plain', 1, 2)}, "
        f"one of four blocks and {large:,} {_percent(at_large)}{_in_ms('logic-plain4', 1, 2)}; "
        "deeper ones were not trained.",
        _overload(),
        "**You know what you get.** Every answer says how many steps it took, why, and the "
        "quality that this step count has on held-out data.",
        _converted(),
        "**Why not Triton with a small model?** If you have a model and want it served as it is, "
        "take Triton. It runs a model at one cost: under load requests wait or are refused, unless "
        "you train two sizes and your clients choose. Here one model has all sizes, and the server "
        "chooses by its queue.",
        "**Not for large language models**: take vLLM, which spreads them over GPUs.",
        "**Young.** Version 0.1, measured on CPUs; there are no GPU figures yet.",
    ]
    return "\n".join(f"* {line}" for line in lines) + "\n"


def _converted() -> str:
    """A pretrained encoder as a dial, beside what else there is for its task."""
    beside = {kind: _baseline("sentiment", kind) for kind in ("discrete", "original")}
    found = {
        kind: "not measured" if value is None else _percent(value) for kind, value in beside.items()
    }
    words = _baseline("sentiment", "bag_of_words")
    assert words is not None
    dial = ", ".join(
        f"{_percent(_quality('sentiment', steps))} at {steps_in_words(steps)}"
        f"{_in_ms('sentiment', steps)}"
        for steps in _bundle("sentiment").manifest.steps
    )
    return (
        "**A pretrained encoder becomes a dial.** `stepdial convert` trains a small encoder or "
        f"decoder further. On film reviews MiniLM then gets {dial}; its six layers, fine-tuned, "
        f"get {found['original']} in about the time of 3 steps, two of them alone "
        f"{found['discrete']} in about that of 1{_in_ms('sentiment-plain', 1)}. Times are for 512 "
        f"tokens; {_shorter()}A bag of words gets {_percent(words)}: on such a task try one first."
    )


def _in_ms(model: str, steps: int, digits: int = 1) -> str:
    """How long an answer takes, if it was timed."""
    found = _compute_ms(model, _request(model.partition("-plain")[0]), steps)
    return "" if found is None else f" ({found:.{digits}f} ms)"


def _shorter() -> str:
    """The same of a text of usual length, if it was timed."""
    request = "a text of 100 tokens"
    ours, plain = (_compute_ms(model, request, 1) for model in ("sentiment", "sentiment-plain"))
    if ours is None or plain is None:
        return ""
    return f"with 100 one step takes {ours:.1f} ms, the two layers {plain:.1f}. "


def _overload() -> str:
    """Right cells a second of the dial beside the better plain transformer."""
    (twice, plain_twice), (four, plain_four) = map(_right_at, ("2 x", "4 x"))
    return (
        "**More right answers under overload.** At twice the load that the sudoku model "
        f"sustains at 16 steps, requests with a deadline give {twice:,.0f} right cells a second "
        f"in time, the better plain transformer {plain_twice:,.0f}. At four times the load the "
        f"plain one is ahead, {plain_four:,.0f} to {four:,.0f}. If only grids that are solved "
        "whole count, 16 steps for every request give the most "
        "([all figures](docs/budgets.md#under-overload))."
    )


def _right_at(load: str) -> tuple[float, float]:
    """Right cells a second: steps by the server, and the better of the plain transformers."""
    # Steps by the server, always all, then the plain transformers.
    dial, _, *plain = [
        float(row["right positions a second"] or 0)
        for row in _rows("overload")
        if row["load"] == load
    ]
    return dial, max(plain)


def overload() -> str:
    """What deadlines do to `logic` under load, beside plain transformers on the same server."""
    lines = [
        "| load | model | in time | steps (mean) | right cells a second | whole grids a second |",
        "|---|---|---:|---:|---:|---:|",
    ]
    names = {
        "logic, steps by the server": "`logic`, the server chooses the steps",
        "logic, 16 steps": "`logic`, always 16 steps",
        "logic-plain": "plain transformer, same size",
        "logic-plain4": "plain transformer, four times the size",
    }
    for row in _rows("overload"):
        load = str(row["load"]).replace(" x", " times")
        figures = (
            f"{float(row['steps'] or 0):.1f}",
            f"{float(row['right positions a second'] or 0):,.0f}",
            f"{float(row['right texts a second'] or 0):,.0f}",
        )
        lines.append(
            f"| {load} | {names[str(row['model'])]} | {row['in time']} | {' | '.join(figures)} |"
        )
    return "\n".join(lines) + f"\n\n{_source('overload')}.\n"


def deadline() -> str:
    """What a deadline does to `topics` at twice its load."""
    rows = [row for row in _rows("deadlines") if row["load"] == "2 x"]
    full = _bundle("topics").manifest.full_steps
    names = (
        f"the server chooses the steps ({float(rows[0]['steps'] or 0):.1f} on average)",
        f"always {full} steps, same admission by deadline",
        f"always {full} steps, first come first served",
    )
    lines = [
        f"| {rows[0]['requests']:,} requests | in time | refused | right, of those in time |",
        "|---|---:|---:|---:|",
        *(
            f"| {name} | {row['in time']} | {row['refused']} | {row['right']} |"
            for name, row in zip(names, rows, strict=True)
        ),
    ]
    return "\n".join(lines) + f"\n\n{_source('deadlines')}.\n"


def models() -> str:
    """One table of the models of the zoo beside what is simpler."""
    lines = [
        "| model | what it does | quality at 1, 2, 4, 8 steps | plain transformer, same size | "
        "linear model | ms at 1 and at 8 steps | ms, plain |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, about in _MODELS.items():
        cells = [
            f"`{name}`",
            about,
            _ladder(name),
            _plain(name),
            _linear(name),
            _times(name),
            _plain_times(name),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\nTimes: {_source('dial')}.\n"


def saved() -> str:
    """What fewer steps save: the time at 1, 2 and 4 steps beside that at the most."""
    times: dict[str, dict[int, float]] = {}  # as shares of the time of all steps, in turns
    for row in _rows("dial"):
        of_request = times.setdefault(str(row["request"]), {})
        of_request[int(row["steps"] or 0)] = float(row["of the largest"] or 0)
    lines = ["| request | most steps | 1 | 2 | 4 |", "|---|---:|---:|---:|---:|"]
    for request, of in times.items():
        most = min(8, max(of))
        shares = [f"{of[n] / of[most]:.2f}" if n in of and n < most else "" for n in (1, 2, 4)]
        if any(shares):
            lines.append(f"| {request} | {most} | {' | '.join(shares)} |")
    return "\n".join(lines) + f"\n\n{_source('dial')}.\n"


def _ladder(name: str) -> str:
    manifest = _bundle(name).manifest
    if manifest.full_steps < 8:
        counts = ", ".join(map(str, manifest.steps))
        return f"{counts} steps: {_values(name, [_quality(name, s) for s in manifest.steps])}"
    common = [steps for steps in manifest.steps if steps in (1, 2, 4, 8)]
    values = _values(name, [_quality(name, steps) for steps in common])
    further = [steps for steps in manifest.steps if steps > 8]
    more = [f"{steps} steps: {_values(name, [_quality(name, steps)])}" for steps in further]
    return "; ".join([values, *more])


def _plain(name: str) -> str:
    if name == "logic":
        (_, at_small), (_, at_large) = _plain_logic()
        return f"{_percent(at_small)}; four times the size: {_percent(at_large)}"
    found, whole = _baseline(name, "discrete"), _baseline(name, "original")
    if found is None:
        return "not measured"
    beside = "" if whole is None else f"; the six layers it is made of: {_values(name, [whole])}"
    return _values(name, [found]) + beside


def _linear(name: str) -> str:
    if name in ("logic", "shakespeare"):
        return "does not apply"
    found = _baseline(name, "bag_of_words")
    return "not measured" if found is None else _values(name, [found])


def _times(name: str) -> str:
    full = _bundle(name).manifest.full_steps
    most = min(8, full)
    first, last, all_steps = (_time(name, _request(name), steps) for steps in (1, most, full))
    if NOT_TIMED in (first, last):
        return NOT_TIMED
    shown = f"{first} and {last}" + ("" if most == 8 else f" (at {most})")
    return shown if full == most else f"{shown}; at {full}: {all_steps}"


def _plain_times(name: str) -> str:
    shown = _time(f"{name}-plain", _request(name), 1)
    if name != "logic":
        return shown
    return f"{shown}; four times the size: {_time('logic-plain4', _request(name), 1)}"


def _time(name: str, request: str, steps: int) -> str:
    found = _compute_ms(name, request, steps)
    return NOT_TIMED if found is None else f"{found:.2f}"


def _values(name: str, values: Sequence[float]) -> str:
    if _bundle(name).manifest.rungs[0].quality.metric == "loss":
        return ", ".join(f"{value:.3f}" for value in values) + " nats"
    return ", ".join(f"{100 * value:.1f}" for value in values) + " %"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _request(name: str) -> str:
    return _REQUESTS.get(name) or f"a text of {window_of(_bundle(name).manifest)} tokens"


def _replicas(name: str, steps: tuple[int, int]) -> str:
    """How many replicas a load needs, at steps of two models: the command, and what it prints."""
    asked = [f"sentiment, a text of 100 tokens, {steps[0]} steps=500"]
    asked += [f"topics, a text of 80 tokens, {steps[1]} steps=200"]
    given = ["--p99-ms", "100", "--price-per-hour", "0.10"]
    printed = io.StringIO()
    with redirect_stdout(printed):
        capacity.main([*given, *(word for text in asked for word in ("--ask", text))])
    lines = [f"python -m benchmarks.capacity {' '.join(given)}"]
    lines += [f"    --ask '{text}'" for text in asked]
    command = " \\\n".join(lines)
    return (
        f"<!-- test: {name} -->\n```bash\n{command}\n```\n\n"
        f"<!-- output: {name} -->\n```text\n{printed.getvalue()}```\n"
    )


PARTS: dict[str, Callable[[], str]] = {
    "why": why,
    "overload": overload,
    "deadline": deadline,
    "models": models,
    "saved": saved,
    "replicas": lambda: _replicas("replicas", (3, 3)),
    "cheaper": lambda: _replicas("cheaper", (1, 1)),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
