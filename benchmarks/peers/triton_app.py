"""The model behind NVIDIA Triton, by nvidia-pytriton: a Python model, dynamic batches."""

from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.peers.labeller import MAX_BATCH, Labeller, port

_WAIT_US = 0


def main() -> None:
    """Serve until told to end."""
    labeller = Labeller()

    def classify(text: Any) -> dict[str, Any]:
        found = labeller.label([one.decode() for one in text[:, 0]])  # text: (B, 1)
        return {
            "label": np.array([[one["label"].encode()] for one in found]),
            "score": np.array([[one["score"]] for one in found], dtype=np.float32),
        }

    config = TritonConfig(
        http_address="127.0.0.1", http_port=port(), allow_grpc=False, allow_metrics=False
    )
    with Triton(config=config) as triton:
        triton.bind(
            "topics",
            infer_func=batch(classify),
            inputs=[Tensor(name="text", dtype=bytes, shape=(1,))],
            outputs=[
                Tensor(name="label", dtype=bytes, shape=(1,)),
                Tensor(name="score", dtype=np.float32, shape=(1,)),
            ],
            config=ModelConfig(
                max_batch_size=MAX_BATCH,
                batcher=DynamicBatcher(max_queue_delay_microseconds=_WAIT_US),
            ),
        )
        triton.serve()


if __name__ == "__main__":
    main()
