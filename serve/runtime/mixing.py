"""What the engine asks of a decoder's rungs that run at the same time.

Knows neither graphs nor who is served.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from serve.runtime.protocol import DecodeBatch, FloatArray, IntArray

MOST_AHEAD = 8  # positions of one row under way at once


class Crossed(NamedTuple):
    """What a step of a wave brought to light."""

    drafts: FloatArray | None  # (P, V): of the token behind each position that is under way still
    last: FloatArray | None  # (V,): of the token behind the first position, which is done


class Wave(Protocol):
    """The only row of a batch, running ahead of itself.

    Positions that follow each other stand at different steps. Each was begun with a token that the
    one before it drafted by a jump; later jumps draft better. It is lost when the batch is used
    otherwise.
    """

    @property
    def lead(self) -> int:
        """After every so many steps the positions draft what follows them."""
        ...

    @property
    def tokens(self) -> list[int]:
        """Those that the positions under way were begun with, first position first."""
        ...

    @property
    def room(self) -> int:
        """Positions that may still be begun."""
        ...

    def begin(self, token: int) -> None:
        """One position more, behind those that are under way; only where these draft."""
        ...

    def cross(self) -> Crossed:
        """One step of every position; a first position that is done is under way no more."""
        ...

    def keep(self, count: int) -> None:
        """Give up all positions but so many first ones."""
        ...


class Leg(NamedTuple):
    """How far a batch goes."""

    batch: DecodeBatch
    steps: int
    tokens: IntArray | None  # (B,): what its rows begin with; None: they are under way


# Logits (B, V) of a leg that ends a token; what it threw, after which its batch is lost.
Outcome = FloatArray | Exception | None


class Mix(Protocol):
    """Takes batches of several rungs of one model further, in one call or at the same time."""

    @property
    def most_batches(self) -> int:
        """How many may share a call."""
        ...

    @property
    def sides(self) -> int:
        """How many may go abreast, each on a thread of its own."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """Whether there are waves."""
        ...

    def begin(self, batches: Sequence[DecodeBatch], tokens: Sequence[IntArray]) -> None:
        """Give each row of these batches its token (B,): now they stand before the first step."""
        ...

    def end(self, batches: Sequence[DecodeBatch]) -> list[FloatArray]:
        """Logits (B, V) of each of these batches, which are behind their last step."""
        ...

    def advance(self, batches: Sequence[DecodeBatch]) -> None:
        """One step of each, which have all begun and not come to their last step."""
        ...

    def abreast(self, sides: Sequence[Sequence[Leg]]) -> list[list[Outcome]]:
        """Each side leg after leg, all sides at once."""
        ...

    def wave(self, batch: DecodeBatch, lead: int) -> Wave:
        """Let the only row of a batch run ahead; MOST_AHEAD positions at most are under way."""
        ...
