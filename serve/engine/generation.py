"""The work of one generate request: its tokens, its text, and when it is finished.

It deliberately knows neither caches nor batches: logits come in, a token comes out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serve.engine.events import (
    Deliver,
    FinishReason,
    GeneratedEvent,
    Span,
    TokenEvent,
    TokenLogprob,
)
from serve.engine.sampling import Sampler, Sampling, likelihood
from serve.engine.stop import StopFilter
from serve.inputs.text import TextCodec, TextStream
from serve.runtime.protocol import FloatArray


@dataclass(frozen=True, slots=True)
class Wish:
    """What a caller wants written."""

    prompt: list[int]  # or the source of a translation
    max_tokens: int
    window: int  # positions that the model sees; of a translation, those of the answer
    sampling: Sampling
    stops: Sequence[str] = ()
    logprobs: int | None = None  # how many alternatives to report with each token
    stream: bool = False
    num_beams: int = 1


class Generation:
    """An answer in the making, for one caller."""

    def __init__(self, wish: Wish, codec: TextCodec, deliver: Deliver) -> None:
        self.wish = wish
        self.deliver = deliver
        self.last_token_s: float | None = None  # for the metrics of the engine
        self.finish_reason: FinishReason | None = None
        self._codec = codec
        self._tokens = list(wish.prompt)
        self._prompt_tokens = len(wish.prompt)
        self.sampler = Sampler(wish.sampling, codec.banned_tokens)
        # Where nobody reads before the end, the text is made there, at once.
        self._by_pieces = wish.stream or bool(wish.stops) or wish.logprobs is not None
        self._written = TextStream(codec)
        self._filter = StopFilter(wish.stops)
        self._pieces: list[str] = []
        self._characters = 0  # that are complete, those that the filter holds back included
        self._logprobs: list[TokenLogprob] = []

    @property
    def completion_tokens(self) -> int:
        return len(self._tokens) - self._prompt_tokens

    @property
    def text(self) -> str:
        """What has been written so far."""
        if self._by_pieces:
            return "".join(self._pieces)
        return self._codec.decode(self._tokens[len(self.wish.prompt) :])

    @property
    def last_token(self) -> int:
        """The token to decode next."""
        return self._tokens[-1]

    @property
    def prompt(self) -> list[int]:
        """The tokens to read when this enters a batch.

        At first the prompt itself; after the window has filled, its last half, so that there is
        room to go on writing.
        """
        if self.completion_tokens == 0:
            return self.wish.prompt
        return self._tokens[-max(1, self.wish.window // 2) :]

    def drafts(self, logits: FloatArray, ahead: int) -> list[int]:
        """The tokens that logits (P, V) choose, the first of them so many behind the next one.

        Up to the first that choose none, or behind whose token none would be wanted.
        """
        first = self.completion_tokens + ahead
        count = min(len(logits), max(0, self.wish.max_tokens - 1 - first))
        finite = np.isfinite(logits[:count])
        if not finite.all():
            count = int(finite.all(axis=1).argmin())
        return self.sampler.choose_following(logits[:count], first)

    def accept(self, token: int, logits: FloatArray) -> TokenEvent:
        """Take the next token, chosen from logits (V,); sets `finish_reason` if it is the last."""
        index = len(self._tokens) - self._prompt_tokens
        self._tokens.append(token)
        if token == self._codec.eos_id:
            self.finish_reason = "stop"
        elif index + 1 == self.wish.max_tokens:
            self.finish_reason = "length"
        if not self._by_pieces:
            return TokenEvent(index, "")
        logprob = self._logprob(logits, token)
        text = self._push(token)
        self._pieces.append(text)
        return TokenEvent(index, text, logprob)

    def _push(self, token: int) -> str:
        """The text that may be given out by now."""
        completed = self._written.push(token)
        self._characters += len(completed)
        text, stopped = self._filter.push(completed)
        if not stopped and self.finish_reason is not None:
            rest, stopped = self._filter.push(self._written.flush())
            text += rest + self._filter.flush()
        if stopped:
            self.finish_reason = "stop"
        return text

    def finished(self, span: Span) -> GeneratedEvent:
        """The whole answer."""
        assert self.finish_reason is not None
        return GeneratedEvent(
            finish_reason=self.finish_reason,
            text=self.text,
            completion_tokens=self.completion_tokens,
            logprobs=tuple(self._logprobs),
            span=span,
        )

    def _logprob(self, logits: FloatArray, token: int) -> TokenLogprob | None:
        if self.wish.logprobs is None:
            return None
        found = likelihood(logits, token, self.wish.logprobs)
        logprob = TokenLogprob(
            token=self._codec.decode([token]),
            logprob=found.chosen,
            top=tuple((self._codec.decode([other]), value) for other, value in found.top),
            offset=self._characters,
        )
        self._logprobs.append(logprob)
        return logprob
