"""Stop strings: ends an answer before the first of them, and never lets a part of one out.

Knows pieces of text in their order; deliberately neither tokens nor streams.
"""

from collections.abc import Sequence


class StopFilter:
    """Text goes in by pieces; what can no longer belong to a stop string comes out."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to give out, and whether a stop string ended the answer."""
        if not self._stops:
            return text, False
        self._held += text
        # The match that is complete first, as it would be if the text came by characters.
        matches = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if matches:
            _, start = min(matches)
            before, self._held = self._held[:start], ""
            return before, True
        keep = self._partial_match()
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(out) :]
        return out, False

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        out, self._held = self._held, ""
        return out

    def _partial_match(self) -> int:
        """The length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        return next(
            (
                length
                for length in range(longest, 0, -1)
                if any(stop.startswith(self._held[-length:]) for stop in self._stops)
            ),
            0,
        )
