"""Which model a request is for, so that it goes to a replica that holds it.

Chooses as the routes do, with their own catalog. What it cannot tell, a replica will: any of them
refuses a request that is wrong. Knows paths and bodies; deliberately nothing of replicas.
"""

import json
from typing import Any
from urllib.parse import unquote

from serve.bundle import Task
from serve.catalog import WRITING, Catalog, InputKind
from serve.errors import ServeError

_TASKS: dict[str, tuple[Task, ...]] = {
    "/v1/classify": ("classify",),
    "/v1/generate": WRITING,
    "/v1/completions": WRITING,
    "/v1/chat/completions": WRITING,
}


def model_of(catalog: Catalog, method: str, path: str, body: bytes) -> str | None:
    """The name of the model that must be loaded to answer; None if any replica can."""
    try:
        if method == "POST" and path in _TASKS:
            return _of_body(catalog, _TASKS[path], body)
        named = _named(method, path)
        return None if named is None else catalog.find(named).name
    except ServeError:
        return None


def _of_body(catalog: Catalog, tasks: tuple[Task, ...], body: bytes) -> str | None:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(asked, dict) or not isinstance(asked.get("model"), str | None):
        return None
    if asked.get("num_beams") is not None:
        tasks = tasks[::-1]
    return catalog.pick(asked.get("model"), tasks, _kind(asked.get("input"))).name


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
