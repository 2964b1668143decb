"""Data that needs no download: PARITY, ListOps, and the source text of Python's own library.

Each is a function of its arguments and, for the corpus, of the running Python's version.
"""

import random
import sys
import sysconfig
from pathlib import Path

Rows = list[tuple[str, str]]

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")


TEST_SHARE = 0.1


def parity(longest: int, rows: int, seed: int) -> tuple[Rows, Rows]:
    """Bit strings drawn at random to train on, and every one there is, once, to test on.

    As in the N-ODE paper, the question is whether a model can represent the function, not whether
    it carries over to strings that it has not seen.
    """
    draw, every = random.Random(seed), all_parity(longest)
    return [draw.choice(every) for _ in range(rows)], every


def all_parity(longest: int) -> Rows:
    """Every string of 1 to `longest` bits after a start token; is the number of ones odd?"""
    made: Rows = []
    for length in range(1, longest + 1):
        for value in range(2**length):
            bits = [(value >> i) & 1 for i in range(length)]
            made.append((" ".join(["^", *map(str, bits)]), "odd" if sum(bits) % 2 else "even"))
    return made


def listops(
    longest: int, rows: int, seed: int, shortest: int = 0, nesting: int = 0
) -> tuple[Rows, Rows]:
    """Different nestings of MIN, MAX, MED and SM (sum mod 10) over digits: to train and to test on.

    Each has `shortest` to `longest` tokens; fewer than `rows` where there are not so many. Where
    there is a shortest, depth and arguments go up to 10, as in the Long Range Arena; else up to 5.
    With `nesting` each depth up to it is drawn as often; otherwise deep ones are rare.
    """
    most = 10 if shortest else 5
    room = longest if shortest else sys.maxsize  # deep nestings are mostly too long: give up early
    draw = random.Random(seed)
    made: dict[str, str] = {}
    for _ in range(20 * rows):
        try:
            if nesting:
                tokens, value = _nested(draw, draw.randint(1, nesting), longest)
            else:
                tokens, value = _expression(draw, most, most, room, root=True)
        except _TooLong:
            continue
        if shortest <= len(tokens) <= longest:
            made[" ".join(tokens)] = str(value)
        if len(made) == rows:
            break
    every = list(made.items())
    kept = max(1, int(len(every) * TEST_SHARE))
    return every[kept:], every[:kept]


class _TooLong(Exception):
    pass


def _expression(
    draw: random.Random, depth: int, most: int, room: int, root: bool = False
) -> tuple[list[str], int]:
    if room < 1:
        raise _TooLong
    if not root and (depth <= 1 or draw.random() > 0.25):
        digit = draw.randint(0, 9)
        return [str(digit)], digit
    operator = draw.choice(OPERATORS)
    tokens, values = [operator], []
    for _ in range(draw.randint(2, most)):
        part, value = _expression(draw, depth - 1, most, room - len(tokens) - 1)
        tokens += part
        values.append(value)
    return [*tokens, "]"], apply_operator(operator, values)


def _nested(draw: random.Random, depth: int, room: int) -> tuple[list[str], int]:
    """An expression of exactly this depth: one argument at least is one less deep."""
    if depth == 0:
        digit = draw.randint(0, 9)
        return [str(digit)], digit
    if room < 2 * depth + 2:
        raise _TooLong
    operator, count = draw.choice(OPERATORS), draw.randint(2, 5)
    deepest = draw.randrange(count)
    tokens, values = [operator], []
    for place in range(count):
        under = depth - 1
        if place != deepest and draw.random() > 0.25:
            under = 0
        elif place != deepest:
            under = draw.randint(0, depth - 1)
        part, value = _nested(draw, under, room - len(tokens) - 1)
        tokens += part
        values.append(value)
    if len(tokens) >= room:
        raise _TooLong
    return [*tokens, "]"], apply_operator(operator, values)


def listops_values(tokens: list[str]) -> list[str | None]:
    """The value of the expression that begins at each operator; other tokens have none."""
    values: list[str | None] = [None] * len(tokens)
    open_: list[tuple[int, list[int]]] = []
    for place, token in enumerate(tokens):
        if token in OPERATORS:
            open_.append((place, []))
        elif token == "]":
            begun, arguments = open_.pop()
            value = apply_operator(tokens[begun], arguments)
            values[begun] = str(value)
            if open_:
                open_[-1][1].append(value)
        else:
            open_[-1][1].append(int(token))
    return values


def apply_operator(operator: str, values: list[int]) -> int:
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[SM":
        return sum(values) % 10
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) // 2


def stdlib_text(limit: int = 1_500_000) -> str:
    """ASCII source files of the running Python's standard library in a fixed order, to `limit`."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[str] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if not text.isascii() or len(text) < 1000:
            continue
        parts.append(text)
        size += len(text)
        if size >= limit:
            break
    return "\n\n".join(parts)[:limit]
