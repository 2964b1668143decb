"""The log of a run: JSON lines and TensorBoard, without the lines that a resumed run repeats.

Knows records; not how they came about.
"""

import json
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from train.checkpoint import METRICS, write_atomically


class MetricsLog:
    """Appends records from an iteration on; what an earlier attempt wrote beyond it is dropped."""

    def __init__(self, folder: Path, first: int) -> None:
        path = folder / METRICS
        kept = [record for record in read_metrics(path) if record["iteration"] <= first]
        lines = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(path, lines.encode())
        self.cpu_s = max((record.get("cpu_s", 0.0) for record in kept), default=0.0)
        self._file = path.open("a", encoding="utf-8")
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first)

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for key, value in {**record, **record.get("validation", {})}.items():
            if isinstance(value, int | float) and key != "iteration":
                self._writer.add_scalar(key, value, record["iteration"])

    def close(self) -> None:
        self._file.close()
        self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole records of a log; a line that a killed run left unfinished is none."""
    records: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "iteration" in record:
                records.append(record)
    return records
