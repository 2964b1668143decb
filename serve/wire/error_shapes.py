"""The body of an error, in the shape of the protocol that the request spoke.

Knows paths and errors; deliberately not how a body is sent.
"""

from typing import Any

from serve.errors import ServeError


def error_body(error: ServeError, path: str) -> dict[str, Any]:
    """What a client that sent its request to this path can read."""
    if path == "/v2" or path.startswith("/v2/"):
        return {"error": error.message}
    if path.startswith(("/v1/completions", "/v1/chat/")):
        body = error.body()
        body["error"]["type"] = _openai_type(error.status)
        return body
    return error.body()


def _openai_type(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 429:
            return "rate_limit_error"
        case _ if status >= 500:
            return "server_error"
        case _:
            return "invalid_request_error"
