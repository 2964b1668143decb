"""The model behind mosec: its Rust front, one worker, dynamic batches."""

from typing import Any

from mosec import Server, ValidationError, Worker

from benchmarks.peers.labeller import MAX_BATCH, Labeller

_WAIT_MS = 10


class Topics(Worker):  # type: ignore[misc]  # mosec is in an environment of its own
    """Texts of one batch to labels."""

    def __init__(self) -> None:
        super().__init__()
        self._labeller = Labeller()

    def deserialize(self, data: bytes) -> str:
        asked = super().deserialize(data)
        try:
            text: str = asked["text"]
        except (KeyError, TypeError):
            raise ValidationError("send an object with text") from None
        return text

    def forward(self, data: list[str]) -> list[dict[str, Any]]:
        return self._labeller.label(data)


if __name__ == "__main__":
    server = Server()
    server.append_worker(Topics, max_batch_size=MAX_BATCH, max_wait_time=_WAIT_MS)
    server.run()
