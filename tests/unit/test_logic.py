"""Puzzles: rules, one solution, and no grid of one split in another split in other clothes."""

import itertools

import numpy as np
import pytest
import torch

from train.data import generators, open_dataset
from train.data.batch import IGNORED
from train.data.logic import (
    BOXES,
    Puzzles,
    Splits,
    dig,
    form,
    make_puzzles,
    rounds_of_singles,
    turned,
)
from train.data.tables import DataError
from train.recipe import load_recipe

ROWS = 120


@pytest.fixture(scope="module")
def splits() -> Splits:
    return make_puzzles(6, (9, 13), ROWS, 0.1)


def all_of(splits: Splits) -> Puzzles:
    parts = (splits.train, splits.validation, splits.test)
    return Puzzles(*(np.concatenate([getattr(p, f) for p in parts]) for f in ("given", "solved")))


def _orders(lines: int, together: int) -> list[list[int]]:
    """Every order of lines that keeps bands together."""
    bands = [list(range(first, first + together)) for first in range(0, lines, together)]
    inside = list(itertools.product(*(itertools.permutations(band) for band in bands)))
    return [
        [line for band in order for line in choice[band]]
        for choice in inside
        for order in itertools.permutations(range(len(bands)))
    ]


def canonical(grid: np.ndarray) -> bytes:
    """The smallest of all grids that renaming digits and moving lines make of a 6 by 6 grid."""
    square = grid.reshape(6, 6)
    down, across = (np.array(_orders(6, size)) for size in BOXES[6])  # (48, 6), (72, 6)
    assert len(down) == 48 and len(across) == 72
    every = square[down][:, :, across].transpose(0, 2, 1, 3).reshape(-1, 36)  # (3456, 36)
    names = np.zeros((len(every), 7), np.int64)
    np.put_along_axis(names, every[:, :6], np.arange(1, 7)[None], 1)
    named = np.take_along_axis(names, every, 1).astype(np.uint8)
    smallest: bytes = min(row.tobytes() for row in named)
    return smallest


def leaks(splits: Splits) -> set[bytes]:
    parts = (splits.train, splits.validation, splits.test)
    forms = [set(map(canonical, part.solved)) for part in parts]
    return (forms[0] & forms[2]) | (forms[1] & forms[2]) | (forms[0] & forms[1])


def test_no_test_grid_is_a_training_grid_in_other_clothes(splits: Splits) -> None:
    """By a canonical form of its own, not by the one that split them."""
    assert min(map(len, (splits.train, splits.validation, splits.test))) >= 5
    assert not leaks(splits)


def test_the_check_finds_a_leak(splits: Splits) -> None:
    moved = turned(splits.train, np.random.default_rng(3)).at(np.arange(3))
    assert not {row.tobytes() for row in moved.solved} & {r.tobytes() for r in splits.train.solved}
    assert leaks(Splits(splits.train, splits.validation, moved))


def test_grids_and_puzzles_obey_the_rules(splits: Splits) -> None:
    puzzles = all_of(splits)
    assert len(puzzles) == ROWS
    for given, solved in zip(puzzles.given, puzzles.solved, strict=True):
        square = solved.reshape(6, 6)
        boxes = square.reshape(3, 2, 2, 3).transpose(0, 2, 1, 3).reshape(6, 6)
        for lines in (square, square.T, boxes):
            assert (np.sort(lines, 1) == np.arange(1, 7)).all()
        assert set(given[given > 0] == solved[given > 0]) == {True}
        assert (given > 0).sum() >= 9
        assert solutions(given) == 1


def solutions(given: np.ndarray) -> int:
    """How many there are, counted by trying everything."""
    empty = np.flatnonzero(given == 0)
    if not len(empty):
        return 1
    best: tuple[int, list[int]] | None = None
    for cell in empty.tolist():
        r, c = divmod(cell, 6)
        square = given.reshape(6, 6)
        box = square[r // 2 * 2 : r // 2 * 2 + 2, c // 3 * 3 : c // 3 * 3 + 3]
        seen = {*square[r].tolist(), *square[:, c].tolist(), *box.flatten().tolist()}
        free = [digit for digit in range(1, 7) if digit not in seen]
        if best is None or len(free) < len(best[1]):
            best = (cell, free)
    assert best is not None
    found = 0
    for digit in best[1]:
        tried = given.copy()
        tried[best[0]] = digit
        found += solutions(tried)
    return found


def test_singles_do_not_solve_what_has_two_solutions() -> None:
    empty = np.zeros((1, 36), np.int64)
    assert rounds_of_singles(empty)[0] == 0


def test_a_turned_puzzle_is_one_of_the_same_form(splits: Splits) -> None:
    before = splits.test
    after = turned(before, np.random.default_rng(0))
    assert (after.given != before.given).any(1).mean() > 0.9
    assert [form(grid, 6) for grid in after.solved] == [form(grid, 6) for grid in before.solved]
    assert ((after.given > 0).sum(1) == (before.given > 0).sum(1)).all()
    assert (rounds_of_singles(after.given) == rounds_of_singles(before.given)).all()


def test_puzzles_of_nine_by_nine() -> None:
    splits = make_puzzles(9, (32, 40), 24, 0.2)
    puzzles = all_of(splits)
    assert puzzles.given.shape == (24, 81) and rounds_of_singles(puzzles.given).all()
    parts = [{form(grid, 9) for grid in p.solved} for p in (splits.train, splits.test)]
    assert not parts[0] & parts[1]


def test_puzzles_of_many_rounds() -> None:
    hard = all_of(make_puzzles(6, (8, 8), 40, 0.2, rounds=5))
    assert len(hard) == 40 and rounds_of_singles(hard.given).min() == 5
    assert len({grid.tobytes() for grid in hard.solved}) == 40


def test_rounds_by_hand(splits: Splits) -> None:
    """One empty cell is one round; a solved grid needs one look to see it."""
    given = splits.test.solved[:2].copy()
    given[1, 17] = 0
    assert rounds_of_singles(given).tolist() == [1, 1]


def test_fewer_givens_where_more_may_be_taken_away(splits: Splits) -> None:
    solved = splits.train.solved
    hard, easy = (dig(solved, most, np.random.default_rng(0)) for most in ((8, 8), (20, 20)))
    assert (hard > 0).sum() < (easy > 0).sum() == 20 * len(solved)


def test_training_learns_every_cell_and_quality_is_of_the_empty_ones() -> None:
    recipe = load_recipe("logic", ["data.rows=60"])
    dataset = open_dataset(recipe)
    batch = dataset.batch(3, 8, 0)
    assert batch.targets.min() >= 0 and batch.targets.shape == (8, 36)
    again = dataset.batch(3, 8, 0)
    assert torch.equal(batch.inputs[0], again.inputs[0])
    assert not torch.equal(batch.inputs[0], dataset.batch(4, 8, 0).inputs[0])
    assert not torch.equal(batch.inputs[0], dataset.batch(3, 8, 1).inputs[0])
    tested = next(dataset.held_out(5))
    assert dataset.tokenizer is not None
    dot = dataset.tokenizer.token_to_id(".")
    assert ((tested.targets == IGNORED) == (tested.inputs[0] != dot)).all()
    assert dataset.labels == tuple("123456")


def test_every_seed_has_the_same_puzzles() -> None:
    found = []
    for seed in (0, 5):
        make_puzzles.cache_clear()
        found.append(
            open_dataset(load_recipe("logic", ["data.rows=40", f"run.seed={seed}"])).digest
        )
    assert found[0] == found[1]


def test_depths_of_nested_listops_are_even() -> None:
    train, test = generators.listops(48, 1200, 0, 0, nesting=6)
    depths = [depth(text.split()) for text, _ in train + test]
    assert set(depths) == {1, 2, 3, 4, 5, 6}
    assert min(map(depths.count, range(1, 7))) > 0.05 * len(depths)
    assert max(len(text.split()) for text, _ in train) <= 48


def depth(tokens: list[str]) -> int:
    level = most = 0
    for token in tokens:
        level += token.startswith("[")
        most = max(most, level)
        level -= token == "]"
    return most


def test_each_operator_has_the_value_of_what_it_begins() -> None:
    text = "[MAX 2 [MIN 8 5 ] [SM 9 [MED 1 3 5 ] ] ]"
    tokens = text.split()
    found = dict(zip(tokens, generators.listops_values(tokens), strict=True))
    assert found == {
        "[MAX": "5", "2": None, "[MIN": "5", "8": None, "5": None, "]": None, "[SM": "2",
        "9": None, "[MED": "3", "1": None, "3": None,
    }  # fmt: skip
    for text, value in generators.listops(48, 200, 0, 0, nesting=4)[0]:
        assert generators.listops_values(text.split())[0] == value


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["data.givens=[30,34]", "data.rounds=6"],
            "none of 1200 puzzles .* took 6 rounds",
        ),
        (["data.held_out=0.95"], "of 60 puzzles none are left to train on"),
    ],
)
def test_what_cannot_be_made_is_said(overrides: list[str], said: str) -> None:
    with pytest.raises(DataError, match=said):
        open_dataset(load_recipe("logic", ["data.rows=60", *overrides]))
