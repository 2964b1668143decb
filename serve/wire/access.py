"""What is written down of a request when it is over: a line of the access log, and a trace.

Knows what the routes leave in the scope; deliberately neither how lines look nor where spans go.
"""

import logging
from dataclasses import dataclass
from urllib.parse import quote

from starlette.types import Scope

from serve.traces import Traces, Visit
from serve.wire.gate import WATCHED

ID_KEY = "stepdial.id"
SERVED_KEY = "stepdial.served"  # (model, steps), which are None until the work was taken in
REASON_KEY = "stepdial.reason"  # of the budget
JOBS_KEY = "stepdial.jobs"
COMPUTED_KEY = "stepdial.computed_s"  # when the last call of the model was over

_PRINTABLE = "/%:@!$&'()*+,;=-._~"
_access = logging.getLogger("stepdial.access")


@dataclass(frozen=True, slots=True)
class Access:
    """Where requests are written down."""

    log: bool
    traces: Traces | None

    def write(
        self, scope: Scope, method: str, status: int, arrived_s: float, ended_s: float
    ) -> None:
        """This request is over."""
        if not self.log and self.traces is None:
            return
        fields: dict[str, str | int] = {"id": scope[ID_KEY]}
        if SERVED_KEY in scope:
            fields["model"], steps = scope[SERVED_KEY]
            if steps is not None:
                fields["steps"] = steps
        if REASON_KEY in scope:
            fields["reason"] = scope[REASON_KEY]
        if self.traces is not None and scope["path"] not in WATCHED:
            visit = _visit(scope, method, status, arrived_s, ended_s, fields)
            fields["trace_id"] = self.traces.record(visit)
        if self.log:
            path, milliseconds = _path_as_sent(scope), (ended_s - arrived_s) * 1000
            of_http = {"method": method, "path": path, "status": status}
            noted = [f" {key}={value}" for key, value in fields.items() if key != "id"]
            _access.info(
                "%s %s %d %.1f ms %s%s",
                *(method, path, status, milliseconds, fields["id"], "".join(noted)),
                extra={"fields": of_http | {"ms": round(milliseconds, 3)} | fields},
            )


def _visit(
    scope: Scope,
    method: str,
    status: int,
    arrived_s: float,
    ended_s: float,
    fields: dict[str, str | int],
) -> Visit:
    route = getattr(scope.get("route"), "path", None)
    attributes: dict[str, str | int] = {
        "http.request.method": method,
        "http.response.status_code": status,
        "url.path": _path_as_sent(scope),
        "url.scheme": scope["scheme"],
        **({"http.route": route} if route else {}),
        **{f"stepdial.{key}": value for key, value in fields.items()},
    }
    return Visit(
        name=f"{method} {route}" if route else method,
        headers={str(name, "latin-1"): str(value, "latin-1") for name, value in scope["headers"]},
        arrived_s=arrived_s,
        ended_s=ended_s,
        status=status,
        attributes=attributes,
        jobs=scope.get(JOBS_KEY, ()),
        computed_s=scope.get(COMPUTED_KEY),
    )


def _path_as_sent(scope: Scope) -> str:
    """The path in printable characters only: a decoded one could forge lines of the log."""
    return quote(scope.get("raw_path") or scope["path"], safe=_PRINTABLE)
