"""The model behind MLServer: a runtime of its own, adaptive batches."""

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse

from benchmarks.peers.labeller import Labeller


class Topics(MLModel):  # type: ignore[misc]  # mlserver is in an environment of its own
    """Texts of one batch to labels."""

    async def load(self) -> bool:
        self._labeller = Labeller()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        found = self._labeller.label(StringCodec.decode_input(payload.inputs[0]))
        labels = [one["label"] for one in found]
        scores = np.array([[one["score"]] for one in found])
        return InferenceResponse(
            model_name=self.name,
            outputs=[
                StringCodec.encode_output("label", labels),
                NumpyCodec.encode_output("score", scores),
            ],
        )
