"""The log of a run: a file of JSON lines. To read it takes no torch."""

import json
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


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
