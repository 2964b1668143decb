"""Data that needs no download: PARITY, ListOps, and the source text of Python's own library.

Each is a function of its arguments and, for the corpus, of the running Python's version.
"""

import random
import sysconfig
from pathlib import Path

Rows = list[tuple[str, str]]

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")


def parity(longest: int, rows: int, seed: int) -> Rows:
    """Random bit strings of 1 to `longest` bits after a start token; is the number of ones odd?"""
    draw = random.Random(seed)
    made: Rows = []
    for _ in range(rows):
        bits = [draw.randint(0, 1) for _ in range(draw.randint(1, longest))]
        made.append((" ".join(["^", *map(str, bits)]), "odd" if sum(bits) % 2 else "even"))
    return made


def all_parity(longest: int) -> Rows:
    """Every bit string of 1 to `longest` bits, once."""
    made: Rows = []
    for length in range(1, longest + 1):
        for value in range(2**length):
            bits = [(value >> i) & 1 for i in range(length)]
            made.append((" ".join(["^", *map(str, bits)]), "odd" if sum(bits) % 2 else "even"))
    return made


def listops(longest: int, rows: int, seed: int, depth: int = 5) -> Rows:
    """Nested MIN, MAX, MED and SM (sum mod 10) over digits, of at most `longest` tokens."""
    draw = random.Random(seed)
    made: Rows = []
    while len(made) < rows:
        tokens, value = _expression(draw, depth, root=True)
        if len(tokens) <= longest:
            made.append((" ".join(tokens), str(value)))
    return made


def _expression(draw: random.Random, depth: int, root: bool = False) -> tuple[list[str], int]:
    if not root and (depth <= 1 or draw.random() > 0.25):
        digit = draw.randint(0, 9)
        return [str(digit)], digit
    operator = draw.choice(OPERATORS)
    parts = [_expression(draw, depth - 1) for _ in range(draw.randint(2, 5))]
    tokens = [operator, *(token for part, _ in parts for token in part), "]"]
    return tokens, apply_operator(operator, [value for _, value in parts])


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
