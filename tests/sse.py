"""Server-sent events as a client reads them: names and parsed data."""

import json
from collections.abc import Iterable
from typing import Any


def parse_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """All events of a whole stream, each as (name, data); a name that is missing is `message`."""
    assert text.endswith("\n\n"), "the last event is not complete"
    return [_event(block.split("\n")) for block in text.split("\n\n")[:-1]]


def _event(lines: Iterable[str]) -> tuple[str, dict[str, Any]]:
    name, data = "message", None
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        else:
            assert field == "data", line
            data = json.loads(value)
    assert isinstance(data, dict)
    return name, data
