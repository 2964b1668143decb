"""Translators: an encoder reads the source, a decoder that attends to it writes the target.

Both cross the same kind of depth, an ODE each unless depth is discrete, with the same number of
steps. How an answer is searched for is not known here.
"""

from torch import Tensor, nn

from train.model import Embedding, Output, Stepped
from train.ode import Observer
from train.travel import Depth, Embedded, Journey, travel


class Translator(Stepped):
    """embed -> encoder -> memory; embed -> decoder, which sees the memory -> head."""

    def __init__(
        self,
        source_embedding: Embedding,
        encoder_velocity: nn.Module,
        encoder_norm: nn.Module,
        target_embedding: Embedding,
        decoder_velocity: nn.Module,
        head: nn.Module,
        T: float = 1.0,
        depth: Depth = "ode",
    ) -> None:
        super().__init__(T, depth)
        if source_embedding.pad_id is None:
            raise ValueError("a translator's source needs a pad id: it tells where memory is")
        self.pad_id = source_embedding.pad_id
        self.embed_source, self.embed_target = source_embedding, target_embedding
        self.encoder, self.decoder = encoder_velocity, decoder_velocity
        self.norm, self.head = encoder_norm, head

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        steps: int = 1,
        method: str = "euler",
        observe: Observer | None = None,
    ) -> Output:
        """Logits (B, N, V) of the token after each of the target (B, N), given the source (B, S).

        An observer sees the steps of the encoder, then those of the decoder.
        """
        read = self._read(source, steps, method, observe)
        memory, mask = self.norm(read.state), self.mask_of(source)
        written = self._write(memory, mask, target, steps, method, observe)
        return Output(
            self.head(written.state),
            read.cost + written.cost,
            read.evaluations + written.evaluations,
            read.legs + written.legs,
        )

    def encode(self, source: Tensor, steps: int = 1, method: str = "euler") -> Tensor:
        """The memory (B, S, D) of a source (B, S)."""
        memory: Tensor = self.norm(self._read(source, steps, method).state)
        return memory

    def decode(
        self,
        memory: Tensor,
        source_mask: Tensor,
        target: Tensor,
        steps: int = 1,
        method: str = "euler",
        keep: Tensor | None = None,
    ) -> Tensor:
        """Logits after each token of the target (B, N), or after those at `keep` (K,) only."""
        x = self._write(memory, source_mask, target, steps, method).state
        if keep is not None:
            x = x[:, keep]  # (B, K, D)
        logits: Tensor = self.head(x)
        return logits

    def mask_of(self, source: Tensor) -> Tensor:
        """Where a source (B, S) has tokens."""
        return source.ne(self.pad_id)

    def _read(
        self, source: Tensor, steps: int, method: str, observe: Observer | None = None
    ) -> Journey:
        start = self.embed_source(source)
        return self._travel(self.encoder, start, steps, method, observe)

    def _write(
        self,
        memory: Tensor,
        source_mask: Tensor,
        target: Tensor,
        steps: int,
        method: str,
        observe: Observer | None = None,
    ) -> Journey:
        # Attention to the target is causal and padding is on the right, so it needs no mask there.
        state, _, present = self.embed_target(target)
        start = Embedded(state, (memory, source_mask), present)
        return self._travel(self.decoder, start, steps, method, observe)

    def _travel(
        self,
        velocity: nn.Module,
        start: Embedded,
        steps: int,
        method: str,
        observe: Observer | None,
    ) -> Journey:
        return travel(
            velocity,
            start,
            self.depth,
            steps,
            method,
            self.span(steps)[1],
            observe,
            self.saving,
            self.tolerance,
            backprop=self.backprop,
        )
