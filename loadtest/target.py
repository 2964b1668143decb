"""What a running server offers: its models and their ladders, read over HTTP.

It deliberately knows nothing of gevent and Locust, so that it can ask before they are loaded.
"""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

ENDPOINTS = {"classify": "/v1/classify", "generate": "/v1/generate"}


class TargetError(Exception):
    """The server cannot be tested; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One model of the server, as far as a caller needs to know it."""

    model: str
    task: str  # a key of ENDPOINTS
    steps: tuple[int, ...]  # the ladder, ascending
    max_tokens: int | None  # what the model sees at once
    examples: tuple[str, ...] = ()  # inputs that its makers recommend


def read_offers(url: str, timeout_s: float = 10.0) -> list[Offer]:
    """Every model of the server at `url` that has an endpoint to load, with its ladder."""
    base = url.rstrip("/")
    listed = _get(base, "/v1/models", timeout_s).get("data", [])
    offers = [_read_offer(base, model, timeout_s) for model in listed if _takes_text(model)]
    if not offers:
        raise TargetError(f"The server at {base} lists no model to load: see {base}/v1/models.")
    return offers


def _takes_text(model: dict[str, Any]) -> bool:
    """Whether it can be sent the texts that the load is made of."""
    takes = (model.get("input") or {}).get("kind", "text")
    return model.get("task") in ENDPOINTS and takes == "text"


def _read_offer(base: str, model: dict[str, Any], timeout_s: float) -> Offer:
    name = str(model["id"])
    ladder = _get(base, f"/v1/models/{name}/ladder", timeout_s)
    steps = tuple(sorted(int(rung["steps"]) for rung in ladder.get("rungs", [])))
    if not steps:
        raise TargetError(f"The ladder of {name} is empty: see {base}/v1/models/{name}/ladder.")
    limit, card = model.get("max_tokens"), model.get("card") or {}
    return Offer(
        model=name,
        task=str(model["task"]),
        steps=steps,
        max_tokens=int(limit) if limit else None,
        examples=tuple(str(text) for text in card.get("examples") or () if text),
    )


def _get(base: str, path: str, timeout_s: float) -> dict[str, Any]:
    # The load goes straight to the server; a proxy named in the environment must not see these.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(base + path, timeout=timeout_s) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(500).decode("utf-8", "replace")
        raise TargetError(f"GET {base}{path} answered {error.code}: {text}") from None
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise TargetError(
            f"No server answers at {base} ({reason}). Start one with `make demo` or "
            "`stepdial serve`, or name another with --url."
        ) from None
    except ValueError as error:
        raise TargetError(
            f"GET {base}{path} is no Stepdial answer ({error}). Is --url the right address?"
        ) from None
    if not isinstance(answer, dict):
        raise TargetError(f"GET {base}{path} is no Stepdial answer. Is --url the right address?")
    return answer
