"""One request on its way through the engine: its jobs, their events, a disconnect, and its answer
or stream.
"""

import asyncio
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, final

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.api.body import (
    BudgetFields,
    ErrorResponse,
    GenerateRequest,
    Reader,
    SamplingFields,
    Timing,
    TokenLabel,
)
from serve.budget import Decision, decide_within
from serve.bundle import Manifest
from serve.catalog import Served
from serve.engine.backlog import GenerationSize
from serve.engine.classify import Classification
from serve.engine.engine import Engine
from serve.engine.job import (
    ClassifiedEvent,
    Deadline,
    Deliver,
    Event,
    FailedEvent,
    GeneratedEvent,
    Job,
    Kind,
    LaneKey,
    Span,
    Tags,
    TokenEvent,
)
from serve.engine.search import Translation
from serve.engine.writing import MAX_SEED, Generation, GenerationRequest, Sampling
from serve.errors import ImpossibleDeadline, InvalidField, Unprocessable
from serve.exchange import EXCHANGE_KEY, ClientGone, Exchange, ReadyAnswer
from serve.inputs.rows import Input, InputRow, greatest_length, least_length, row_length
from serve.settings import Settings

# What to generate, from a request.


# Drawn seeds fit a JavaScript number, so that every client can send them back unchanged.
_DRAWN_BITS = 32
_LEAST_TOP_P = 1e-9  # which only the most likely token is within


def drawn_seed() -> int:
    """A random seed, for a request without one."""
    return secrets.randbits(_DRAWN_BITS)


def check_beams(asked: GenerateRequest, served: Served) -> None:
    """InvalidField if beam search is not possible for this model or with these fields."""
    if asked.num_beams is None:
        return
    if served.manifest.task != "translate":
        raise InvalidField(
            f"num_beams is for translation, but {served.name} continues prompts: leave it out",
            param="num_beams",
        )
    if asked.num_beams == 1:
        return
    if asked.temperature:
        raise InvalidField(
            "temperature must be 0 or left out with num_beams: beam search is not random",
            param="temperature",
        )
    for name in ("top_k", "top_p"):
        if getattr(asked, name) not in (None, 1.0):
            raise InvalidField(
                f"{name} has no meaning with num_beams: beam search is not random; leave it out",
                param=name,
            )
    if asked.logprobs is not None:
        raise InvalidField(
            "logprobs are not known of beam search: leave them out, or num_beams", param="logprobs"
        )


def generation_request(
    asked: SamplingFields,
    served: Served,
    prompt: list[int],
    *,
    max_tokens: int,
    seed: int,
    logprobs: int | None = None,
    stream: bool | None = False,
    num_beams: int | None = 1,
) -> GenerationRequest:
    """What to generate after this prompt, for the task of the model."""
    manifest = served.manifest
    limit = manifest.target_max_tokens
    temperature = asked.temperature
    if temperature is None:
        temperature = 0.0 if manifest.task == "translate" else 1.0
    return GenerationRequest(
        prompt=prompt,
        max_tokens=max_tokens if limit is None else min(max_tokens, limit),
        window=served.codec.max_tokens if limit is None else limit,
        sampling=Sampling(
            temperature=temperature,
            top_k=asked.top_k if asked.top_k and asked.top_k > 0 else None,
            top_p=1.0 if asked.top_p is None else max(asked.top_p, _LEAST_TOP_P),
            seed=seed % (MAX_SEED + 1),
        ),
        stops=asked.stops,
        logprobs=logprobs,
        stream=bool(stream),
        num_beams=num_beams or 1,
    )


# Jobs of the engine.


def _window(request: GenerationRequest, served: Served) -> int:
    """The positions at which the cache of a text is full; 0: never, as for translations."""
    return 0 if served.manifest.task == "translate" else request.window


def generation_job(
    request: GenerationRequest,
    served: Served,
    steps: int,
    deliver: Deliver,
    deadline: Deadline | None = None,
    admitted: bool = False,
) -> Job:
    """A text to generate, or to translate with beams."""
    made = Translation if request.num_beams > 1 else Generation
    positions, window = len(request.prompt), _window(request, served)
    if window:  # of a translation only the source is cached
        positions = min(positions + request.max_tokens, window)
    return Job(
        lane=LaneKey(served.key, _kind(request), steps),
        work=made(request, served.codec, deliver),
        lengths=(len(request.prompt),),
        positions=positions,
        window=window,
        deadline=deadline,
        tokens_left=request.max_tokens,
        beams=request.num_beams,
        admitted=admitted,
    )


def classification_job(
    inputs: Sequence[InputRow],
    manifest: Manifest,
    lane: LaneKey,
    deliver: Deliver,
    deadline: Deadline | None = None,
    choices: tuple[int, ...] = (),
) -> Job:
    """Rows to classify, of which a text may be padded to the length of others."""
    rows = [one.row for one in inputs]
    return Job(
        lane=lane,
        work=Classification(rows, deliver),
        lengths=tuple([row_length(row, manifest) for row in rows]),
        may_pad=manifest.input.kind == "text",
        deadline=deadline,
        choices=choices,
    )


def _kind(request: GenerationRequest) -> Kind:
    return "search" if request.num_beams > 1 else "generate"


# Waiting for the engine.


TextEvent = tuple[int, Event]  # the number of a text, and an event of it


class EventQueue:
    """Events for one request. `deliver` is called on the event loop's thread."""

    def __init__(self) -> None:
        self._events: list[TextEvent] = []
        self.gone = False  # the client has disconnected
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, index: int, event: Event) -> None:
        self._events.append((index, event))
        self._notify()

    def leave(self) -> None:
        """The client has disconnected."""
        self.gone = True
        self._notify()

    async def take(self) -> list[TextEvent]:
        """All events that have arrived, at least one; ClientGone after a disconnect."""
        while not self._events and not self.gone:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.gone:
            raise ClientGone
        events, self._events = self._events, []
        return events

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _tokens(job: Job) -> int:
    """The tokens that a job reads, and generates at most, over all beams."""
    return sum(job.lengths) + job.tokens_left * job.beams


# Server-sent events: an answer in pieces, then exactly one terminal event.


# Events written at once. Each takes up to 0.2 ms, with the most logprobs.
_EVENTS = 64
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventStream(Response):
    """Sends events of so many texts, until all have ended or one failed; ClientGone after a
    disconnect.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        texts: int,
        first: Sequence[TextEvent],
        events: EventQueue,
        work: AsyncExitStack,
        write: Callable[[Sequence[TextEvent]], bytes],
        headers: dict[str, str],
    ) -> None:
        """`work` ends with the stream; `first` are the events that have arrived already."""
        super().__init__(headers=HEADERS | headers)
        del self.headers["content-length"]
        self._texts = texts
        self._first = first
        self._queue = events
        self._work = work
        self._write_events = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE_KEY]
        async with self._work:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            events, left = self._first, self._texts
            while True:
                # Events that arrived together are sent together, but only so many at a time that
                # other requests get their turn.
                some, events = events[:_EVENTS], events[_EVENTS:]
                body = self._write_events(some)
                ends = [event for _, event in some if not isinstance(event, TokenEvent)]
                failed = [event.error for event in ends if isinstance(event, FailedEvent)]
                if failed:
                    exchange.fail(failed[0])
                left = 0 if failed else left - len(ends)
                await send({"type": "http.response.body", "body": body, "more_body": left > 0})
                if not left:
                    return
                if events:
                    await asyncio.sleep(0)
                else:
                    events = await self._queue.take()


def event_of(data: Mapping[str, object], name: bytes = b"") -> bytes:
    """An event with this JSON, which has no line breaks that would end it early."""
    return name + b"data: " + to_json(data) + b"\n\n"


# Helpers that several routes share.


def answer(body: BaseModel | Mapping[str, object], *headers: tuple[bytes, bytes]) -> Response:
    """A 200 with this body; optional fields without a value are left out."""
    text = body.model_dump_json().encode() if isinstance(body, BaseModel) else to_json(body)
    return ReadyAnswer(text, *headers)


def problems(
    model: type[BaseModel] = ErrorResponse, **reasons: str
) -> dict[int | str, dict[str, Any]]:
    """The documentation of error responses: `problems(e404="...")`."""
    return {
        int(code[1:]): {"model": model, "description": about} for code, about in reasons.items()
    }


def takes(schema: type[BaseModel], required: bool = True) -> dict[str, Any]:
    """The documentation of a body that the route reads itself."""
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    content = {"application/json": {"schema": reference}}
    return {"requestBody": {"required": required, "content": content}}


RUN_PROBLEMS = problems(
    e400="The body is not valid JSON.",
    e403="A web page of another origin sent the request, or the API key forbids it.",
    e404="No model with this name is served.",
    e408="The body did not arrive in time.",
    e413="The body is too large.",
    e415="The body is packed in a way that is not known.",
    e422="A field is unknown, missing, of the wrong type, or asks for something impossible; "
    "`param` names it.",
    e429="The queue is full, or too long for `deadline_ms`. `Retry-After` and `retry-after-ms` "
    "say when to try again.",
    e503="The server is shutting down, or the model failed.",
    e504="The request was accepted, but `deadline_ms` passed before the answer was complete.",
)


@dataclass(slots=True)
class Submission:
    """A request in the engine: its model, what was decided for it, and how it runs."""

    exchange: Exchange
    engine: Engine
    served: Served
    decision: Decision  # which steps serve it, or from which the server may choose
    deadline: Deadline | None  # counted from the arrival of the request
    requests: Sequence[GenerationRequest] = ()  # the texts to generate

    @classmethod
    def of(
        cls, exchange: Exchange, engine: Engine, served: Served, asked: BudgetFields
    ) -> "Submission":
        """A submission to this model, with the budget that was asked."""
        # Counted until the request ends, even if another model replaces it.
        served.users += 1
        exchange.served.append(served)
        exchange.model = served.name
        most = None if exchange.holder is None else exchange.holder.key.max_steps
        decision = decide_within(asked.budget_request, served.manifest, most)
        deadline = None
        if asked.deadline_ms is not None:
            deadline = Deadline(exchange.arrived_s, asked.deadline_ms / 1000)
        return cls(exchange, engine, served, decision, deadline)

    def timing(self, span: Span) -> Timing:
        """Where the time of the request went."""
        self.exchange.computed_s = span.ended_s
        return {
            "queue_ms": round(span.queue_ms, 3),
            "compute_ms": round(span.compute_ms, 3),
            "total_ms": round((self.engine.clock() - self.exchange.arrived_s) * 1000, 3),
        }

    def _note(self, decision: Decision) -> None:
        """Record which step count serves the request, and why."""
        steps, reason = decision.steps, decision.reason
        self.exchange.steps, self.exchange.reason = steps, reason
        self.engine.metrics.decisions.labels(self.served.name, reason, str(steps)).inc()
        if reason == "load":
            self.engine.metrics.degraded.labels(self.served.name).inc()

    @contextmanager
    def _running(self, jobs: Sequence[Job], events: EventQueue) -> Iterator[None]:
        """These jobs are in the engine: all of them, or none. Leaving early cancels them."""
        exchange, holder = self.exchange, self.exchange.holder
        for job in jobs:
            job.request_id = exchange.id
        if holder is None:
            self.engine.submit(*jobs)
        else:
            tokens = sum(map(_tokens, jobs))
            holder.spend_tokens(tokens)
            try:
                self.engine.submit(*jobs)
            except BaseException:
                holder.return_tokens(tokens)
                raise
        exchange.jobs.extend(jobs)
        unwatch = exchange.watch(events.leave)
        timer = None
        # The engine checks deadlines between its calls; this timer works even while a call is
        # stuck.
        if self.deadline is not None:
            left_s = max(0.0, self.deadline.ends_s - self.engine.clock())
            timer = asyncio.get_running_loop().call_later(left_s, self.engine.lapse, *jobs)
        left = False
        try:
            yield
        except (ClientGone, asyncio.CancelledError):  # the latter behind another server than ours
            left = True
            raise
        finally:
            if timer is not None:
                timer.cancel()
            unwatch()
            cancelled = [self.engine.cancel(job) for job in jobs]
            if (left or events.gone) and any(cancelled):
                self.engine.metrics.cancelled.inc()
            if holder is not None:  # tokens that were reserved and not generated
                holder.return_tokens(sum(job.tokens_left * job.beams for job in jobs))

    # Classification.

    async def classify(
        self,
        reader: Reader,
        rows: int,
        characters: int | None,
        read: Callable[[], list[InputRow]],
        traced: bool = False,
        embeds: bool = False,
    ) -> tuple[list[InputRow], ClassifiedEvent]:
        """Read so many rows, and classify or embed them; raises the error if that fails.

        Rows that the queue leaves no time for are refused before they are read.
        """
        lane, manifest, until = self._lane(), self.served.manifest, self.deadline
        if traced or embeds:
            lane = lane._replace(traced=traced, embeds=embeds)
        if self.deadline is not None:
            choices = self.decision.choices
            least = choices[0].steps if choices else self.decision.steps
            shortest, longest = (
                (length(manifest),) * rows for length in (least_length, greatest_length)
            )
            try:
                self.engine.check_early(lane, least, shortest, longest, self.deadline)
            except ImpossibleDeadline:
                if shortest == longest:
                    raise
                until = None  # read all the same: the least time to name depends on the lengths
        inputs = await reader.read(self.exchange, characters, until, read)
        del read  # it may hold pictures and lists of numbers far larger than their rows
        events = EventQueue()
        job = classification_job(
            inputs,
            manifest,
            lane,
            partial(events.deliver, 0),
            self.deadline,
            self.decision.step_choices,
        )
        with self._running((job,), events):
            _, event = (await events.take())[0]
        if isinstance(event, FailedEvent):
            raise event.error
        assert isinstance(event, ClassifiedEvent)
        self._note(self.decision.served_at(min(event.steps)))
        if self.decision.threshold is not None:  # rows that were sure stopped before these steps
            self.exchange.steps = min(one.steps for one in event.spent)
        return inputs, event

    def _lane(self) -> LaneKey:
        """Rows with exact steps have a lane of their own; the others share one."""
        served, decision = self.served, self.decision
        if decision.choices:
            return LaneKey(served.key, "classify", served.manifest.full_steps, late=True)
        return LaneKey(served.key, "classify", decision.steps, decision.threshold)

    # Generation.

    async def write(
        self,
        reader: Reader,
        asked: GenerateRequest,
        texts: int,
        characters: int | None,
        read: Callable[[], list[list[int]]],
    ) -> None:
        """Read so many prompts, of which each is to be continued or translated."""
        max_tokens = asked.limit(reader.settings.max_tokens)
        check_size(texts, max_tokens, asked.logprobs, reader.settings, texts_param="inputs")
        check_beams(asked, self.served)
        prompts = await reader.read(self.exchange, characters, self.deadline, read)
        seed = drawn_seed() if asked.seed is None else asked.seed
        self.generate(
            [
                generation_request(
                    asked,
                    self.served,
                    prompt,
                    max_tokens=max_tokens,
                    seed=seed + place,  # so that equal prompts are continued differently
                    logprobs=asked.logprobs,
                    stream=asked.stream,
                    num_beams=asked.num_beams,
                )
                for place, prompt in enumerate(prompts)
            ]
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> None:
        """These texts are to be generated. If the server chooses the step count, it does so now."""
        self.requests = requests
        if len(self.decision.choices) > 1:
            lengths, first = [len(one.prompt) for one in requests], requests[0]
            steps = self.engine.steps_for(
                LaneKey(self.served.key, _kind(first), self.decision.steps),
                self.decision.step_choices,
                GenerationSize(
                    *(max(lengths), first.max_tokens, len(requests), first.num_beams),
                    *(_window(first, self.served), sum(lengths)),
                ),
                self.deadline,
            )
            self.decision = self.decision.served_at(steps)

    @contextmanager
    def _generating(self) -> Iterator[tuple[list[Job], EventQueue]]:
        events = EventQueue()
        jobs = [
            generation_job(
                request,
                self.served,
                self.decision.steps,
                partial(events.deliver, index),
                self.deadline,
                admitted=len(self.decision.choices) > 1,
            )
            for index, request in enumerate(self.requests)
        ]
        with self._running(jobs, events):
            self._note(self.decision)
            yield jobs, events

    async def ends(self) -> list[GeneratedEvent]:
        """Generate the texts; raises the error of the first one that failed."""
        ends: dict[int, GeneratedEvent] = {}
        with self._generating() as (jobs, events):
            while len(ends) < len(jobs):
                for index, event in await events.take():
                    if isinstance(event, FailedEvent):
                        raise event.error
                    assert isinstance(event, GeneratedEvent)
                    ends[index] = event
        return [ends[index] for index in range(len(ends))]

    async def stream(self, write: Callable[[Sequence[TextEvent]], bytes]) -> Response:
        """Generate the texts as a stream, once its first event is there."""
        async with AsyncExitStack() as work:
            jobs, events = work.enter_context(self._generating())
            first = await events.take()
            _, event = first[0]
            if isinstance(event, FailedEvent):  # so that it gets its own status
                raise event.error
            stream = work.pop_all()
        job = min(jobs, key=lambda job: math.inf if job.started_s is None else job.started_s)
        assert job.started_s is not None
        queue_ms = round((job.started_s - job.queued_s) * 1000, 3)
        headers = {"server-timing": f"queue;dur={queue_ms}"}  # what is known when a stream starts
        return EventStream(len(jobs), first, events, stream, write, headers)


def check_size(
    texts: int,
    max_tokens: int,
    logprobs: int | None,
    settings: Settings,
    param: str = "max_tokens",
    texts_param: str = "n",
) -> None:
    """InvalidField if an answer could be larger than the server allows, or its texts never queued.

    One text without log-probabilities is limited by max_tokens alone.
    """
    if max_tokens > settings.max_tokens:
        raise InvalidField(
            f"{param} is {max_tokens}, but this server writes at most {settings.max_tokens}: send "
            "less",
            param=param,
        )
    if texts > settings.queue_limit:
        raise InvalidField(
            f"this asks for {texts} texts, but the queue of this server holds "
            f"{settings.queue_limit}: send fewer in one request",
            param=texts_param,
        )
    if texts == 1 and logprobs is None:
        return
    alternatives = logprobs or 0
    asked = texts * max_tokens * (1 + alternatives)
    if asked > settings.max_answer_tokens:
        lower = [param, *(["the number of texts"] if texts > 1 else [])]
        lower += ["the number of logprobs"] if alternatives else []
        raise InvalidField(
            f"this asks for {asked} tokens, {texts} texts x {max_tokens} tokens x "
            f"{1 + alternatives} with the logprobs of each, but an answer of this server has at "
            f"most {settings.max_answer_tokens}: lower {' or '.join(lower)}",
            param=param,
        )


def entries_of(event: GeneratedEvent) -> int:
    """How many log-probabilities there are to write."""
    return len(event.logprobs) * (1 + len(event.logprobs[0].top)) if event.logprobs else 0


# Classification, for any protocol.


def check_count(inputs: Sequence[Input], max_inputs: int) -> None:
    """Unprocessable above the server's limit."""
    if len(inputs) > max_inputs:
        raise Unprocessable(
            f"input has {len(inputs)} items, but this server takes at most {max_inputs} at once: "
            "send several requests",
            param="input",
        )


def ranked(scores: Sequence[float]) -> list[int]:
    """Indices of the labels, the most likely first."""
    return sorted(range(len(scores)), key=scores.__getitem__, reverse=True)


def token_labels(tags: Tags, one: InputRow, manifest: Manifest) -> list[TokenLabel]:
    """The labelled parts of the text. Tokens inside a word have no entry."""
    labels = manifest.labels or ()
    return [
        {
            "text": one.text[start:end],
            "start": start,
            "end": end,
            "label": labels[label],
            "score": score,
        }
        for (start, end), label, score in zip(one.spans, tags.labels, tags.scores, strict=True)
        if start < end
    ]


def filled(tags: Tags, one: InputRow, manifest: Manifest) -> str:
    """The text with each character replaced by its label."""
    labels, text = manifest.labels or (), list(one.text)
    for (start, _), label in zip(one.spans, tags.labels, strict=True):
        text[start] = labels[label]
    return "".join(text)


# Large answers. Their JSON is written in pieces on another thread while it is sent, so that only
# one piece of it is in memory.


# Answers with at most this many list entries are written on the event loop, which takes a few
# milliseconds.
FEW_ENTRIES = 2048
_SLICE = 64  # items written together
PIECE_BYTES = 2**16


def written(value: object) -> Iterator[bytes]:
    """The JSON of this value, in parts of any size. Items of an iterator are made as it goes."""
    if isinstance(value, Iterator):
        before = b"["
        while some := [*islice(value, _SLICE)]:
            yield before + to_json(some)[1:-1]
            before = b","
        yield b"]" if before == b"," else b"[]"
    elif isinstance(value, Mapping):
        before = b"{"
        for key, member in value.items():
            yield before + to_json(key) + b":"
            yield from written(member)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list):
        before = b"["
        for item in value:
            yield before
            yield from written(item)
            before = b","
        yield b"]" if value else b"[]"
    else:
        yield to_json(value)


def answer_of(body: Mapping[str, object], entries: int, *headers: tuple[bytes, bytes]) -> Response:
    """A 200 with this body, whose iterators have `entries` items together."""
    if entries <= FEW_ENTRIES:
        return ReadyAnswer(b"".join(written(body)), *headers)
    return PiecewiseAnswer(body, *headers)


@final
class PiecewiseAnswer(Response):
    """A 200 whose JSON is written on another thread while it is sent."""

    def __init__(self, body: Mapping[str, object], *headers: tuple[bytes, bytes]) -> None:
        super().__init__(media_type="application/json")
        del self.headers["content-length"]
        self.raw_headers += headers
        self._parts = written(body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE_KEY]
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while not exchange.gone:
            piece = await asyncio.to_thread(self._piece)
            await send({"type": "http.response.body", "body": piece, "more_body": bool(piece)})
            if not piece:
                return
        raise ClientGone

    def _piece(self) -> bytes:
        """The next piece; empty at the end."""
        parts: list[bytes] = []
        size = 0
        for part in self._parts:
            parts.append(part)
            size += len(part)
            if size >= PIECE_BYTES:
                break
        return b"".join(parts)
