"""The work of one request for a translation by beam search.

It deliberately knows neither batches nor the runtime: prefixes go out, logits come in.
"""

import numpy as np
import numpy.typing as npt

from serve.engine.beams import Beams
from serve.engine.events import Deliver, FinishReason, GeneratedEvent, Span, TokenEvent
from serve.engine.generation import Wish
from serve.engine.stop import StopFilter
from serve.errors import ModelFailure
from serve.inputs.text import TextCodec
from serve.runtime.protocol import FloatArray


class Translation:
    """A translation in the making, for one caller; nothing of it is known before its end."""

    def __init__(self, wish: Wish, codec: TextCodec, deliver: Deliver) -> None:
        assert codec.bos_id is not None and codec.eos_id is not None
        self.wish = wish
        self.deliver = deliver
        self._codec = codec
        self._beams = Beams(
            wish.num_beams, wish.max_tokens, codec.bos_id, codec.eos_id, codec.banned_tokens
        )

    @property
    def prefixes(self) -> npt.NDArray[np.int64]:
        """What to run next (B, N)."""
        return self._beams.prefixes

    @property
    def over(self) -> bool:
        return self._beams.over

    def accept(self, logits: FloatArray) -> None:
        """Take the logits (B, V) after each prefix; ModelFailure if they are no numbers."""
        if not np.isfinite(logits).all():
            raise ModelFailure("the model's scores for the next token are not finite numbers")
        self._beams.grow(logits)

    def finished(self, span: Span) -> tuple[TokenEvent, GeneratedEvent]:
        """The whole answer, as the one piece of a stream and as its end."""
        best = self._beams.best
        ended = best.tokens[-1] == self._codec.eos_id
        filter_ = StopFilter(self.wish.stops)
        text, stopped = filter_.push(self._codec.decode(list(best.tokens)))
        text += filter_.flush()
        reason: FinishReason = "stop" if stopped or ended else "length"
        return TokenEvent(0, text), GeneratedEvent(reason, text, len(best.tokens), (), span)
