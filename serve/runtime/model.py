"""What the engine asks of an opened bundle.

Knows which rungs there may be; how they are asked is theirs.
"""

from typing import Protocol

from serve.bundle import Bundle
from serve.runtime.interruption import Interruptible
from serve.runtime.mixing import Mix
from serve.runtime.protocol import Classifier, Decoder, StepClassifier, Translator, Unrolled


class Model(Interruptible, Protocol):
    """A bundle opened for running. One thread at a time may use it."""

    @property
    def bundle(self) -> Bundle:
        """What was opened."""
        ...

    @property
    def most_parts(self) -> int:
        """How many parts the rows of a classification may run in, side by side."""
        ...

    @property
    def single_steps(self) -> bool:
        """Whether a classification can be run step by step here."""
        ...

    def classifier(self, steps: int) -> Classifier:
        """The rung of that many steps; BundleError if the ladder or the task has none."""
        ...

    def step_classifier(self, steps: int) -> StepClassifier:
        """The rung, run step by step; BundleError if the bundle has no graphs of one step."""
        ...

    def decoder(self, steps: int) -> Decoder:
        """The rung of that many steps; BundleError if the ladder or the task has none."""
        ...

    def translator(self, steps: int) -> Translator:
        """The rung of that many steps; BundleError if the ladder or the task has none."""
        ...

    def mix(self) -> Mix | None:
        """What mixes the batches of this model, which are SteppedBatch then; None: nothing does."""
        ...

    def warm_up(self) -> None:
        """Open every rung and run it once, so that no request pays for that."""
        ...

    def close(self) -> None:
        """Give the memory back at once. No call may follow."""
        ...


class OpenedModel(Model, Protocol):
    """All graphs of an opened bundle, each to be run on its own."""

    def unrolled(self, steps: int) -> Unrolled:
        """The one graph of the rung that other runtimes run; not of a translator."""
        ...
