"""A bundle opened with native TensorRT engines: a session a graph, made when first needed.

The classes that run onnxruntime's sessions run these too. Nothing is cached between tokens. Knows
which engines are open; not what is asked of them.
"""

from pathlib import Path
from typing import NoReturn, final

import numpy as np

from serve.bundle import Bundle, BundleError, Rung, Task
from serve.bundle.manifest import inside_file
from serve.runtime.ort_classifier import OrtClassifier
from serve.runtime.ort_prefix_decoder import OrtPrefixDecoder
from serve.runtime.ort_translator import OrtTranslator
from serve.runtime.trt_device import Cuda, load_tensorrt, open_cuda
from serve.runtime.trt_manifest import ENGINES_FILE, Host, Precision, read_engines
from serve.runtime.trt_session import TrtSession
from serve.runtime.warm_rows import largest_row, largest_tokens


def this_host(cuda: Cuda) -> Host:
    """The machine as engines are tied to it."""
    return Host(**cuda.facts(), tensorrt=load_tensorrt().__version__)


def engines_of(folder: Path, bundle: Bundle) -> Path:
    """The engines of a bundle: the folder itself, or the one in it that has the model's name."""
    named = folder / bundle.manifest.name
    return named if (named / ENGINES_FILE).is_file() else folder


@final
class TrtModel:
    """All rungs of a bundle as engines on one GPU."""

    def __init__(self, bundle: Bundle, folder: Path) -> None:
        self._library = load_tensorrt()
        self._cuda = open_cuda()
        self._bundle = bundle
        self._folder = folder
        self._engines = read_engines(folder, bundle, this_host(self._cuda))
        self._sessions: dict[str, TrtSession] = {}

    @property
    def bundle(self) -> Bundle:
        return self._bundle

    @property
    def precision(self) -> Precision:
        """What the engines compute in."""
        return self._engines.precision

    @property
    def most_parts(self) -> int:
        return 1  # a GPU shares the rows of a call among its own

    @property
    def single_steps(self) -> bool:
        return False

    def classifier(self, steps: int) -> OrtClassifier:
        rung = self._rung(steps, "classify", "tag")
        return OrtClassifier(self._session(rung.graph), self._bundle.manifest)

    def step_classifier(self, steps: int) -> NoReturn:
        raise BundleError(
            f"{self._bundle.manifest.name} runs as engines of whole rungs, which cannot stop early"
        )

    def decoder(self, steps: int) -> OrtPrefixDecoder:
        rung = self._rung(steps, "generate")
        return OrtPrefixDecoder(self._session(rung.graph), self._bundle.manifest)

    def unrolled(self, steps: int) -> OrtClassifier | OrtPrefixDecoder:
        """The rung as one graph, which is all there is here."""
        if self._bundle.manifest.labelled:
            return self.classifier(steps)
        return self.decoder(steps)

    def translator(self, steps: int) -> OrtTranslator:
        rung = self._rung(steps, "translate")
        assert rung.encoder is not None
        return OrtTranslator(
            self._session(rung.encoder), self._session(rung.graph), self._bundle.manifest
        )

    def mix(self) -> None:
        return None

    def warm_up(self) -> None:
        manifest = self._bundle.manifest
        for steps in manifest.steps:
            if manifest.labelled:
                self.classifier(steps).run(largest_row(manifest)[None])
            elif manifest.task == "generate":
                self.decoder(steps).open_batch().add(largest_tokens(manifest))
            else:
                answer = np.full((1, manifest.target_max_tokens or 1), largest_tokens(manifest)[0])
                self.translator(steps).read(largest_tokens(manifest)).follow(answer)

    def close(self) -> None:
        """Give the memory of the GPU back."""
        while self._sessions:
            self._sessions.popitem()[1].close()
        self._cuda.close()

    @property
    def opening(self) -> bool:
        return False  # all are open once the model is warm

    def interrupt(self) -> None:
        """An engine that was started cannot be stopped."""

    def resume(self) -> None:
        """Nothing was stopped."""

    def _session(self, graph: str) -> TrtSession:
        if graph not in self._sessions:
            engine = self._engines.engine(graph)
            path = self._folder / engine.file
            with inside_file(path):
                self._sessions[graph] = TrtSession(
                    self._library, self._cuda, path.read_bytes(), engine.profiles
                )
        return self._sessions[graph]

    def _rung(self, steps: int, *tasks: Task) -> Rung:
        manifest = self._bundle.manifest
        if manifest.task not in tasks:
            raise BundleError(
                f"{manifest.name} is a bundle of the task {manifest.task}, which cannot {tasks[0]}"
            )
        return manifest.rung(steps)
