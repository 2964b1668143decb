"""Bodies of requests and answers: the fields that dialects share, and how bodies are read.

Every problem becomes an error that names the field and says what to send instead. Answers that
every request makes are typed dictionaries: they are several times faster to make and write than
pydantic models.
"""

import asyncio
import gc
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, Self, TypeVar, final, get_args, get_origin
from urllib.parse import parse_qsl

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
)
from pydantic.config import JsonDict
from pydantic_core import ErrorDetails, from_json
from typing_extensions import TypedDict

from serve.budget import BudgetRequest, Decision, Reason
from serve.bundle import Method, Metric
from serve.engine.engine import Engine
from serve.engine.job import Deadline, Spent, Unread
from serve.engine.writing import MAX_SEED
from serve.errors import (
    BadRequest,
    DeadlineLapsed,
    InvalidField,
    PayloadTooLarge,
    QueueFull,
    RequestTimeout,
    ServeError,
    UnsupportedEncoding,
)
from serve.exchange import ClientGone, Exchange
from serve.inputs.rows import MAX_INPUTS, Items, Text
from serve.settings import Settings
from stepdial import nearest

FINISH = (
    "`stop`: a stop string was reached, or the model ended its text. `length`: max_tokens were "
    "generated."
)
METRIC = "`loss` (nats per token, lower is better), `accuracy`, or `bleu` (0 to 100)."


class Answer(BaseModel):
    """A part of a response."""

    model_config = ConfigDict(frozen=True)


class Expected(TypedDict):
    """Measured quality of the step count that was used, and of the full step count."""

    metric: Annotated[Metric, Field(description=METRIC)]
    value: Annotated[
        float, Field(description="Quality at the steps that were used, measured on held-out data.")
    ]
    full_value: Annotated[
        float, Field(description="Quality at the full step count, measured on the same data.")
    ]


class Budget(TypedDict):
    """The work that was done for the answer."""

    steps: Annotated[int, Field(description="Steps taken.")]
    method: Annotated[Method, Field(description="Integration method of a step.")]
    nfe: Annotated[
        int,
        Field(description="Passes through the model's repeated blocks: the true cost."),
    ]
    reason: Annotated[
        Reason,
        Field(
            description="Why this step count: `exact` (the request set `steps`), `effort`, "
            "`disagreement` (`max_disagreement`), `deadline` (`deadline_ms`), "
            "`load` (fewer than usual, because the server was busy) or `default`."
        ),
    ]
    full_steps: Annotated[int, Field(description="The model's largest step count.")]
    expected: Annotated[
        Expected,
        Field(
            description="Measured quality at these steps. For an early answer: the quality at "
            "full steps, from which it differs at most as often as "
            "`max_disagreement` says."
        ),
    ]
    max_disagreement: NotRequired[
        Annotated[
            float,
            Field(
                description="Certified level that was applied: the largest share of answers "
                "that differ from those at full steps. Left out if no answer could "
                "stop early."
            ),
        ]
    ]


def budget_of(decision: Decision, spent: Spent | None = None) -> Budget:
    """The budget of this decision; `spent` if the row may have taken other than its rung has."""
    rung, full = decision.rung, decision.full
    steps, nfe = spent or (rung.steps, rung.nfe)
    budget: Budget = {
        "steps": steps,
        "method": rung.method,
        "nfe": nfe,
        "reason": decision.reason,
        "full_steps": full.steps,
        "expected": {
            "metric": rung.quality.metric,
            "value": rung.quality.value,
            "full_value": full.quality.value,
        },
    }
    if decision.level is not None:
        budget["max_disagreement"] = decision.level.max_disagreement
    return budget


QueueMs = Annotated[float, Field(description="Waiting in the queue, until the first model call.")]
ComputeMs = Annotated[
    float, Field(description="From the start of the first model call to the end of the last.")
]


class Timing(TypedDict):
    """Where the time went, in milliseconds."""

    queue_ms: QueueMs
    compute_ms: ComputeMs
    total_ms: Annotated[float, Field(description="From the arrival of the request to this answer.")]


def server_timing(timing: Timing) -> tuple[bytes, bytes]:
    """The Server-Timing header, which browsers show."""
    queue_ms, compute_ms, total_ms = timing.values()
    said = f"queue;dur={queue_ms}, compute;dur={compute_ms}, total;dur={total_ms}"
    return b"server-timing", said.encode()


class TokenLabel(TypedDict):
    """A part of the text and its label: a character, or a word between spaces."""

    text: Annotated[
        str, Field(description="The character or word. A word has the label of its first token.")
    ]
    start: Annotated[
        int, Field(description="Start in the input, in characters (Unicode code points).")
    ]
    end: Annotated[int, Field(description="End in the input: the index behind its last character.")]
    label: Annotated[str, Field(description="Most likely label.")]
    score: Annotated[float, Field(description="Probability that the model gives this label.")]


class Usage(Answer):
    """Tokens read and written."""

    prompt_tokens: int = Field(description="Tokens in the prompt.")
    completion_tokens: int = Field(description="Tokens in the answer.")
    total_tokens: int = Field(description="Sum of both.")

    @classmethod
    def of(cls, read: int, written: int) -> Self:
        return cls(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)


class Health(Answer):
    """The server is healthy. If not, the answer is an error."""

    status: str = Field(description="`live` or `ready`.")


class Problem(BaseModel):
    """What went wrong, and what to do about it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    code: str = Field(description="Error code for programs; it does not change between releases.")
    message: str = Field(description="Message for people: what is wrong and what to do.")
    param: str | None = Field(description="The field that caused the error, if one did.")


class ErrorResponse(Answer):
    """The body of every error."""

    error: Problem = Field(description="What went wrong.")


class OpenAIProblem(Problem):
    """What went wrong, in OpenAI's format."""

    type: str = Field(description="Type of the error, such as `invalid_request_error`.")


class OpenAIError(Answer):
    """The body of every error, and the last event of a stream that failed."""

    error: OpenAIProblem = Field(description="What went wrong.")


# Request fields.


MAX_LOGPROBS = 5
MAX_BEAMS = 8
DEFAULT_MAX_TOKENS = 128
MAX_DEADLINE_MS = 3_600_000.0

Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
# Fields of several protocols that generate.
Stops = Annotated[
    Stop | Annotated[list[Stop], Field(max_length=4)] | None,
    Field(
        description="A stop string, or up to 4. The answer ends before the first one that occurs."
    ),
]
Seed = Annotated[
    int | None,
    Field(
        ge=-MAX_SEED - 1,
        le=MAX_SEED,
        description="The same seed and steps give the same answer. If left out, a random seed is "
        "used and returned. A negative one counts, and is returned, as itself plus 2^63.",
    ),
]
TopP = Annotated[
    float | None,
    Field(
        ge=0.0,
        le=1.0,
        description="Sample only from the most likely tokens that together have this "
        "probability, after temperature and top_k. 0: the most likely one. Default: 1.",
    ),
]
Logprobs = Annotated[
    int | None,
    Field(
        ge=0,
        le=MAX_LOGPROBS,
        description="Return the log-probability of each token, and of this many of the most "
        "likely tokens. They are the model's own, before temperature, top_k and top_p.",
    ),
]

_EXAMPLES_CLASSIFY: list[JsonDict] = [
    {"input": "A film that stays with you.", "steps": 2},
    {"model": "logic", "input": "..3.6..5...4..2.5......3.6..1....4..", "steps": 8, "trace": True},
    {"input": {"image": [[0, 64, 255], [0, 128, 255], [0, 64, 255]]}, "top_k": 3},
    {"input": {"image": "data:image/png;base64,iVBORw0KGgo..."}, "effort": "low"},
    {"input": {"points": [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.0, 0.5, 0.5]]}},
]
_EXAMPLES_GENERATE: list[JsonDict] = [
    {"prompt": "ROMEO:", "max_tokens": 64, "steps": 4, "seed": 7},
    {"prompt": "Ein Hund läuft über den Strand.", "num_beams": 4},
]


def whole(value: Any) -> Any:
    """JSON has only numbers: 4.0 is the integer 4, and some languages write it so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class BudgetFields(BaseModel):
    """How much work a request should get. Without any of these fields: the model's default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    model: str | None = Field(
        None,
        max_length=200,
        description="Name of the model. Default: the first served model with this task.",
    )
    steps: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="Use exactly this many steps, which must be a step count of the model. The "
        "server never changes it. Cannot be combined with effort.",
    )
    effort: Literal["low", "medium", "high", "max"] | None = Field(
        None,
        description="A named step count. Every model takes all four words: one that the model "
        "does not name means the nearest one that it does. Cannot be combined with steps.",
    )
    deadline_ms: float | None = Field(
        None,
        gt=0,
        le=MAX_DEADLINE_MS,
        description="Time for the whole answer, counted from the arrival of the request. The "
        "server uses the most steps predicted to finish in time. 422 if even an "
        "idle server would be too slow, 429 if the queue is too long, 504 if the "
        "time passes after the request was accepted. steps or effort, if sent, are "
        "kept.",
    )
    min_steps: int | None = Field(
        None, ge=1, le=2**31 - 1, description="Smallest step count that the server may choose."
    )
    max_steps: int | None = Field(
        None, ge=1, le=2**31 - 1, description="Largest step count that the server may choose."
    )
    max_disagreement: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Stop early when the answer is certain enough: the largest share of answers "
        "that may differ from those at full steps. Only to classify, with "
        "models that were calibrated for it. Cannot be combined with steps or effort.",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        return whole(value)

    @property
    def budget_request(self) -> BudgetRequest:
        return BudgetRequest(
            self.steps,
            self.effort,
            self.max_disagreement,
            self.deadline_ms,
            self.min_steps,
            self.max_steps,
        )


class ClassifyRequest(BudgetFields):
    """Texts, images or clouds of points to label."""

    model_config = ConfigDict(json_schema_extra={"examples": [*_EXAMPLES_CLASSIFY]})

    input: Items = Field(
        description="A text, an image or a cloud of points, as `input` of /v1/models says for "
        f"the model; or a list of up to {MAX_INPUTS}, each with a result of its own. "
        "Without `model`, the first served model for this kind of input answers."
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description="How many labels to return with their scores, at most the number of labels "
        "of the model. Default: up to 5. Not for a model that labels tokens, which "
        "gives one label per token.",
    )
    trace: bool | None = Field(
        False,
        description="Also return what the model would have answered after each step. Only for "
        "models that the server runs step by step.",
    )
    truncate: bool | None = Field(
        True,
        description="Cut a text that is too long for the model, as in training. If false, such "
        "a text gets 422. No effect on images and points.",
    )


class SamplingFields(BudgetFields):
    """How to choose tokens, in every protocol that generates."""

    temperature: float | None = Field(
        None,
        ge=0.0,
        le=2.0,
        description="0 always takes the most likely token; higher values are more varied. "
        "Default: 1 to continue a prompt, 0 to translate.",
    )
    top_k: int | None = Field(
        None, ge=1, description="Sample only from the k most likely tokens, after temperature."
    )
    top_p: TopP = None
    seed: Seed = None
    stop: Stops = None

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class GenerateRequest(SamplingFields):
    """A prompt to continue, or a text to translate."""

    model_config = ConfigDict(json_schema_extra={"examples": [*_EXAMPLES_GENERATE]})

    prompt: Text = Field(
        description="The text to continue or translate. It must fit the model's window, in "
        "tokens; a text to translate is never cut. When prompt and answer outgrow "
        "the window, generation goes on from the last half of the window."
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description=f"Most tokens to generate. Default: {DEFAULT_MAX_TOKENS}; the server's "
        "--max-tokens is the limit. A translation also ends at the model's own "
        "limit, `target_max_tokens`.",
    )
    num_beams: int | None = Field(
        None,
        ge=1,
        le=MAX_BEAMS,
        description="Beam search, for translation only: number of beams. The answer is the beam "
        "with the highest mean log-probability per token; 1 is greedy. Not random, "
        "so temperature must be 0 or left out. With `stream` the answer comes in "
        "one piece.",
    )
    top_p: TopP = 1.0
    stream: bool | None = Field(
        False,
        description="Stream each token as a server-sent event, then exactly one event `done` or "
        "`error`.",
    )
    logprobs: Logprobs = None

    def limit(self, most: int) -> int:
        """Most tokens to generate: as asked, else the default, at most the server's limit."""
        return min(DEFAULT_MAX_TOKENS, most) if self.max_tokens is None else self.max_tokens


# Error messages for fields.


_WORDS = {
    "bool_type": "must be true or false",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be an integer",
    "int_type": "must be an integer",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "model_type": "must be an object",
    "string_too_long": "is too long: send at most {max_length} characters",
    "string_too_short": "is empty: send some text",
    "string_type": "must be a string",
    "too_long": "has {actual_length} items: send at most {max_length}",
    "too_short": "is an empty list: send at least {min_length} item",
}
_HALF = (
    "a \\u escape is cut short, or is one half of a character (\\ud800 to \\udfff): send both "
    "halves, or the character itself in UTF-8"
)
_NOT_UTF8 = "it is not in UTF-8, or begins with a byte order mark: save it as UTF-8 without one"
_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")  # of UTF-8 and UTF-16


def describe_problem(problem: ErrorDetails) -> str:
    """The message after the name of the field."""
    words = _WORDS.get(problem["type"])
    if words is None:
        return problem["msg"][0].lower() + problem["msg"][1:]
    return words.format_map(problem.get("ctx", {}))


def describe_json_problem(body: bytes, reason: str) -> str:
    """Why a body is not valid JSON."""
    if body.startswith(_MARKS) or "invalid unicode" in reason:
        return f"{_NOT_UTF8} ({reason})"
    return f"{_HALF} ({reason})" if "hex escape" in reason or "surrogate" in reason else reason


# Bodies and inputs are read on the event loop if that is quick, else on a thread. Large bodies wait
# to be checked, and pictures and long texts wait to be read, one request at a time, so that many
# need the memory of one. Waiting here counts as waiting in the server's queue: the same limits
# hold, and a request leaves at its deadline or when its client disconnects.


T = TypeVar("T")

# Longer texts are encoded on the thread.
LONG_CHARACTERS = 4_000
# Larger bodies are checked on the thread; smaller ones take the event loop 2 ms at most.
LARGE_BODY_BYTES = 2**15
# Memory of all that waits here, unless a single request is larger.
UNREAD_BYTES = 2**28
# Weight of the newest time in the moving average.
_NEWEST = 0.2
_TRY_AGAIN_S = 1.0


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for the thread, or runs on it."""

    work: Callable[[], Any]
    weight: int
    outcome: "asyncio.Future[Any]"


@final
class _ReaderThread:
    """A thread, and the requests that wait for it."""

    def __init__(self, name: str, unread: Unread) -> None:
        self._unread = unread  # of all threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._turns: deque[_Waiting] = deque()
        self._current: _Waiting | None = None
        self._usual_s = 0.0

    @property
    def weight(self) -> int:
        """Bytes of all requests here."""
        current = 0 if self._current is None else self._current.weight
        return current + sum(turn.weight for turn in self._turns)

    @property
    def wait_s(self) -> float:
        """How long all requests here will take."""
        return (len(self._turns) + (self._current is not None)) * self._usual_s

    def add(self, turn: _Waiting) -> None:
        self._turns.append(turn)
        self._unread.waiting += 1
        self._begin()

    def drop(self, turn: _Waiting) -> None:
        """Stop waiting for this request. If it runs already, its result is ignored."""
        if turn in self._turns:  # the error of `remove` would hold the whole body as text
            self._turns.remove(turn)
            self._unread.waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        if self._current is not None or not self._turns:
            return
        turn = self._current = self._turns.popleft()
        self._unread.waiting -= 1
        self._unread.running += 1
        loop, began_s = asyncio.get_running_loop(), time.perf_counter()

        def end(done: "Future[Any]") -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self._end, turn, done, time.perf_counter() - began_s)

        try:
            running = self._thread.submit(turn.work)
        except RuntimeError:  # the system allows no more threads
            self._current = None
            self._unread.running -= 1
            raise
        running.add_done_callback(end)

    def _end(self, turn: _Waiting, done: "Future[Any]", seconds: float) -> None:
        self._current = None
        self._unread.running -= 1
        self._usual_s += _NEWEST * (seconds - self._usual_s)
        if not turn.outcome.done() and not done.cancelled():
            error = done.exception()
            if error is None:
                turn.outcome.set_result(done.result())
            else:
                turn.outcome.set_exception(error)
        self._begin()


@final
class Reader:
    """Reads bodies and inputs for all routes of an application."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.settings = settings
        self._engine = engine
        self._checks = _ReaderThread("check", engine.unread)
        self._reads = _ReaderThread("read", engine.unread)
        self._arriving_bytes = 0
        engine.unread.wait_s = lambda: max(self._checks.wait_s, self._reads.wait_s)

    @contextmanager
    def receiving(self) -> Iterator[Callable[[int], None]]:
        """Counts the bytes of a body while it arrives; QueueFull if all bodies have too many."""
        own_bytes = 0

        def count(size: int) -> None:
            nonlocal own_bytes
            others_bytes = self._arriving_bytes - own_bytes
            own_bytes += size
            self._arriving_bytes += size
            if others_bytes and self._arriving_bytes > UNREAD_BYTES:
                raise QueueFull(
                    f"the bodies that are arriving fill the {UNREAD_BYTES >> 20} MiB that there "
                    "are for them: try again later",
                    retry_after_s=_TRY_AGAIN_S,
                )

        try:
            yield count
        finally:
            self._arriving_bytes -= own_bytes

    async def checked(
        self, exchange: Exchange, body: bytes, work: Callable[[], T], quick: bool = True
    ) -> T:
        """The result of `work` on a body: at once if it is small and `work` is quick then."""
        if quick and len(body) <= LARGE_BODY_BYTES:
            return work()
        return await self._turn(self._checks, exchange, work, len(body), None)

    async def read(
        self,
        exchange: Exchange,
        characters: int | None,
        deadline: Deadline | None,
        work: Callable[[], T],
    ) -> T:
        """The result of `work` on the inputs of a request.

        `characters` is the length of the text to read, None for other inputs.
        """
        if characters is not None and characters <= LONG_CHARACTERS:
            return work()
        return await self._turn(self._reads, exchange, work, exchange.weight, deadline)

    def close(self) -> None:
        """Stop the threads."""
        self._checks.close()
        self._reads.close()

    async def _turn(
        self,
        worker: _ReaderThread,
        exchange: Exchange,
        work: Callable[[], T],
        weight: int,
        deadline: Deadline | None,
    ) -> T:
        self._check_place(worker, weight, deadline)
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        turn = _Waiting(work, weight, outcome)
        worker.add(turn)
        unwatch = exchange.watch(partial(_fail, outcome, ClientGone()))
        timer = None
        if deadline is not None:
            left_s = max(0.0, deadline.ends_s - self._engine.clock())
            timer = loop.call_later(left_s, _fail, outcome, DeadlineLapsed(deadline.given_s))
        try:
            return await outcome
        except DeadlineLapsed:
            self._engine.metrics.deadlines.labels(exchange.model).inc()
            self._engine.metrics.lapsed.labels(exchange.model).inc()
            raise
        except ClientGone:
            self._engine.metrics.cancelled.inc()
            raise
        finally:
            worker.drop(turn)
            unwatch()
            if timer is not None:
                timer.cancel()

    def _check_place(self, worker: _ReaderThread, weight: int, deadline: Deadline | None) -> None:
        """QueueFull, TooBusy or DeadlineLapsed if the request may not wait for this thread."""
        self._engine.check_unread(worker.wait_s, deadline)
        here = self._checks.weight + self._reads.weight
        if here and here + weight > UNREAD_BYTES:
            raise QueueFull(
                f"what waits to be read fills the {UNREAD_BYTES >> 20} MiB that there are for it: "
                "try again later",
                retry_after_s=max(_TRY_AGAIN_S, worker.wait_s),
            )


def _fail(outcome: "asyncio.Future[Any]", error: Exception) -> None:
    if not outcome.done():
        outcome.set_exception(error)


BodyT = TypeVar("BodyT", bound=BaseModel)

MAX_SHOWN = 80
# Per body. The largest documented chat has fewer; more is an attack.
MAX_OBJECTS = 8192
# Per object: more than any documented one has.
MAX_MEMBERS = 64
# One-channel pixels are one list in 4 bytes; more lists than that are an attack.
_BYTES_A_LIST = 4
_FEW_LISTS = 1024
# Strings are skipped one by one only if they may contain braces.
_MAX_STRINGS = 32_768
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
# Memory of the parts of a body as Python objects, at most.
_LIST_BYTES, _ELEMENT_BYTES = 64, 32


async def read_json(exchange: Exchange, schema: type[BodyT], reader: Reader) -> BodyT:
    """The body, checked against the schema, whatever content type the client claims."""
    if exchange.query:
        check_query(exchange.query, schema.model_fields, "the JSON body")
    body = await read_body(exchange, reader)
    return await checked_json(exchange, body, schema, reader, explain)


def check_query(query: bytes, fields: Collection[str], place: str) -> None:
    """Refuse fields of the body behind the `?`. Other names there may be a gateway's."""
    for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name in fields:
            raise InvalidField(f"{name} in the URL is not read: send it in {place}", param=name)


async def checked_json(
    exchange: Exchange,
    body: bytes,
    schema: type[BodyT],
    reader: Reader,
    explain: Callable[[ValidationError, type[BaseModel]], ServeError],
) -> BodyT:
    """A JSON body checked against the schema; `explain` makes the error."""
    # Numbers in lists need more memory than their text. Texts do not, even if they contain commas.
    exchange.weight = len(body) + _LIST_BYTES * body.count(b"[") + _ELEMENT_BYTES * body.count(b",")
    return await reader.checked(exchange, body, partial(parse, body, schema, explain))


def parse(
    body: bytes,
    schema: type[BodyT],
    explain: Callable[[ValidationError, type[BaseModel]], ServeError],
) -> BodyT:
    """JSON checked against the schema; `explain` makes the error."""
    if not body.strip():
        raise BadRequest("the body is empty: send a JSON object")
    _check_parts(body)
    if len(body) <= LARGE_BODY_BYTES or not gc.isenabled():
        return _parsed(body, schema, explain)
    # JSON has no cycles, and looking for them would take most of the time.
    gc.disable()
    try:
        return _parsed(body, schema, explain)
    finally:
        gc.enable()


def _parsed(
    body: bytes,
    schema: type[BodyT],
    explain: Callable[[ValidationError, type[BaseModel]], ServeError],
) -> BodyT:
    try:
        value = from_json(body, cache_strings="none")
    except ValueError as error:
        raise BadRequest(
            f"the body is not JSON that can be read: {describe_json_problem(body, str(error))}"
        ) from None
    if not isinstance(value, dict):
        del value  # a traceback keeps the variables of its frames
        raise InvalidField("the body must be a JSON object")
    try:
        _check_members(value, schema)
        return schema.model_validate(value)
    except ValidationError as error:
        raise explain(error, schema) from None
    finally:
        value.clear()  # for the same reason


def validated(schema: type[BodyT], value: Mapping[str, Any]) -> BodyT:
    """These fields checked against the schema; InvalidField names what is wrong."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise explain(error, schema) from None


def _check_parts(body: bytes) -> None:
    """BadRequest if the body has more objects or lists than any request needs."""
    most_lists = max(_FEW_LISTS, len(body) // _BYTES_A_LIST)
    if body.count(b"{") <= MAX_OBJECTS and body.count(b"[") <= most_lists:
        return
    objects = lists = at = 0
    for number, string in enumerate(_STRING.finditer(body)):
        objects += body.count(b"{", at, string.start())
        lists += body.count(b"[", at, string.start())
        at = string.end()
        if objects > MAX_OBJECTS or lists > most_lists or number >= _MAX_STRINGS:
            break
    else:
        objects += body.count(b"{", at)
        lists += body.count(b"[", at)
        if objects <= MAX_OBJECTS and lists <= most_lists:
            return
    raise BadRequest(
        f"the body is not JSON that can be read: it has more than {MAX_OBJECTS} objects, "
        f"{most_lists} lists or {_MAX_STRINGS} texts, which no request needs; send what the route "
        "documents"
    )


def _check_members(value: dict[str, Any], schema: type[BaseModel]) -> None:
    """InvalidField if an object has more members than any documented one."""
    if len(value) > MAX_MEMBERS:
        unknown = next(name for name in value if name not in schema.model_fields)
        raise InvalidField(
            f"the body has {len(value)} fields, such as {shown(unknown)!r}, but at most "
            f"{len(schema.model_fields)} are known: send those only",
            param=shown(unknown),
        )
    for name, member in value.items():
        _check_inside(member, shown(name))


def _check_inside(value: object, where: str) -> None:
    """The same for objects in a member: it alone, or in a list."""
    if isinstance(value, dict):
        if len(value) > MAX_MEMBERS:
            raise InvalidField(
                f"{where} has {len(value)} members: send at most {MAX_MEMBERS}", param=where
            )
        for name, member in value.items():
            if isinstance(member, dict | list):
                _check_inside(member, f"{where}.{shown(name)}")
    elif isinstance(value, list) and dict in set(map(type, value)):
        for place, item in enumerate(value):
            if isinstance(item, dict):
                _check_inside(item, f"{where}[{place}]")


async def read_body(exchange: Exchange, reader: Reader) -> bytes:
    """The whole body, unpacked; PayloadTooLarge or RequestTimeout beyond the limits."""
    encoding = exchange.headers.get(b"content-encoding", b"").strip().lower()
    if encoding in (b"", b"identity"):
        return await _received(exchange, reader)
    if encoding not in _WINDOW_BITS:
        raise UnsupportedEncoding(
            "the body is compressed in a way that is not known here: send it as gzip, as deflate, "
            "or without content-encoding"
        )
    packed = await _received(exchange, reader)
    unpack, most = partial(_unpacked, packed, encoding), reader.settings.max_body_bytes
    if len(packed) <= LARGE_BODY_BYTES:
        with suppress(PayloadTooLarge):  # it may be a thousand times that: for the thread
            return unpack(min(most, LARGE_BODY_BYTES))
    return await reader.checked(exchange, packed, partial(unpack, most), quick=False)


# zlib's numbers for the two forms.
_WINDOW_BITS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}


def _unpacked(packed: bytes, encoding: bytes, max_bytes: int) -> bytes:
    unpacker = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        body = unpacker.decompress(packed, max_bytes + 1)
    except zlib.error as error:
        raise _not_unpacked(encoding) from error
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    if not unpacker.eof or unpacker.unused_data:
        raise _not_unpacked(encoding)
    return body


def _not_unpacked(encoding: bytes) -> BadRequest:
    return BadRequest(f"the body is not {encoding.decode()}, as content-encoding says: send it so")


async def _received(exchange: Exchange, reader: Reader) -> bytes:
    headers, settings = exchange.headers, reader.settings
    max_bytes = settings.max_body_bytes
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    if exchange.connection is not None and exchange.has_body:
        body = exchange.connection.take_body()
        if body is None:
            raise ClientGone
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        return body
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            with reader.receiving() as count:
                return await _chunks(exchange, max_bytes, count)
    except TimeoutError:
        raise RequestTimeout(
            f"the body did not arrive within {settings.body_timeout_s:g} s: send it at once"
        ) from None


async def _chunks(exchange: Exchange, max_bytes: int, count: Callable[[int], None]) -> bytes:
    assert exchange.receive is not None
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await exchange.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        count(len(chunk))
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the body is larger than {max_bytes} bytes: send less at once", max_bytes=max_bytes
    )


def explain(error: ValidationError, schema: type[BaseModel]) -> ServeError:
    """The error for the first field that is wrong."""
    problems = error.errors(include_url=False, include_input=False)
    first = _worst(problems)
    members = _members(schema, first["loc"])
    if members is not None:
        param = ".".join(shown(str(part)) for part in first["loc"])
        return InvalidField(_sentence(param, [first], members), param=param)
    to_blame = _most_informative(problems, first["loc"][0])
    param = _param(to_blame[0]["loc"])
    unsent = (str(one["loc"][0]) for one in problems if one["type"] == "missing")
    sentence = _sentence(param, to_blame, schema.model_fields, next(unsent, None))
    return InvalidField(sentence, param=param)


def _worst(problems: Sequence[ErrorDetails]) -> ErrorDetails:
    """The first problem; a missing field may have been sent under a wrong name, so that one goes
    first.
    """
    if problems[0]["type"] != "missing":
        return problems[0]
    return next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])


def _members(schema: type[BaseModel], loc: tuple[int | str, ...]) -> Collection[str] | None:
    """If the problem is inside a field that is an object: the names allowed in it."""
    field = schema.model_fields.get(str(loc[0])) if len(loc) > 1 else None
    for kind in () if field is None else (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind.model_fields
        if get_origin(kind) is dict:
            return ()
    return None


def _most_informative(problems: Sequence[ErrorDetails], field: int | str) -> list[ErrorDetails]:
    """The most informative reasons why this field is wrong.

    A field of several types has a reason for each: "must be a string" says little about a list
    whose third item is wrong.
    """
    reasons = [problem for problem in problems if problem["loc"][0] == field]
    inner = [one for one in reasons if any(isinstance(part, int) for part in one["loc"][1:])]
    fitting = [one for one in reasons if not one["type"].endswith("_type")]
    return inner[:1] or fitting or reasons


def _param(loc: tuple[int | str, ...]) -> str:
    """The path to the field. Parts that only name a type are left out."""
    indices = "".join(f"[{part}]" for part in loc[1:] if isinstance(part, int))
    return f"{shown(str(loc[0]))}{indices}"


def _sentence(
    param: str, reasons: Sequence[ErrorDetails], known: Collection[str], missing: str | None = None
) -> str:
    """What is wrong, with the names that are known there, and one that was not sent."""
    first = reasons[0]
    if first["type"] == "extra_forbidden":
        close = nearest(str(first["loc"][-1]), known)
        if close:
            return f"unknown field {param!r}: did you mean {close}?"
        if missing:
            return f"unknown field {param!r}: {missing} is missing, did you mean that?"
        return f"unknown field {param!r}: there are {', '.join(known)}"
    if first["type"] == "missing":
        return f"{param} is missing: send it"
    return f"{param} {', or '.join(dict.fromkeys(map(describe_problem, reasons)))}"


def shown(text: str) -> str:
    """As much of a client's text as a message repeats."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"
