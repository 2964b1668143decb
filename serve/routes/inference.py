"""POST /v2/models/{name}/infer: inference in the Open Inference Protocol.

Knows tensors in and tensors out; how rows run is the business of what /v1 uses as well.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve.bundle import ImageInput, TextInput
from serve.catalog import Served
from serve.engine.engine import Engine
from serve.engine.job import ClassifiedEvent, FailedEvent, GeneratedEvent, Span, Tags
from serve.engine.sampling import MAX_SEED
from serve.engine.work import Wish
from serve.inputs.rows import Intake, cloud_rows, image_rows, read_items
from serve.inputs.values import Item
from serve.routes.labelling import labelled, ranked, refuse_early, token_labels
from serve.routes.oip_models import find_version, oip_problems
from serve.routes.shared import deadline_of, decide_budget, request_id, timing
from serve.routes.writing import Order, check_answer, check_max_tokens, check_texts
from serve.settings import Settings
from serve.wire.answers import Budget, budget_of, server_timing
from serve.wire.oip_answer import Values, Wanted, facts_of, wanted_outputs, written
from serve.wire.oip_body import Sent, read_inference
from serve.wire.oip_models import InputSpec
from serve.wire.oip_parameters import classify_request, generate_request
from serve.wire.oip_schemas import VERSION, InferResponse
from serve.wire.oip_tensors import numbers_of_bytes, numbers_of_json, texts_of_bytes, texts_of_json
from serve.wire.reader import Reader
from serve.wire.wishes import check_beams, drawn_seed, wish_of

_WHERE = "inputs[0]"
_REFERENCE = {"$ref": "#/components/schemas/InferRequest"}
_BYTES = {"type": "string", "format": "binary"}
_TAKES: dict[str, Any] = {
    "parameters": [
        {
            "name": "Inference-Header-Content-Length",
            "in": "header",
            "required": False,
            "schema": {"type": "integer", "minimum": 0},
            "description": "How many bytes of the body are JSON, where tensors follow as bytes.",
        }
    ],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _REFERENCE},
            "application/octet-stream": {"schema": _BYTES},
        },
    },
}
_GIVES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One answer for each row; as bytes behind the JSON where that was asked.",
        "content": {"application/octet-stream": {"schema": _BYTES}},
    },
    **oip_problems(
        e400="The body cannot be read, or a tensor or parameter of it is impossible.",
        e403="A page of another address sent the request.",
        e404="No such model, or no such version of it, is served.",
        e408="The body did not arrive in time.",
        e413="The body is too large.",
        e429="The queue is full, or too long for `deadline_ms`; `Retry-After` and "
        "`retry-after-ms` say when to try again.",
        e503="The server is starting or shutting down, or the model failed.",
        e504="The request was taken in, but `deadline_ms` passed before its answer was complete.",
    ),
}


def inference_routes(settings: Settings, engine: Engine, reader: Reader) -> APIRouter:
    """The routes, for an engine."""
    router = APIRouter(tags=["open inference protocol"])

    @router.post(
        "/v2/models/{name}/versions/{version}/infer",
        summary="Classify, continue or translate with one version of a model",
        response_model=InferResponse,
        responses=_GIVES,
        openapi_extra=_TAKES,
    )
    async def infer_version(request: Request, name: str, version: str) -> Response:
        find_version(engine, name, version)  # a body for nobody is not worth reading
        sent = await read_inference(request, reader)
        served = find_version(engine, name, version)
        manifest = served.manifest
        InputSpec.of(manifest).check(sent.asked.inputs, served.name, settings.max_inputs)
        wanted = wanted_outputs(sent.asked, manifest)
        inference = Inference(request, engine, reader, served, sent, wanted)
        if manifest.labelled:
            return await inference.classify()
        return await inference.write()

    @router.post(
        "/v2/models/{name}/infer",
        summary="Classify, continue or translate",
        response_model=InferResponse,
        responses=_GIVES,
        openapi_extra=_TAKES,
    )
    async def infer(request: Request, name: str) -> Response:
        return await infer_version(request, name, VERSION)

    return router


@dataclass(frozen=True, slots=True)
class Inference:
    """One request whose tensor the model can take."""

    request: Request
    engine: Engine
    reader: Reader
    served: Served
    sent: Sent
    wanted: Sequence[Wanted]

    async def classify(self) -> Response:
        """Labels, their score and their steps for each row."""
        asked = classify_request(self.sent.asked.parameters)
        decision = decide_budget(self.request, self.served, asked)
        rows = self.sent.asked.inputs[0].shape[0]
        refuse_early(self.request, self.engine, self.served, asked, decision, rows)
        taken = await self.reader.read(
            self.request,
            self._characters(),
            deadline_of(self.request, asked),
            lambda: self._rows(asked.truncate is not False),
        )
        event = await labelled(self.request, self.engine, self.served, asked, decision, taken)
        budgets = [
            budget_of(decision.served_at(steps), evaluations)
            for steps, evaluations in zip(event.steps, event.evaluations, strict=True)
        ]
        columns = self._labels(event, taken)
        columns["steps"] = [budget["steps"] for budget in budgets]
        texts = isinstance(self.served.manifest.input, TextInput)
        truncated = sum(one.truncated for one in taken) if texts else None
        worst = min(budgets, key=lambda budget: budget["steps"])
        response = self._answer(worst, event.span, columns, truncated=truncated)
        self.engine.latency.observe_answer(self.engine.clock() - event.span.ended_s)
        return response

    def _labels(self, event: ClassifiedEvent, taken: Sequence[Intake]) -> dict[str, Values]:
        """A label and its score for each row; of tokens, as JSON, with the least score of any."""
        manifest = self.served.manifest
        tagged = [row.found for row in event.rows if isinstance(row.found, Tags)]
        if tagged:
            tokens = [
                token_labels(tags, one, manifest) for tags, one in zip(tagged, taken, strict=True)
            ]
            return {
                "tokens": [json.dumps(row, ensure_ascii=False) for row in tokens],
                "score": [min(tags.scores) for tags in tagged],
            }
        labels = manifest.labels or ()
        rows = [row.found for row in event.rows if not isinstance(row.found, Tags)]
        best = [ranked(scores)[0] for scores in rows]
        return {
            "label": [labels[index] for index in best],
            "score": [scores[index] for scores, index in zip(rows, best, strict=True)],
        }

    async def write(self) -> Response:
        """A text for each row, each written by a job of its own."""
        asked = generate_request(self.sent.asked.parameters, self.served.manifest.task)
        decision = decide_budget(self.request, self.served, asked)
        max_tokens = asked.limit(self.reader.settings.max_tokens)
        check_max_tokens(max_tokens, self.reader.settings)
        rows = self.sent.asked.inputs[0].shape[0]
        check_texts(rows, self.reader.settings)
        check_answer(rows, max_tokens, None, self.reader.settings)
        check_beams(asked, self.served)
        prompts = await self.reader.read(
            self.request, self._characters(), deadline_of(self.request, asked), self._prompts
        )
        seed = drawn_seed() if asked.seed is None else asked.seed
        wishes = [
            _with_seed(wish_of(asked, self.served, prompt, seed, max_tokens), seed + row)
            for row, prompt in enumerate(prompts)
        ]
        order = Order.of(self.request, self.engine, self.served, asked, decision, wishes)
        events = await _all_written(order)
        steps = order.decision.steps
        columns: dict[str, Values] = {
            "text": [event.text for event in events],
            "finish_reason": [str(event.finish_reason) for event in events],
            "steps": [steps for _ in events],
        }
        span = Span(
            min(event.span.queued_s for event in events),
            min(event.span.started_s for event in events),
            max(event.span.ended_s for event in events),
        )
        return self._answer(budget_of(order.decision), span, columns, seed=seed)

    def _characters(self) -> int | None:
        """How much text there is to read, at most; None where it is something else."""
        if not isinstance(self.served.manifest.input, TextInput):
            return None
        raw = self.sent.raw[0]
        if raw is not None:
            return len(raw)
        data = self.sent.asked.inputs[0].data
        if len(data) > self.reader.settings.max_inputs:  # too many: it is said which are allowed
            return None
        return sum(len(text) for text in data if isinstance(text, str))

    def _texts(self) -> list[str]:
        tensor, raw = self.sent.asked.inputs[0], self.sent.raw[0]
        if raw is None:
            return texts_of_json(tensor.data, tensor.shape, _WHERE)
        return texts_of_bytes(raw, tensor.shape, _WHERE)

    def _prompts(self) -> list[list[int]]:
        codec = self.served.codec
        return [codec.encode_prompt(text, f"text[{row}]") for row, text in enumerate(self._texts())]

    def _rows(self, truncate: bool) -> list[Intake]:
        """What the tensor holds, as the rows that the model takes."""
        spec = self.served.manifest.input
        if isinstance(spec, TextInput):
            texts = enumerate(self._texts())
            items = tuple(Item("text", text, f"text[{row}]") for row, text in texts)
            return read_items(items, self.served.manifest, self.served.text, truncate)
        tensor, raw = self.sent.asked.inputs[0], self.sent.raw[0]
        numbers = (
            numbers_of_json(tensor.data, tensor.datatype, tensor.shape, _WHERE)
            if raw is None
            else numbers_of_bytes(raw, tensor.datatype, tensor.shape, _WHERE)
        )
        if isinstance(spec, ImageInput):
            return image_rows(numbers, tensor.datatype == "UINT8", spec, _WHERE)
        return cloud_rows(numbers)

    def _answer(
        self,
        budget: Budget,
        span: Span,
        columns: Mapping[str, Values],
        *,
        truncated: int | None = None,
        seed: int | None = None,
    ) -> Response:
        spent = timing(self.request, self.engine, span)
        return written(
            self.served.name,
            self.sent.asked.id or request_id(self.request),
            facts_of(budget, spent, truncated=truncated, seed=seed),
            self.wanted,
            columns,
            server_timing(spent),
        )


async def _all_written(order: Order) -> list[GeneratedEvent]:
    """The texts in the order of their rows; raises what kept one from being written."""
    found: dict[int, GeneratedEvent] = {}
    async with order.running() as running:
        while len(found) < len(order.wishes):
            for row, event in await running.mailbox.take():
                if isinstance(event, FailedEvent):
                    raise event.error
                assert isinstance(event, GeneratedEvent)
                found[row] = event
    return [found[row] for row in range(len(order.wishes))]


def _with_seed(wish: Wish, seed: int) -> Wish:
    """Each row has a number of its own, so that equal prompts are continued differently."""
    return replace(wish, sampling=replace(wish.sampling, seed=seed % (MAX_SEED + 1)))
