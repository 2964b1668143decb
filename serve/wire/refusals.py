"""The part of the OpenAPI document on what is refused before any route hears of it.

Knows the document and who is let in; deliberately no single route.
"""

from typing import Any

from serve.wire.error_shapes import speaks_oip
from serve.wire.gate import OWN_KEYS, PROBES

_REASONS = {
    "401": "The server needs an API key, and there was none, or one that it does not know.",
    "403": "A page of another address sent the request, or the API key forbids it.",
    "429": "The API key has sent too many requests, or too many of them run; `Retry-After` says "
    "when to try again.",
    "431": "The headers are too large, or too many.",
    "503": "Too many connections are open.",
}
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer KEY`"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "basic": {"type": "http", "scheme": "basic", "description": "For browsers: any name, the key."},
}


def document_refusals(document: dict[str, Any], needs_key: bool) -> None:
    """Add to every operation what any request can be told, where it does not say so itself."""
    if needs_key:
        document["components"]["securitySchemes"] = _SCHEMES
    for path, methods in document["paths"].items():
        if path in PROBES:
            continue
        for operation in methods.values():
            responses = operation["responses"]
            shape = next(
                (known["content"] for code, known in responses.items() if code >= "400"),
                _shape("OipError" if speaks_oip(path) else "ErrorResponse"),
            )
            for code, about in _REASONS.items():
                responses.setdefault(code, {"description": about, "content": shape})
            if needs_key and not path.startswith(OWN_KEYS):
                operation["security"] = [{name: []} for name in _SCHEMES]


def _shape(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
