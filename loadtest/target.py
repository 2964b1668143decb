"""What a running server offers: its models, their ladders, and the budgets that they take.

Needs neither gevent nor Locust, so a server can be checked before they are loaded.
"""

import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

# A budget as a caller asks for it: written in a mix, sent in a body, compared with an answer.


EFFORTS = ("low", "medium", "high", "max")
SYNTAX = (
    "steps such as 4, * for every step count, low, medium, high or max, 50ms for a deadline, "
    "disagree0.01, min2 and max8 for limits, default for none, joined by +"
)
_DEADLINE = re.compile(r"([0-9.]+)ms")
_LIMIT = re.compile(r"(min|max)([0-9]+)")
_DISAGREE = "disagree"


@dataclass(frozen=True, slots=True)
class Ask:
    """The budget fields of one request; all None: the default of the model."""

    steps: int | None = None
    effort: str | None = None
    deadline_ms: float | None = None
    max_disagreement: float | None = None
    min_steps: int | None = None
    max_steps: int | None = None

    @property
    def fields(self) -> dict[str, int | float | str]:
        """What the body of a request says."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        words = (
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in self.fields.items()
        )
        return " ".join(words) or "default"

    @property
    def place(self) -> tuple[float, str]:
        """Where it stands in a table: fixed steps first, ascending."""
        return (float("inf") if self.steps is None else self.steps), str(self)

    def objection(self, steps: object) -> str | None:
        """What is wrong with an answer of so many steps; None if nothing is."""
        if self.steps is not None:
            wrong = steps != self.steps
        elif isinstance(steps, int):
            # With max_disagreement, an answer may come before the least of the steps.
            early = self.max_disagreement is not None
            low = 0 if early or self.min_steps is None else self.min_steps
            wrong = not low <= steps <= (self.max_steps or steps)
        else:
            wrong = True
        return f"asked for {self}, the answer says {steps} steps" if wrong else None


def parse_ask(text: str) -> Ask:
    """The budget that a text such as `50ms+max8` stands for; ValueError if it is none."""
    fields: dict[str, Any] = {}
    for word in text.split("+"):
        name, value = _parse_word(word)
        if name in fields:
            raise ValueError(f"{text!r} says {name} twice")
        if name:
            fields[name] = value
    if not fields and text != "default":
        raise ValueError(f"{text!r} is no budget: write {SYNTAX}")
    return Ask(**fields)


def _parse_word(word: str) -> tuple[str, int | float | str]:
    if word == "default":
        return "", ""
    if word in EFFORTS:
        return "effort", word
    if word.isdecimal():
        return "steps", int(word)
    if limit := _LIMIT.fullmatch(word):
        return f"{limit[1]}_steps", int(limit[2])
    try:
        if deadline := _DEADLINE.fullmatch(word):
            return "deadline_ms", float(deadline[1])
        if word.startswith(_DISAGREE):
            return "max_disagreement", float(word.removeprefix(_DISAGREE))
    except ValueError:
        pass
    raise ValueError(f"{word!r} is no budget: write {SYNTAX}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One way to ask a model."""

    task: str
    path: str
    streams: bool = False

    @property
    def openai(self) -> bool:
        """Whether answers have the shape of OpenAI."""
        return self.path.endswith("/completions")

    @property
    def chats(self) -> bool:
        """Whether a prompt is sent as a message."""
        return "/chat/" in self.path


ENDPOINTS = {
    "classify": Endpoint("classify", "/v1/classify"),
    "generate": Endpoint("generate", "/v1/generate", streams=True),
    "generate-whole": Endpoint("generate", "/v1/generate"),
    "completions": Endpoint("generate", "/v1/completions", streams=True),
    "completions-whole": Endpoint("generate", "/v1/completions"),
    "chat": Endpoint("generate", "/v1/chat/completions", streams=True),
    "chat-whole": Endpoint("generate", "/v1/chat/completions"),
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


def checked_address(url: str) -> str:
    """The address without /v1 or a slash at its end; TargetError if nothing can be sent to it.

    Clients of OpenAI's API are given it with /v1.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of a port or brackets
        usable = False
    if not usable or re.search(r"[^!-~]", url) or parts.query or parts.fragment:
        raise TargetError(f"{url!r} is no address; write http://host:port")
    if parts.username is not None:
        raise TargetError(
            f"{url!r} holds a name or a password; write http://host:port and --api-key-file FILE"
        )
    return url.rstrip("/").removesuffix("/v1")


def read_key(path: str) -> str | None:
    """The key that a file holds; None without a file."""
    if not path:
        return None
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"The API key cannot be read from {path}: {error}") from None
    if not re.fullmatch(r"[!-~]+", key):
        raise TargetError(f"{path} must hold one API key and nothing else.")
    return key


def headers(key: str | None) -> dict[str, str]:
    """What each request carries."""
    carried = {"Content-Type": "application/json"}
    return carried if key is None else {**carried, "Authorization": f"Bearer {key}"}


def read_offers(url: str, key: str | None = None) -> list[Offer]:
    """Every model of the server at `url` that has an endpoint to load, with its ladder."""
    base = checked_address(url)
    try:
        listed = _get(base, "/v1/models", key)["data"]
        loadable = [model for model in listed if _takes_text(model)]
        offers = [_read_offer(base, model, key) for model in loadable]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TargetError(
            f"{base}/v1/models or what it says of a model is no Stepdial answer "
            f"({type(error).__name__}: {error}). Is --url the right address?"
        ) from None
    if not offers:
        raise TargetError(f"The server at {base} lists no model to load: see {base}/v1/models.")
    return offers


def left_out(url: str, offers: Sequence[Offer], key: str | None = None) -> list[str]:
    """The models that the load cannot be sent to, since they take no free text."""
    listed = _get(checked_address(url), "/v1/models", key)["data"]
    loaded = {offer.model for offer in offers}
    return sorted(str(model["id"]) for model in listed if model["id"] not in loaded)


def _takes_text(model: dict[str, Any]) -> bool:
    """Whether it can be sent the texts that the load is made of."""
    takes = (model.get("input") or {}).get("kind", "text")
    return model.get("task") in _TASKS and takes == "text"


def _read_offer(base: str, model: dict[str, Any], key: str | None) -> Offer:
    name = str(model["id"])
    ladder = _get(base, f"/v1/models/{quote(name, safe='')}/ladder", key)
    steps = tuple(sorted(int(rung["steps"]) for rung in ladder.get("rungs", [])))
    if not steps:
        raise TargetError(f"{name} has no step counts: see {base}/v1/models/{name}/ladder.")
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


def characters_per_token(url: str, offer: Offer, key: str | None = None) -> float:
    """How much English text a generator takes as one token, asked with one short request."""
    text = _PROBE[: offer.max_tokens]
    body = {"model": offer.model, "prompt": text, "max_tokens": 1, "steps": offer.steps[0]}
    answer = _ask(url.rstrip("/"), "/v1/generate", key, 60.0, json.dumps(body).encode())
    usage = answer.get("usage")
    read = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if not isinstance(read, int) or read < 1:
        raise TargetError(f"{offer.model} does not say how many tokens it read: {answer}")
    return len(text) / read


def _get(base: str, path: str, key: str | None) -> dict[str, Any]:
    return _ask(base, path, key, 10.0, None)


def _ask(
    base: str, path: str, key: str | None, timeout_s: float, body: bytes | None
) -> dict[str, Any]:
    verb = "GET" if body is None else "POST"
    request = urllib.request.Request(base + path, data=body, headers=headers(key), method=verb)
    # The load goes straight to the server; a proxy named in the environment must not see these.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay)
    try:
        with opener.open(request, timeout=timeout_s) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            raise TargetError(_refusal(f"{verb} {base}{path}", error)) from None
    except (urllib.error.URLError, OSError) as error:
        raise TargetError(_silence(base, getattr(error, "reason", error))) from None
    except (ValueError, HTTPException, RecursionError) as error:
        raise TargetError(
            f"{verb} {base}{path} is no Stepdial answer ({error!r}). Is --url the right address?"
        ) from None
    if not isinstance(answer, dict):
        raise TargetError(f"{verb} {base}{path} is no Stepdial answer. Is --url the right address?")
    return answer


class _Stay(urllib.request.HTTPRedirectHandler):
    """The load does not follow redirections, so neither do the questions before it."""

    def redirect_request(self, *_: object) -> None:
        return None


def _refusal(asked: str, error: urllib.error.HTTPError) -> str:
    text = error.read(500).decode("utf-8", "replace")
    told = f"{asked} answered {error.code}: {text}"
    if error.code in (401, 403):
        return f"{told}\nGive a key that the server takes with --api-key-file FILE."
    if 300 <= error.code < 400:
        return f"{asked} is redirected to {error.headers['Location']}: name that with --url."
    return told


def _silence(base: str, reason: object) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return (
            f"The certificate of {base} is not trusted ({reason.verify_message}). "
            "SSL_CERT_FILE=FILE names the certificates to trust."
        )
    return (
        f"No server answers at {base} ({reason}). Start one with `make demo` or "
        "`stepdial serve`, or name another with --url."
    )
