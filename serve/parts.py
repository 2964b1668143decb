"""In how many parts the rows of one call run, side by side. Knows numbers only."""

_LEAST = 2  # rows of a part: one row alone is multiplied otherwise, and its last bits differ


def count_parts(rows: int, most: int) -> int:
    """The parts of a call, as equal as they can be; the largest decides how long it takes."""
    return max(1, min(most, rows // _LEAST))


def rows_for(parts: int) -> int:
    """The fewest rows that run in so many parts."""
    return parts * _LEAST if parts > 1 else 1
