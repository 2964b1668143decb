"""One rung of a classifier as one graph on onnxruntime.

Knows padded tokens, pixels, points and logits; not texts, pictures, labels or who asked.
"""

from typing import final

import onnxruntime as ort

from serve.bundle import Manifest
from serve.runtime.classifier_rows import check_rows
from serve.runtime.protocol import FloatArray, RowArray


@final
class OrtClassifier:
    """A stateless graph: rows in, a row of logits each out."""

    def __init__(self, session: ort.InferenceSession, manifest: Manifest) -> None:
        self._session = session
        self._manifest = manifest
        self._name = session.get_inputs()[0].name

    def run(self, rows: RowArray) -> FloatArray:
        rows = check_rows(rows, self._manifest)
        logits: FloatArray = self._session.run(["logits"], {self._name: rows})[0]
        return logits  # (B, C)

    def forward(self, rows: RowArray) -> FloatArray:
        """The same, by the name that whole graphs of every task have."""
        return self.run(rows)
