"""The model behind LitServe: one worker process, dynamic batches, its faster queue."""

from typing import Any

import litserve

from benchmarks.peers.labeller import MAX_BATCH, Labeller, port

_WAIT_S = 0.01


class Topics(litserve.LitAPI):  # type: ignore[misc]  # litserve is in an environment of its own
    """Texts of one batch to labels."""

    def setup(self, device: str) -> None:
        self._labeller = Labeller()

    def decode_request(self, request: dict[str, Any]) -> str:
        text: str = request["text"]
        return text

    def batch(self, inputs: list[str]) -> list[str]:
        return inputs

    def predict(self, x: list[str]) -> list[dict[str, Any]]:
        return self._labeller.label(x)

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return output

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


if __name__ == "__main__":
    api = Topics(max_batch_size=MAX_BATCH, batch_timeout=_WAIT_S)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(host="127.0.0.1", port=port(), generate_client_file=False, log_level="warning")
