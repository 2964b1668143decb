"""The model behind BentoML: one worker, adaptive batches."""

from typing import Any

import bentoml

from benchmarks.peers.labeller import MAX_BATCH, Labeller


@bentoml.service(workers=1)
class Topics:
    """Texts of one batch to labels."""

    def __init__(self) -> None:
        self._labeller = Labeller()

    # BentoML gives its decorators no types.
    @bentoml.api(batchable=True, max_batch_size=MAX_BATCH)  # type: ignore[untyped-decorator]
    def classify(self, texts: list[str]) -> list[dict[str, Any]]:
        return self._labeller.label(texts)
