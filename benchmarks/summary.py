"""The first screen of RESULTS.md: what is compared with whom, and at what cost, in kept figures.

Every figure is read from a kept result. A question whose results are not there is left out.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean

from benchmarks.lab import Cell, Result, Table

_TITLE = "Is it faster, is it better, and what does it cost?"
_WORDS = {3: "three", 8: "eight"}
_NOTE = "Each answer is of one run; its section names the machine, the versions and the date."


@dataclass(frozen=True, slots=True)
class Kept:
    """The results by name; what is not in them is a LookupError."""

    results: Mapping[str, Result]

    def table(self, name: str, column: str) -> Table:
        """The first table of a result that has this column."""
        return next(one for one in self.results[name].tables if column in one.columns)

    def cell(self, name: str, column: str, *row: Cell) -> float:
        """The value under a column in the row that begins with these cells."""
        table = self.table(name, column)
        for one in table.rows:
            if tuple(one[: len(row)]) == row:
                return float(one[table.columns.index(column)] or 0)
        raise KeyError(row)

    def most_steps(self, model: str) -> int:
        """The most steps at which the quality of a model of the zoo was measured."""
        rows = self.table("quality", "value").rows
        steps = [str(row[1]) for row in rows if row[0] == model]
        counts = [int(one.removeprefix("steps ")) for one in steps if one.startswith("steps ")]
        if not counts:
            raise KeyError(model)
        return max(counts)

    def figure(self, name: str, what: str) -> float:
        """A figure that a result names."""
        return next(one.value for one in self.results[name].targets if one.what == what)

    def best_other(self, name: str, column: str) -> tuple[str, float]:
        """Who has the most of it beside the first row, which is ours."""
        table = self.table(name, column)
        place = table.columns.index(column)
        values = [(str(row[0]), float(row[place] or 0)) for row in table.rows]
        return max(
            (one for one in values if one[0] != values[0][0]),
            key=lambda one: one[1],
        )


def _servers(kept: Kept) -> str:
    column = "requests/s in time"
    next_one, per_s = kept.best_other("peers", column)
    ours_mb, mb = (kept.cell("peers", "RSS MB", name) for name in ("stepdial", next_one))
    return (
        f"{kept.cell('peers', column, 'stepdial'):.1f} requests a second within 100 ms; "
        f"{next_one}, the next, {per_s:.1f}. Cost: {ours_mb:.0f} MB of memory against {mb:.0f}"
    )


def _overload(kept: Kept) -> str:
    table = kept.table("peers", "in time/s")
    place = table.columns.index("in time/s")
    by_way = {(str(row[0]), str(row[1])): float(row[place] or 0) for row in table.rows}
    others = [value for (server, _), value in by_way.items() if server != "stepdial"]
    any_steps = by_way["stepdial", "any steps within the objective"]
    offered = kept.cell("peers", "offered/s", "stepdial")
    same = by_way["stepdial", "the same as of others"]
    return (
        f"{any_steps:.0f} a second answered within 100 ms, of {offered:.0f}; the others "
        f"{min(others):.0f} to {max(others):.0f}. Cost: fewer steps, and the rest is "
        f"refused at once; asked as the others are, {same:.0f}"
    )


def _writing(kept: Kept) -> str:
    def per_s(who: str) -> float:
        return kept.cell("peers", "tokens/s", 1, who)

    return (
        f"tokens a second of one row in 8 bits: {per_s('stepdial int8, over HTTP'):.0f} over HTTP, "
        f"CTranslate2 alone {per_s('CTranslate2 int8'):.0f}; in float32 "
        f"{per_s('stepdial fp32, over HTTP'):.0f}, {per_s('CTranslate2 fp32'):.0f}, and "
        f"transformers {per_s('transformers fp32'):.0f}"
    )


def _pytorch(kept: Kept) -> str:
    return (
        f"a token {kept.figure('decode', 'torch with caches, of fp32'):.1f} times as fast as eager "
        f"PyTorch with caches, {kept.figure('decode', 'torch with caches, of int8'):.1f} times in "
        "8 bits (on a Xeon with AVX-512 "
        f"{kept.figure('decode_avx512', 'torch with caches, of fp32'):.1f} and "
        f"{kept.figure('decode_avx512', 'torch with caches, of int8'):.1f} times); a text of 512 "
        "tokens takes "
        f"{kept.cell('classify_speed', 'of torch', 'fp32, single steps', 1):.2f} and "
        f"{kept.cell('classify_speed', 'of torch', 'int8, single steps', 1):.2f} of its time"
    )


def _quality(kept: Kept) -> str:
    def value(model: str, what: str) -> float:
        return kept.cell("quality", "value", model, what)

    found = [
        f"{model} {value(model, f'steps {kept.most_steps(model)}'):.4f} against "
        f"{value(model, 'discrete transformer'):.4f}, a bag of words "
        f"{value(model, 'bag of words'):.4f}, and all six layers, as slow as three steps, "
        f"{value(model, 'all layers of the original'):.4f}"
        for model in ("sentiment", "topics")
    ]
    loss = f"{value('shakespeare', 'steps 8'):.3f} against "
    loss += f"{value('shakespeare', 'discrete transformer'):.3f}"
    return f"accuracy: {'; '.join(found)}; shakespeare, nats a character: {loss}"


def _training(kept: Kept) -> str:
    ratios = [
        kept.cell("quality", "evaluations", model, "any step")
        / kept.cell("quality", "evaluations", model, "discrete")
        for model in ("sentiment", "topics", "shakespeare")
    ]
    return (
        f"{min(ratios):.1f} to {max(ratios):.1f} times as many evaluations as the one-step model "
        "took, for all step counts at once; an iteration as fast as a plain PyTorch loop "
        f"({kept.cell('throughput', 'ours over plain', 'character decoder'):.2f} times)"
    )


def _dial(kept: Kept) -> str:
    timed = [str(row[0]) for row in kept.table("dial", "of the largest").rows]
    longest = [one for one in timed if one.startswith("sentiment, a text of ")][-1]
    text = kept.cell("dial", "of the largest", longest, 1)
    token = kept.cell("dial", "of the largest", "shakespeare, a token of an answer of 200", 1)
    worse = kept.figure("quality", "shakespeare: worse at 1 than at 8 steps by")
    most = kept.most_steps("sentiment")
    few, many = (kept.cell("quality", "value", "sentiment", f"steps {n}") for n in (1, most))
    return (
        f"one step takes {text:.2f} of the time of {_WORDS[most]} for a text (sentiment), "
        f"{token:.2f} of that of eight for a token (shakespeare). Cost: "
        f"{max(0.0, 100 * (many - few)):.1f} points of accuracy, {worse:.3f} nats"
    )


def _range(kept: Kept) -> str:
    table = kept.table("dial_range_logic", "whole")
    value = table.columns.index("value")
    seeds: dict[str, list[float]] = {}
    for row in table.rows:
        seeds.setdefault(str(row[1]), []).append(100 * float(row[value] or 0))
    found = {what: f"{mean(shares):.1f}" for what, shares in seeds.items()}
    steps = [what for what in found if what.endswith("steps")]
    plain = [what for what in found if what.startswith("plain")]
    return (
        f"right cells of sudokus: {found[steps[0]]} % at {steps[0].removesuffix('s')}, "
        f"{found[steps[-1]]} % at {steps[-1]}; {plain[-1]}: {found[plain[-1]]} %"
    )


def _right(kept: Kept) -> str:
    table = kept.table("overload", "times")
    rows = {str(row[0]): row for row in table.rows}
    ours, times = table.columns.index("dial, a second"), table.columns.index("times")

    def shown(load: int) -> str:
        cells, whole = (rows[f"right {what}, {load} x"] for what in ("positions", "texts"))
        more = whole[times]
        compared = f"{float(whole[ours] or 0):.0f} whole ones a second, the others none"
        if more is not None:
            compared = f"{float(more):.1f} times the whole ones"
        return f"{float(cells[times] or 0):.2f} times the right cells and {compared}"

    return f"sudokus at twice the load: {shown(2)}; at 4 times: {shown(4)}"


def _deadlines(kept: Kept) -> str:
    table = kept.table("deadlines", "in time")
    place = table.columns.index("in time")
    ours, full, unmanaged = (
        next(row[place] for row in table.rows if tuple(row[:2]) == (way, "4 x"))
        for way in ("Stepdial", "full steps, same admission", "full steps, one after another")
    )
    return (
        f"at 4 times the load {ours} in time; with all steps {full}, without admission {unmanaged}"
    )


def _http(kept: Kept) -> str:
    share = kept.figure("bare_fastapi", "requests/s of 32 clients, over bare")
    added_ms = kept.figure("bare_fastapi", "added at the median, one client")
    return (
        f"{added_ms:.2f} ms a request at one client, and {1 - share:.0%} of the most requests a "
        "second, with a model that answers at once"
    )


def _memory(kept: Kept) -> str:
    def ladder(bundle: str, precision: str) -> float:
        return kept.cell("served_memory", "PSS, MB", bundle, precision, 6)

    return (
        f"{ladder('decoder-fp32', 'fp32'):.0f} MB with six step counts, "
        f"{kept.cell('served_memory', 'PSS, MB', 'decoder-fp32', 'fp32', 1):.0f} with one; "
        f"{ladder('decoder-int8', 'int8'):.0f} in 8 bits"
    )


def _lost(kept: Kept) -> str:
    swaps = kept.cell("swaps", "measured", "swaps")
    failed = kept.figure("swaps", "requests that failed or were cut off")
    signals = kept.cell("drains", "signals", "time to finish")
    cut = kept.figure("drains", "streams with time that did not finish")
    kills = kept.cell("kills_server", "times", "server", "kills")
    wrong = kept.figure("kills_server", "server: lost, wrong, incomplete or left behind")
    return (
        f"{failed:.0f} requests in {swaps:.0f} swaps, {cut:.0f} streams in {signals:.0f} SIGTERMs; "
        f"{wrong:.0f} wrong answers in {kills:.0f} kill -9, which cut off what was under way"
    )


@dataclass(frozen=True, slots=True)
class Question:
    """What a user asks, beside whom, and the results that answer it; the first is linked."""

    asked: str
    beside: str
    result: str
    answer: Callable[[Kept], str]


QUESTIONS = (
    Question(
        "Does it classify faster?",
        "FastAPI, Triton, MLServer, LitServe, mosec, BentoML; same graph, one core",
        "peers",
        _servers,
    ),
    Question("And at 4 times what it can do?", "the same", "peers", _overload),
    Question("Does it write faster?", "CTranslate2, transformers", "peers", _writing),
    Question("Is it faster than PyTorch?", "eager PyTorch, one thread", "decode", _pytorch),
    Question("Are answers better?", "a plain transformer of about that size", "quality", _quality),
    Question("What does training cost?", "the same, one step", "quality", _training),
    Question("What do more steps buy?", "transformers without steps", "dial_range_logic", _range),
    Question("And under overload?", "the better plain model", "overload", _right),
    Question("What do fewer steps save?", "itself at its most steps", "dial", _dial),
    Question("Are deadlines kept?", "the same model at all steps", "deadlines", _deadlines),
    Question("What does the server add?", "a bare FastAPI handler", "bare_fastapi", _http),
    Question("Memory of many step counts?", "one step count", "served_memory", _memory),
    Question("What is lost when things break?", "nothing lost", "swaps", _lost),
)


def summary(results: Mapping[str, Result]) -> str:
    """The questions and their answers, as a section; empty where nothing can be answered."""
    kept = Kept(results)
    rows = []
    for one in QUESTIONS:
        try:
            answer = one.answer(kept)
        except (LookupError, StopIteration):
            continue
        link = f"[{one.asked}](#{_anchor(results[one.result].title)})"
        rows.append(f"| {link} | {one.beside} | {answer} |")
    if not rows:
        return ""
    head = ["| question | beside | answer |", "| --- | --- | --- |"]
    return "\n".join([f"## {_TITLE}", "", _NOTE, "", *head, *rows]) + "\n"


def _anchor(title: str) -> str:
    """The name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
