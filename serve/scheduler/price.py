"""What the rows of one classification lane cost at each number of steps.

A lane's view of the latency model: careful, since prices decide whether a deadline can be kept,
and nothing where nothing was ever measured. Knows neither the rows that wait nor time.
"""

from serve.scheduler.job import LaneKey
from serve.scheduler.latency_model import LatencyModel, Series

_NEWEST = 0.05  # weight of the newest row in the usual length
_NEARLY = 1.03  # as cheap a row as in a full call
_NEWEST_CALL = 0.2  # and of the newest call in the usual batch and padding


class Prices:
    """Seconds of calls and of rows."""

    def __init__(self, latency: LatencyModel, key: LaneKey, max_rows: int) -> None:
        self._latency = latency
        self._key = key
        self._max_rows = max_rows
        self._series: dict[int, Series] = {}
        self._usual_tokens = 0.0
        self._usual_rows = 1.0
        self._usual_padding = 1.0  # tokens of a call for each real one

    @property
    def answer_s(self) -> float:
        """From the end of a call until the answer has left."""
        return self._latency.answer_s

    @property
    def caution(self) -> float:
        """What all prices here are multiplied with."""
        return self._latency.caution(self._key.model)

    def note_call(self, rows: int, padding: float) -> None:
        """So many rows run together, with so many tokens for each real one."""
        self._usual_rows += _NEWEST_CALL * (rows - self._usual_rows)
        self._usual_padding += _NEWEST_CALL * (padding - self._usual_padding)

    def note(self, tokens: int) -> None:
        """A row of this length has come."""
        usual = self._usual_tokens or tokens
        self._usual_tokens = usual + _NEWEST * (tokens - usual)

    def call_s(self, steps: int, rows: int, length: int) -> float:
        """A call takes about this long, and seldom longer."""
        seconds = self._latency.call_s(self._series_of(steps), rows, length)
        if seconds is None and self._key.threshold is not None:  # at worst all steps are taken
            full = Series(self._key.model, "classify", steps)
            seconds = self._latency.call_s(full, rows, length)
        return 0.0 if seconds is None else seconds * self.caution

    def row_s(self, steps: int, length: int) -> float:
        """The share of a row in a call as they usually are."""
        rows = round(self._usual_rows)
        return self.call_s(steps, rows, round(length * self._usual_padding)) / rows

    def usual_s(self, steps: int) -> float:
        """A usual call: a row is done when all that share its call are."""
        return self.call_s(steps, round(self._usual_rows), round(self._usual_tokens))

    def enough_rows(self, steps: int, length: int) -> int:
        """The fewest rows of a call that does nearly as many in a second as a full one.

        More would only wait for each other.
        """
        if not self._latency.knows_well(self._series_of(steps)):
            return self._max_rows
        each_s = self.call_s(steps, self._max_rows, length) / self._max_rows
        rows = 1
        while rows < self._max_rows and self.call_s(steps, rows, length) / rows > _NEARLY * each_s:
            rows *= 2
        return min(rows, self._max_rows)

    def share(self, steps: int, full: int) -> float:
        """What a usual row costs at these steps, in parts of what it costs at full ones."""
        length = round(self._usual_tokens)
        whole = self.row_s(full, length)
        return self.row_s(steps, length) / whole if whole > 0 else steps / full

    def alone_s(self, steps: int, lengths: tuple[int, ...]) -> float:
        """The time of all these rows on an idle server."""
        rows = len(lengths)
        longest = max(lengths)
        if rows <= self._max_rows:
            return self.call_s(steps, rows, longest)
        return -(-rows // self._max_rows) * self.call_s(steps, self._max_rows, longest)

    def _series_of(self, steps: int) -> Series:
        series = self._series.get(steps)
        if series is None:
            series = Series(self._key.model, "classify", steps, self._key.threshold)
            self._series[steps] = series
        return series
