"""A bundle opened with onnxruntime on the CPU: the sessions of a rung, made when first needed.

Knows which rungs are open; not what is asked of them.
"""

from typing import TYPE_CHECKING, final

import numpy as np
import onnxruntime as ort

from serve.bundle import Bundle, BundleError, Rung
from serve.runtime.interface import Interface, encoder_interface, graph_interface
from serve.runtime.ort_classifier import OrtClassifier
from serve.runtime.ort_decoder import OrtDecoder
from serve.runtime.ort_prefix_decoder import OrtPrefixDecoder
from serve.runtime.ort_session import first_line, open_session, usable_cores
from serve.runtime.ort_translator import OrtTranslator
from serve.runtime.warm_rows import largest_in_words, largest_row, largest_tokens

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
        self._decoders: dict[int, OrtDecoder | OrtPrefixDecoder] = {}
        self._translators: dict[int, OrtTranslator] = {}

    @property
    def bundle(self) -> Bundle:
        return self._bundle

    @property
    def open_steps(self) -> tuple[int, ...]:
        """The rungs whose sessions exist."""
        return tuple(sorted({*self._classifiers, *self._decoders, *self._translators}))

    def classifier(self, steps: int) -> OrtClassifier:
        rung = self._rung(steps, "classify")
        if steps not in self._classifiers:
            session = self._open_graph(rung)
            self._classifiers[steps] = OrtClassifier(session, self._bundle.manifest)
        return self._classifiers[steps]

    def decoder(self, steps: int) -> OrtDecoder | OrtPrefixDecoder:
        rung = self._rung(steps, "generate")
        if steps not in self._decoders:
            manifest, session = self._bundle.manifest, self._open_graph(rung)
            self._decoders[steps] = (
                OrtDecoder(session, manifest, rung)
                if manifest.cache == "kv"
                else OrtPrefixDecoder(session, manifest)
            )
        return self._decoders[steps]

    def translator(self, steps: int) -> OrtTranslator:
        rung = self._rung(steps, "translate")
        if steps not in self._translators:
            assert rung.encoder is not None
            manifest = self._bundle.manifest
            encoder = self._open(rung.encoder, encoder_interface(manifest))
            self._translators[steps] = OrtTranslator(encoder, self._open_graph(rung), manifest)
        return self._translators[steps]

    def warm_up(self) -> None:
        manifest = self._bundle.manifest
        run = {
            "classify": self._warm_classifier,
            "generate": self._warm_decoder,
            "translate": self._warm_translator,
        }[manifest.task]
        for rung in manifest.rungs:
            try:
                run(rung.steps)
            except BundleError:
                raise
            except Exception as error:  # onnxruntime has no base class of its own
                raise BundleError(
                    f"fails on {largest_in_words(manifest)}, which the manifest promises "
                    f"({first_line(error)}); export the bundle again",
                    file=str(self._bundle.folder / rung.graph),
                ) from error

    def _warm_classifier(self, steps: int) -> None:
        self.classifier(steps).run(largest_row(self._bundle.manifest)[None])

    def _warm_decoder(self, steps: int) -> None:
        tokens = largest_tokens(self._bundle.manifest)
        batch = self.decoder(steps).open_batch()
        batch.add(tokens[: max(1, len(tokens) - 1)])
        if len(tokens) > 1:
            batch.step(tokens[-1:])

    def _warm_translator(self, steps: int) -> None:
        tokens = largest_tokens(self._bundle.manifest)
        answer = np.full((1, self._bundle.manifest.target_max_tokens or 1), tokens[0])  # (1, N)
        self.translator(steps).read(tokens).follow(answer)

    def _open_graph(self, rung: Rung) -> ort.InferenceSession:
        return self._open(rung.graph, graph_interface(self._bundle.manifest, rung))

    def _open(self, file: str, interface: Interface) -> ort.InferenceSession:
        return open_session(self._bundle, file, interface, self.threads)

    def _rung(self, steps: int, task: "Task") -> Rung:
        manifest = self._bundle.manifest
        if manifest.task != task:
            raise BundleError(
                f"{manifest.name} is a bundle of the task {manifest.task}, which cannot {task}"
            )
        return manifest.rung(steps)
