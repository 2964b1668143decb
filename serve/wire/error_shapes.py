"""An error in the shape of the protocol that the request spoke: its status and its body.

Knows paths and errors; deliberately not how they are sent.
"""

from typing import Any

from serve.errors import ServeError, Unprocessable


def error_status(error: ServeError, path: str) -> int:
    """The status for a client that sent its request to this path.

    The Open Inference Protocol has 400 for whatever is wrong with a request.
    """
    if speaks_oip(path) and isinstance(error, Unprocessable):
        return 400
    return error.status


def error_body(error: ServeError, path: str) -> dict[str, Any]:
    """What a client that sent its request to this path can read."""
    if speaks_oip(path):
        return {"error": error.message}
    if path.startswith(("/v1/completions", "/v1/chat/")):
        body = error.body()
        body["error"]["type"] = _openai_type(error.status)
        return body
    return error.body()


def speaks_oip(path: str) -> bool:
    """Whether the Open Inference Protocol is spoken there."""
    return path == "/v2" or path.startswith("/v2/")


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
