"""Every error that a client can get, with its status and code. Messages say what to do.

Routes send them as a whole response or as the last event of a stream.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

# Longest message: numbers and names in it come from the client, in any length.
_MOST_CHARACTERS = 2000
_SOON, _CLOSE = {"retry-after": "1"}, {"connection": "close"}  # headers of several


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust gave up, which it says by an exception that is no `Exception`."""
    return type(error).__name__ == "PanicException"


class ServeError(Exception):
    """An error with a public shape: `{"error": {"code", "message", "param", ...}}`."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    own_headers: ClassVar[Mapping[str, str]] = {}

    def __init__(self, message: str, *, param: str | None = None, **details: Any) -> None:
        message = message if len(message) <= _MOST_CHARACTERS else message[:_MOST_CHARACTERS] + "…"
        super().__init__(message)
        self.message = message
        self.param = param
        self.details = details

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        public = {"code": self.code, "message": self.message, "param": self.param}
        return {"error": public | self.details}

    def headers(self) -> Mapping[str, str]:
        return self.own_headers


class BadRequest(ServeError):
    status = 400
    code = "invalid_json"


class ContextLengthExceeded(ServeError):
    """Of OpenAI's routes only: status and code are those that its clients look for.

    The message has the code too, since some clients look there.
    """

    status = 400
    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str | None, **details: Any) -> None:
        super().__init__(f"{message} ({self.code})", param=param, **details)


class BadHttp(ServeError):
    status = 400
    code = "bad_http"


class Unauthorized(ServeError):
    status = 401
    code = "unauthorized"

    def __init__(self, message: str, *, of_script: bool = False) -> None:
        super().__init__(message)
        self._of_script = of_script

    def headers(self) -> Mapping[str, str]:
        # Basic makes a browser ask for the key; scripts of a page get Bearer and ask themselves.
        basic = 'Basic realm="Stepdial", charset="UTF-8"'
        return {"www-authenticate": 'Bearer realm="Stepdial"' if self._of_script else basic}


class CrossOrigin(ServeError):
    status = 403
    code = "cross_origin"


class AdminOff(ServeError):
    status = 403
    code = "admin_off"


class FolderForbidden(ServeError):
    status = 403
    code = "folder_forbidden"


class StepsForbidden(ServeError):
    status = 403
    code = "steps_forbidden"


class TokensForbidden(ServeError):
    status = 403
    code = "tokens_forbidden"


class NotFound(ServeError):
    status = 404
    code = "not_found"


class UnknownModel(NotFound):
    code = "unknown_model"


class MethodNotAllowed(ServeError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, path: str, method: str, allowed: Iterable[str]) -> None:
        self._allowed = ", ".join(allowed)
        super().__init__(f"{path} does not take {method}: send {self._allowed}")

    def headers(self) -> Mapping[str, str]:
        return {"allow": self._allowed}


class RequestTimeout(ServeError):
    status = 408
    code = "request_timeout"
    own_headers = _CLOSE


class PayloadTooLarge(ServeError):
    status = 413
    code = "payload_too_large"
    # The rest of the body is not read, so the connection cannot carry another request.
    own_headers = _CLOSE


class UrlTooLong(ServeError):
    status = 414
    code = "url_too_long"


class UnsupportedEncoding(ServeError):
    status = 415
    code = "unsupported_encoding"
    own_headers: ClassVar = {"accept-encoding": "gzip, deflate"}


class HeadersTooLarge(ServeError):
    status = 431
    code = "headers_too_large"


class UnsupportedCoding(ServeError):
    status = 501
    code = "unsupported_coding"


class Unprocessable(ServeError):
    status = 422
    code = "unprocessable"


class InvalidField(Unprocessable):
    code = "invalid_field"


class ImpossibleBudget(Unprocessable):
    code = "impossible_budget"


class ImpossibleDeadline(ImpossibleBudget):
    code = "impossible_deadline"

    def __init__(self, given_s: float, least_s: float, steps: int) -> None:
        least_ms = math.ceil(least_s * 1000)
        super().__init__(
            f"deadline_ms is {given_s * 1000:g}, but this takes about {least_ms} ms at {steps} "
            f"step{'' if steps == 1 else 's'} even on an idle server: give it at least {least_ms}",
            param="deadline_ms",
            least_ms=least_ms,
        )


class NotCalibrated(Unprocessable):
    code = "not_calibrated"


class BrokenBundle(Unprocessable):
    code = "broken_bundle"


class WrongInput(Unprocessable):
    code = "wrong_input"


class WrongTask(Unprocessable):
    code = "wrong_task"


class NoEmbeddings(Unprocessable):
    code = "no_embeddings"


class QueueFull(ServeError):
    """The queue is full; says when to try again."""

    status = 429
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, retry_after_ms=max(1, math.ceil(retry_after_s * 1000)))
        self.retry_after_s = retry_after_s

    def headers(self) -> Mapping[str, str]:
        return {
            "retry-after": str(max(1, math.ceil(self.retry_after_s))),
            "retry-after-ms": str(self.details["retry_after_ms"]),
        }


class TooBusy(QueueFull):
    code = "too_busy"


class RateLimited(QueueFull):
    code = "rate_limited"


class TokensLimited(QueueFull):
    code = "tokens_limited"


class ConcurrencyLimited(QueueFull):
    code = "concurrency_limited"


class DeadlineLapsed(ServeError):
    """The deadline of an accepted request passed; its work was stopped."""

    status = 504
    code = "deadline_lapsed"

    def __init__(self, given_s: float, text: str | None = None) -> None:
        written = {} if text is None else {"text": text}
        super().__init__(
            f"the answer was not complete within {given_s * 1000:g} ms: send the request again "
            "with a later deadline_ms, or ask for less, such as fewer steps",
            param="deadline_ms",
            **written,
        )


class InternalError(ServeError):
    """A bug of ours."""


class Unavailable(ServeError):
    status = 503
    code = "unavailable"


class NotReady(Unavailable):
    code = "not_ready"


class Stalled(NotReady):
    """A model call is stuck. After `retry_after_s` it has ended, or the process has."""

    code = "stalled"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self._retry_after_s = retry_after_s

    def headers(self) -> Mapping[str, str]:
        return {"retry-after": str(max(1, math.ceil(self._retry_after_s)))}


class Draining(Unavailable):
    code = "draining"
    own_headers = _SOON | _CLOSE


class Crowded(Unavailable):
    code = "too_many_connections"
    own_headers = _SOON | _CLOSE


class ModelGone(Unavailable):
    code = "model_gone"
    own_headers = _SOON


class OutOfMemory(Unavailable):
    code = "out_of_memory"
    own_headers = _SOON

    def __init__(self) -> None:
        super().__init__("the server has no memory left for this request: send it again later")


class ModelFailure(Unavailable):
    code = "model_failure"


# Errors in the format of the protocol that the request used.


_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(error: ServeError, path: str) -> dict[str, Any]:
    """The error body for a request to this path."""
    if speaks_oip(path):
        return {"error": error.message}
    if speaks_openai(path):
        body = error.body()
        others = "server_error" if error.status >= 500 else "invalid_request_error"
        body["error"]["type"] = _OPENAI_TYPES.get(error.status, others)
        return body
    return error.body()


def speaks_oip(path: str) -> bool:
    """Whether this path belongs to the Open Inference Protocol."""
    return path == "/v2" or path.startswith("/v2/")


def speaks_openai(path: str) -> bool:
    """Whether this path is one of OpenAI's API."""
    return path.startswith(("/v1/completions", "/v1/chat/", "/v1/embeddings", "/v1/models"))
