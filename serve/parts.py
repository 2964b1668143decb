"""How the rows of one call are cut into parts, which run side by side. Knows numbers only."""

_LEAST = 2  # rows of a part: one row alone is multiplied otherwise, and its last bits differ
# A thread that has as many rows leaves some to whoever is done first, of four one.
_SHARED_FROM, _SHARED = 8, 4


def count_parts(rows: int, most: int) -> int:
    """The threads that share a call, as equally as they can; the largest share tells its time."""
    return max(1, min(most, rows // _LEAST))


def rows_for(threads: int) -> int:
    """The fewest rows that so many threads share."""
    return threads * _LEAST if threads > 1 else 1


def cut_rows(rows: int, most: int) -> list[int]:
    """The rows of each part, in the order in which threads take them, the next that is free."""
    count = count_parts(rows, most)
    if count == 1:
        return [rows]
    shares = [rows * (place + 1) // count - rows * place // count for place in range(count)]
    spare = [max(_LEAST, one // _SHARED) if one >= _SHARED_FROM else 0 for one in shares]
    return [one - left for one, left in zip(shares, spare, strict=True)] + list(filter(None, spare))
