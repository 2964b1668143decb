"""A bare FastAPI handler that checks the same request as /v1/classify and answers in its shape.

For `benchmarks.bare_fastapi`, as a process of its own. FastAPI and uvicorn as anybody would write
them, with a constant answer. No model, no queue, no thread.
"""

import argparse
import gc
import sys
from collections.abc import Sequence

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.server import READY_LINE
from serve.api.body import ClassifyRequest
from serve.server import bind, listen, url_of


class Expected(BaseModel):
    metric: str
    value: float
    full_value: float


class Budget(BaseModel):
    steps: int
    method: str
    nfe: int
    reason: str
    full_steps: int
    expected: Expected


class LabelScore(BaseModel):
    label: str
    score: float


class ClassifyResult(BaseModel):
    label: str
    score: float
    top: list[LabelScore]
    truncated: bool
    budget: Budget


class Timing(BaseModel):
    queue_ms: float
    compute_ms: float
    total_ms: float


class ClassifyResponse(BaseModel):
    id: str
    model: str
    results: list[ClassifyResult]
    timing: Timing


def bare_app(answer: ClassifyResponse) -> FastAPI:
    """One route."""
    app = FastAPI()

    @app.post("/v1/classify")
    async def classify(asked: ClassifyRequest) -> ClassifyResponse:
        return answer

    return app


def constant_answer(labels: Sequence[str]) -> ClassifyResponse:
    """As long as a real one."""
    share = 1 / len(labels)
    top = [LabelScore(label=label, score=share) for label in labels[:5]]
    expected = Expected(metric="accuracy", value=0.9, full_value=0.9)
    budget = Budget(
        steps=8, method="euler", nfe=8, reason="default", full_steps=8, expected=expected
    )
    result = ClassifyResult(label=labels[0], score=share, top=top, truncated=False, budget=budget)
    timing = Timing(queue_ms=0.123, compute_ms=0.123, total_ms=0.456)
    return ClassifyResponse(id="0123456789abcdef", model="bare", results=[result], timing=timing)


def main(arguments: Sequence[str]) -> int:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("labels", nargs="+", help="what the answer lists")
    parsed = made.parse_args(arguments)
    sys.setswitchinterval(0.0005)
    app = bare_app(constant_answer(parsed.labels))
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_keep_alive=75,
    )
    gc.collect()
    gc.freeze()
    with bind("127.0.0.1", 0) as listener:
        listen(listener)
        print(f"on {url_of(listener)} (bare)\n{READY_LINE}", flush=True)
        uvicorn.Server(config).run([listener])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
