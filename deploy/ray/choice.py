"""Which model a request is for, so that it goes to a replica that holds it, and whether it asks for
a stream.

Chooses as the routes do, with their own catalog. What it cannot tell, a replica will: any of them
refuses a request that is wrong. Knows paths and bodies; deliberately nothing of replicas.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from serve.bundle import Task
from serve.catalog import WRITING, Catalog, InputKind, Served
from serve.errors import ServeError

_TASKS: dict[str, tuple[Task, ...]] = {
    "/v1/classify": ("classify",),
    "/v1/generate": WRITING,
    "/v1/completions": WRITING,
    "/v1/chat/completions": WRITING,
}


@dataclass(frozen=True, slots=True)
class Choice:
    """What a front must know of a request."""

    model: str | None  # that must be loaded to answer; None if any replica can
    streams: bool = False


def choice_of(catalog: Catalog, method: str, path: str, body: bytes) -> Choice:
    """As far as it can be told; a request that is wrong is for any replica."""
    if method == "POST" and path in _TASKS:
        return _of_body(catalog, _TASKS[path], body)
    named = _named(method, path)
    return Choice(None if named is None else _name(lambda: catalog.find(named)))


def _of_body(catalog: Catalog, tasks: tuple[Task, ...], body: bytes) -> Choice:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return Choice(None)
    if not isinstance(asked, dict) or not isinstance(asked.get("model"), str | None):
        return Choice(None)
    if asked.get("num_beams") is not None:
        tasks = tasks[::-1]
    kind = _kind(asked.get("input"))
    model = _name(lambda: catalog.pick(asked.get("model"), tasks, kind))
    return Choice(model, streams=bool(asked.get("stream")))


def _name(find: Callable[[], Served]) -> str | None:
    try:
        return find().name
    except ServeError:
        return None


def _kind(value: Any) -> InputKind | None:
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, dict):
        return "image" if "image" in first else "points"
    return "text" if isinstance(first, str) else None


def _named(method: str, path: str) -> str | None:
    """The model in a path, if its route needs the model itself."""
    parts = path.split("/")
    match parts:
        case ["", "v1", "models", name, "ladder"]:
            return unquote(name)
        case ["", "v2", "models", name, *_] if method == "POST":
            return unquote(name)
    return None
