"""How the rows of one model call are split into parts that run in parallel."""

_LEAST = 2  # rows in a part: one row alone is multiplied differently, which changes its last bits
# A thread with this many rows leaves a quarter to whichever thread is done first.
_SHARED_FROM, _SHARED = 8, 4


def count_parts(rows: int, most: int) -> int:
    """The number of threads that share a call; the largest share determines its time."""
    return max(1, min(most, rows // _LEAST))


def rows_for(threads: int) -> int:
    """The fewest rows that this many threads share."""
    return threads * _LEAST if threads > 1 else 1


def cut_rows(rows: int, most: int) -> list[int]:
    """The rows of each part, in the order in which free threads take them."""
    count = count_parts(rows, most)
    if count == 1:
        return [rows]
    shares = [rows * (place + 1) // count - rows * place // count for place in range(count)]
    spare = [max(_LEAST, one // _SHARED) if one >= _SHARED_FROM else 0 for one in shares]
    return [one - left for one, left in zip(shares, spare, strict=True)] + list(filter(None, spare))
