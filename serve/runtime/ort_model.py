"""A bundle opened with onnxruntime on the CPU: one session a rung, made when first needed.

Knows which rungs are open; not what is asked of them.
"""

from typing import TYPE_CHECKING, final

import numpy as np

from serve.bundle import Bundle, BundleError, Rung
from serve.runtime.ort_classifier import OrtClassifier
from serve.runtime.ort_decoder import OrtDecoder
from serve.runtime.ort_session import first_line, open_session, usable_cores
from serve.runtime.protocol import IntArray

if TYPE_CHECKING:
    from serve.bundle import Task


@final
class OrtModel:
    """All rungs of a bundle in one process."""

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self.threads = usable_cores() if threads is None else threads
        self._bundle = bundle
        self._classifiers: dict[int, OrtClassifier] = {}
        self._decoders: dict[int, OrtDecoder] = {}

    @property
    def bundle(self) -> Bundle:
        return self._bundle

    @property
    def open_steps(self) -> tuple[int, ...]:
        """The rungs whose sessions exist."""
        return tuple(sorted({*self._classifiers, *self._decoders}))

    def classifier(self, steps: int) -> OrtClassifier:
        rung = self._rung(steps, "classify")
        if steps not in self._classifiers:
            session = open_session(self._bundle, rung, self.threads)
            self._classifiers[steps] = OrtClassifier(session, self._bundle.manifest)
        return self._classifiers[steps]

    def decoder(self, steps: int) -> OrtDecoder:
        rung = self._rung(steps, "generate")
        if steps not in self._decoders:
            session = open_session(self._bundle, rung, self.threads)
            self._decoders[steps] = OrtDecoder(session, self._bundle.manifest, rung)
        return self._decoders[steps]

    def warm_up(self) -> None:
        manifest = self._bundle.manifest
        for rung in manifest.rungs:
            run = self._warm_classifier if manifest.task == "classify" else self._warm_decoder
            try:
                run(rung.steps)
            except BundleError:
                raise
            except Exception as error:  # onnxruntime has no base class of its own
                raise BundleError(
                    f"fails on {manifest.input.max_tokens} tokens of a vocabulary of "
                    f"{manifest.tokenizer.vocab_size}, which the manifest promises "
                    f"({first_line(error)}); export the bundle again",
                    file=str(self._bundle.folder / rung.graph),
                ) from error

    def _warm_classifier(self, steps: int) -> None:
        self.classifier(steps).run(self._largest()[None])

    def _warm_decoder(self, steps: int) -> None:
        tokens = self._largest()
        batch = self.decoder(steps).open_batch()
        batch.add(tokens[: max(1, len(tokens) - 1)])
        if len(tokens) > 1:
            batch.step(tokens[-1:])

    def _largest(self) -> IntArray:
        """The longest row of the greatest token: a graph that takes it takes any."""
        spec = self._bundle.manifest.tokenizer
        token = spec.vocab_size - 1
        if token == spec.pad_id:
            token = max(0, token - 1)
        return np.full(self._bundle.manifest.input.max_tokens, token, dtype=np.int64)

    def _rung(self, steps: int, task: "Task") -> Rung:
        manifest = self._bundle.manifest
        if manifest.task != task:
            raise BundleError(
                f"{manifest.name} is a bundle of the task {manifest.task}, which cannot {task}"
            )
        return manifest.rung(steps)
