"""What a running server offers: its models and their ladders, read over HTTP.

It deliberately knows nothing of gevent and Locust, so that it can ask before they are loaded.
"""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from loadtest.ask import Ask


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One way to ask a model."""

    task: str
    path: str
    streams: bool = False


ENDPOINTS = {
    "classify": Endpoint("classify", "/v1/classify"),
    "generate": Endpoint("generate", "/v1/generate", streams=True),
    "generate-whole": Endpoint("generate", "/v1/generate"),
    "completions": Endpoint("generate", "/v1/completions", streams=True),
    "completions-whole": Endpoint("generate", "/v1/completions"),
}
_TASKS = {endpoint.task for endpoint in ENDPOINTS.values()}
_PROBE = "The quick brown fox jumps over the lazy dog, and then it sleeps. "


class TargetError(Exception):
    """The server cannot be tested; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One model of the server, as far as a caller needs to know it."""

    model: str
    task: str  # also the name of the endpoint that is asked if none is named
    steps: tuple[int, ...]  # the ladder, ascending
    max_tokens: int | None  # what the model sees at once
    examples: tuple[str, ...] = ()  # inputs that its makers recommend
    labels: tuple[str, ...] = ()  # of a classifier
    efforts: tuple[str, ...] = ()  # the named rungs

    def has(self, ask: Ask) -> bool:
        """Whether the ladder has the rung that a budget names, if it names one."""
        if ask.steps is not None:
            return ask.steps in self.steps
        return ask.effort is None or ask.effort in self.efforts


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
    return model.get("task") in _TASKS and takes == "text"


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
        labels=tuple(map(str, model.get("labels") or ())),
        efforts=tuple(model.get("efforts") or ()),
    )


def characters_per_token(url: str, offer: Offer, timeout_s: float = 60.0) -> float:
    """How much English text a generator takes as one token, asked with one short request."""
    text = _PROBE[: offer.max_tokens]
    body = {"model": offer.model, "prompt": text, "max_tokens": 1, "steps": offer.steps[0]}
    answer = _ask(url.rstrip("/"), "/v1/generate", timeout_s, json.dumps(body).encode())
    read = (answer.get("usage") or {}).get("prompt_tokens")
    if not isinstance(read, int) or read < 1:
        raise TargetError(f"{offer.model} does not say how many tokens it read: {answer}")
    return len(text) / read


def _get(base: str, path: str, timeout_s: float) -> dict[str, Any]:
    return _ask(base, path, timeout_s, None)


def _ask(base: str, path: str, timeout_s: float, body: bytes | None) -> dict[str, Any]:
    verb = "GET" if body is None else "POST"
    request = urllib.request.Request(
        base + path, data=body, headers={"Content-Type": "application/json"}, method=verb
    )
    # The load goes straight to the server; a proxy named in the environment must not see these.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(500).decode("utf-8", "replace")
        raise TargetError(f"{verb} {base}{path} answered {error.code}: {text}") from None
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise TargetError(
            f"No server answers at {base} ({reason}). Start one with `make demo` or "
            "`stepdial serve`, or name another with --url."
        ) from None
    except ValueError as error:
        raise TargetError(
            f"{verb} {base}{path} is no Stepdial answer ({error}). Is --url the right address?"
        ) from None
    if not isinstance(answer, dict):
        raise TargetError(f"{verb} {base}{path} is no Stepdial answer. Is --url the right address?")
    return answer
