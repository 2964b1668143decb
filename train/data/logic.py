"""Sudoku puzzles made on the spot, and the data set of them: one label for each cell of a grid.

A puzzle is dug out of a solved grid for as long as singles alone solve it: cells with one digit
left, and digits with one cell left in a row, column or box. So it has one solution, and a person
can find it. Grids that can be turned into each other by renaming digits or moving rows and columns
have the same form, and each form is in one split only, so no test puzzle is a training puzzle in
disguise. Training puzzles are turned at random each time they are drawn.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from train.data.batch import IGNORED, Batch, Sizes, as_tensor
from train.data.tables import DataError, Shuffle, digest_of
from train.data.text import train_tokenizer
from train.recipe import DataConfig

Cells = npt.NDArray[np.int64]  # (rows, cells): digits from 1, 0 where a cell is empty
BOXES = {6: (2, 3), 9: (3, 3)}  # rows and columns of a box, by the side of a grid
TEST_SHARE = 0.2
DRAWS = 20  # in a row that may keep no puzzle
DRAW = 1  # of the puzzles: every run has the same ones, whatever its seed


@dataclass(frozen=True, slots=True)
class Puzzles:
    given: Cells
    solved: Cells

    def __len__(self) -> int:
        return len(self.given)

    def at(self, rows: npt.NDArray[np.int64]) -> "Puzzles":
        return Puzzles(self.given[rows], self.solved[rows])


@dataclass(frozen=True, slots=True)
class Splits:
    train: Puzzles
    validation: Puzzles
    test: Puzzles


@lru_cache(maxsize=1)  # a run, its export and its evaluation ask for the same
def make_puzzles(
    side: int,
    givens: tuple[int, ...],
    rows: int,
    held_out: float,
    rounds: int = 0,
) -> Splits:
    """So many puzzles of different grids, split by the forms of the grids.

    Each takes `rounds` rounds of singles at least: that many times a person has to look again.
    """
    draw, order = random.Random(DRAW), np.random.default_rng(DRAW)
    seen: set[bytes] = set()
    kept: list[Puzzles] = []
    while sum(map(len, kept)) < rows:
        if len(kept) == DRAWS and not any(map(len, kept)):
            raise DataError(
                f"none of {DRAWS * rows} puzzles with {givens[0]} to {givens[-1]} digits took "
                f"{rounds} rounds: lower data.rounds or data.givens"
            )
        grids = [solved_grid(side, draw) for _ in range(rows)]
        new = [grid for grid in grids if grid.tobytes() not in seen]
        seen.update(grid.tobytes() for grid in new)
        made = np.stack(list({grid.tobytes(): grid for grid in new}.values()))
        dug = dig(made, givens, order)
        kept.append(Puzzles(dug, made).at(np.flatnonzero(rounds_of_singles(dug) >= rounds)))
    given, solved = (
        np.concatenate([getattr(part, name) for part in kept])[:rows]
        for name in ("given", "solved")
    )
    forms = [form(grid, side) for grid in solved]
    ranked = sorted(set(forms), key=lambda one: hashlib.sha256(f"{DRAW}/{one}".encode()).digest())
    members: dict[str, list[int]] = {one: [] for one in ranked}
    for row, one in enumerate(forms):
        members[one].append(row)
    parts: list[list[int]] = [[], [], []]  # test, validation, train
    wanted = (TEST_SHARE * rows, held_out * rows, np.inf)
    for one in ranked:
        place = next(i for i, most in enumerate(wanted) if len(parts[i]) < most)
        parts[place] += members[one]
    every = Puzzles(given, solved)
    if not (parts[1] and parts[2]):
        raise DataError(
            f"of {rows} puzzles none are left to {'train on' if parts[1] else 'hold out'}: give "
            "more of them (data.rows) or change data.held_out"
        )
    test, validation, train = (every.at(np.array(sorted(part), np.int64)) for part in parts)
    return Splits(train, validation, test)


def solved_grid(side: int, draw: random.Random) -> Cells:
    """A full grid that obeys the rules, at random."""
    high, wide = BOXES[side]
    rows, columns, boxes = ([0] * side for _ in range(3))  # digits used, as bits
    grid = [0] * side**2
    every = (1 << side) - 1

    def fill() -> bool:
        best, where, options = side + 1, -1, 0
        for cell in range(side**2):
            if grid[cell]:
                continue
            r, c = divmod(cell, side)
            free = every & ~(rows[r] | columns[c] | boxes[r // high * high + c // wide])
            if free.bit_count() < best:
                best, where, options = free.bit_count(), cell, free
                if best <= 1:
                    break
        if where < 0:
            return True
        r, c = divmod(where, side)
        b = r // high * high + c // wide
        digits = [digit for digit in range(side) if options >> digit & 1]
        draw.shuffle(digits)
        for digit in digits:
            bit = 1 << digit
            grid[where] = digit + 1
            rows[r], columns[c], boxes[b] = rows[r] | bit, columns[c] | bit, boxes[b] | bit
            if fill():
                return True
            rows[r], columns[c], boxes[b] = rows[r] ^ bit, columns[c] ^ bit, boxes[b] ^ bit
        grid[where] = 0
        return False

    found = fill()
    assert found, "an empty grid can be filled"
    return np.array(grid, np.int64)


def form(grid: Cells, side: int) -> str:
    """What is the same for all grids that renaming digits or moving rows and columns makes of one.

    Two rows of a band make a permutation of the digits, and the lengths of its cycles stay what
    they are. So do those of two columns of a stack. Grids of two forms are never turned into each
    other; grids of one form mostly are.
    """
    square = grid.reshape(side, side)
    high, wide = BOXES[side]
    views = [_cycles(square, high), _cycles(square.T, wide)]
    return repr(sorted(views) if high == wide else views)


def _cycles(square: Cells, together: int) -> list[list[list[int]]]:
    """Of each band, of each two of its lines: the lengths of cycles; in an order of their own."""
    bands = []
    for first in range(0, len(square), together):
        lines = square[first : first + together]
        bands.append(
            sorted(
                _cycle_lengths(lines[a], lines[b])
                for a in range(together)
                for b in range(a + 1, together)
            )
        )
    return sorted(bands)


def _cycle_lengths(one: Cells, other: Cells) -> list[int]:
    goes = dict(zip(one.tolist(), other.tolist(), strict=True))
    lengths = []
    while goes:
        at, length = next(iter(goes)), 0
        while at in goes:
            at, length = goes.pop(at), length + 1
        lengths.append(length)
    return sorted(lengths)


def dig(solved: Cells, givens: tuple[int, ...], draw: np.random.Generator) -> Cells:
    """Empty cells of solved grids one after another, each time only if singles fill it again."""
    rows, cells = solved.shape
    given = solved.copy()
    wanted = draw.integers(givens[0], givens[1] + 1, rows)
    order = draw.permuted(np.tile(np.arange(cells), (rows, 1)), axis=1)
    for cell in order.T:
        open_ = np.flatnonzero((given > 0).sum(1) > wanted)
        tried = given[open_]
        tried[np.arange(len(open_)), cell[open_]] = 0
        fine = rounds_of_singles(tried) > 0
        given[open_[fine]] = tried[fine]
    return given


def rounds_of_singles(given: Cells) -> npt.NDArray[np.int64]:
    """In how many rounds singles alone solve puzzles (rows, cells); 0 where they do not."""
    rows, cells = given.shape
    side = round(cells**0.5)
    units, peers = _units(side)
    digits = np.arange(1, side + 1)
    placed = given[..., None] == digits  # (rows, cells, digits)
    possible = placed | (given[..., None] == 0)
    answer = np.zeros(rows, np.int64)
    round_ = 0
    left = np.arange(rows)
    while len(left):
        round_ += 1
        known = placed.any(2, keepdims=True)
        taken = np.einsum("ij,rjd->rid", peers, placed.astype(np.float32), optimize=True) > 0
        possible &= ~taken | placed
        possible &= placed | ~known
        alone = possible & (possible.sum(2, keepdims=True) == 1)
        spots = np.einsum("uj,rjd->rud", units, possible.astype(np.float32), optimize=True) == 1
        only = np.einsum("uj,rud->rjd", units, spots.astype(np.float32), optimize=True) > 0
        more = placed | alone | (possible & only & ~known)
        # A digit forced into two cells of a unit, or two digits into a cell, cannot come about
        # here: the puzzles are dug out of solved grids.
        done = more.any(2).all(1)
        stuck = (more == placed).all((1, 2))
        answer[left[done]] = round_
        go = ~(done | stuck)
        placed, possible, left = more[go], possible[go], left[go]
    return answer


def _units(side: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Rows, columns and boxes (3 side, cells), and which cells share one (cells, cells)."""
    high, wide = BOXES[side]
    row, column = np.divmod(np.arange(side**2), side)
    box = row // high * high + column // wide
    numbers = np.arange(side)[:, None]
    units = np.concatenate([kind == numbers for kind in (row, column, box)])
    peers = (units.T.astype(int) @ units.astype(int)) > 0
    np.fill_diagonal(peers, False)
    return units.astype(np.float32), peers.astype(np.float32)


def turned(puzzles: Puzzles, draw: np.random.Generator) -> Puzzles:
    """Each with its digits renamed, and its bands, stacks, rows and columns moved, at random."""
    rows, cells = puzzles.given.shape
    side = round(cells**0.5)
    high, wide = BOXES[side]
    down = _lines(rows, side, high, draw)  # (rows, side)
    across = _lines(rows, side, wide, draw)
    where = (down[:, :, None] * side + across[:, None, :]).reshape(rows, cells)
    names = np.zeros((rows, side + 1), np.int64)  # an empty cell stays one
    names[:, 1:] = draw.permuted(np.tile(np.arange(1, side + 1), (rows, 1)), axis=1)
    return Puzzles(
        *(
            np.take_along_axis(names, np.take_along_axis(cells_, where, 1), 1)
            for cells_ in (puzzles.given, puzzles.solved)
        )
    )


def _lines(rows: int, side: int, together: int, draw: np.random.Generator) -> Cells:
    """A new order of the lines of a grid that keeps those of a band together."""
    bands = draw.permuted(np.tile(np.arange(side // together), (rows, 1)), axis=1)
    inside = draw.permuted(np.tile(np.arange(together), (rows, side // together, 1)), axis=2)
    lines: Cells = (bands[:, :, None] * together + inside).reshape(rows, side)
    return lines


class PuzzleDataset:
    """Puzzles as characters, with the digit of every cell as its label.

    Training learns all cells, so that an answer is a whole grid. Quality is that of the cells that
    were empty.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer | None) -> None:
        digits = "".join(map(str, range(1, config.side + 1)))
        self.labels: tuple[str, ...] = config.labels or tuple(digits)
        self.tokenizer = tokenizer or train_tokenizer(["." + digits], "chars")
        vocab = self.tokenizer.get_vocab()
        self._ids = np.array([vocab[character] for character in "." + digits], np.int64)
        self._splits = make_puzzles(
            config.side, config.givens, config.rows, config.held_out, config.rounds
        )
        train, held = self._splits.train, self._splits.validation
        self.digest = digest_of(train.given, train.solved, held.given, held.solved)
        self._shuffle = Shuffle(len(train))

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            vocabulary=self.tokenizer.get_vocab_size(),
            classes=len(self.labels),
            length=self._splits.train.given.shape[1],
        )

    def batch(self, iteration: int, size: int, seed: int) -> Batch:
        drawn = self._splits.train.at(self._shuffle.rows(iteration, size, seed))
        return self._batch(turned(drawn, np.random.default_rng((seed, iteration))), every=True)

    def held_out(self, size: int) -> Iterator[Batch]:
        return self._in_order(self._splits.test, size)

    def validation(self, size: int) -> Iterator[Batch]:
        return self._in_order(self._splits.validation, size)

    def _in_order(self, puzzles: Puzzles, size: int) -> Iterator[Batch]:
        for rows in np.split(np.arange(len(puzzles)), range(size, len(puzzles), size)):
            yield self._batch(puzzles.at(rows), every=False)

    def _batch(self, puzzles: Puzzles, every: bool) -> Batch:
        labels = puzzles.solved - 1
        targets = labels if every else np.where(puzzles.given > 0, IGNORED, labels)
        return Batch((as_tensor(self._ids[puzzles.given]),), as_tensor(targets))  # (B, cells) both
