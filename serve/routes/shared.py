"""What several routes need: picking a rung, telling the time, and documenting errors.

Knows requests and answers; deliberately no task.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from serve.budget import Decision, decide_within
from serve.catalog import Served
from serve.engine.engine import Engine
from serve.engine.job import Deadline, Span
from serve.wire.access import COMPUTED_KEY, ID_KEY, REASON_KEY, SERVED_KEY
from serve.wire.answers import ErrorResponse, Timing
from serve.wire.envelope import ARRIVED_KEY, stay
from serve.wire.gate import steps_allowed
from serve.wire.ready import ReadyAnswer
from serve.wire.schemas import BudgetFields


def request_id(request: Request) -> str:
    """The id that this request has, or was given."""
    return str(request.scope[ID_KEY])


def decide_budget(request: Request, served: Served, asked: BudgetFields) -> Decision:
    """The rung for a request, or those that may serve it."""
    stay(request.scope, served.guests)
    request.scope[SERVED_KEY] = (served.name, None)
    return decide_within(asked.ask, served.manifest, steps_allowed(request.scope))


def deadline_of(request: Request, asked: BudgetFields) -> Deadline | None:
    """The deadline, counted from when the request came."""
    if asked.deadline_ms is None:
        return None
    return Deadline(request.scope[ARRIVED_KEY], asked.deadline_ms / 1000)


def note_decision(request: Request, engine: Engine, served: Served, decision: Decision) -> None:
    """Count what became of a budget."""
    request.scope[SERVED_KEY] = (served.name, decision.steps)
    request.scope[REASON_KEY] = decision.reason
    engine.metrics.decisions.labels(served.name, decision.reason, str(decision.steps)).inc()
    if decision.reason == "load":
        engine.metrics.degraded.labels(served.name).inc()


def timing(request: Request, engine: Engine, span: Span) -> Timing:
    """Where the time of this request went."""
    request.scope[COMPUTED_KEY] = span.ended_s
    return {
        "queue_ms": round(span.queue_ms, 3),
        "compute_ms": round(span.compute_ms, 3),
        "total_ms": round((engine.clock() - request.scope[ARRIVED_KEY]) * 1000, 3),
    }


def answer(body: BaseModel | Mapping[str, object], *headers: tuple[bytes, bytes]) -> Response:
    """A 200 with this body; fields without a value are left out where they are optional."""
    text = body.model_dump_json().encode() if isinstance(body, BaseModel) else to_json(body)
    return ReadyAnswer(text, *headers)


def problems(**reasons: str) -> dict[int | str, dict[str, Any]]:
    """The documentation of error responses: `problems(e404="...")`."""
    return {
        int(code[1:]): {"model": ErrorResponse, "description": about}
        for code, about in reasons.items()
    }


def takes(schema: type[BaseModel]) -> dict[str, Any]:
    """The documentation of a body that the route reads itself."""
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    content = {"application/json": {"schema": reference}}
    return {"requestBody": {"required": True, "content": content}}


RUN_PROBLEMS = problems(
    e400="The body is not JSON that can be read.",
    e403="A page of another address sent the request.",
    e404="No such model is served.",
    e408="The body did not arrive in time.",
    e413="The body is too large.",
    e422="A field is unknown, missing, of the wrong type or impossible; `param` names it.",
    e429="The queue is full, or too long for `deadline_ms`; `Retry-After` and `retry-after-ms` "
    "say when to try again.",
    e503="The server is starting or shutting down, or the model failed.",
    e504="The request was taken in, but `deadline_ms` passed before its answer was complete.",
)
