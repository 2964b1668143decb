"""OpenAI's dialect: completions and chats, whole or as streams."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, final

from fastapi import APIRouter
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema
from starlette.requests import Request
from starlette.responses import Response

from serve.api.body import Reader, read_json
from serve.api.fields import (
    DEFAULT_MAX_TOKENS,
    MAX_LOGPROBS,
    Answer,
    Budget,
    BudgetFields,
    Problem,
    Stop,
    Timing,
    Usage,
    budget_of,
    server_timing,
)
from serve.api.submission import (
    RUN_PROBLEMS,
    Each,
    EventStream,
    Manner,
    Order,
    Running,
    Written,
    answer_of,
    check_answer,
    check_max_tokens,
    check_texts,
    deadline_of,
    decide_budget,
    drawn_seed,
    entries_of,
    event_of,
    request_id,
    takes,
    timing,
    wish_in,
)
from serve.budget import Ask, Decision
from serve.bundle import Effort
from serve.catalog import WRITING, Served
from serve.engine.engine import Engine
from serve.engine.job import Event, FailedEvent, GeneratedEvent, Span, TokenEvent
from serve.engine.job import TokenLogprob as EngineLogprob
from serve.engine.sampling import MAX_SEED
from serve.engine.work import Wish
from serve.errors import ImpossibleBudget, InternalError, InvalidField, ServeError, WrongTask
from serve.inputs.chat import Messages
from serve.inputs.values import MAX_TEXTS, Prompts
from serve.middleware import error_body
from serve.settings import Settings

# What clients of OpenAI's API get: every field of every answer, documented.


_FINISH = (
    "`stop`: a stop string came, or a translation was complete; `length`: the most tokens were "
    "written."
)
_WHEN = "When the answer was begun, in Unix seconds."
_MODEL = "The model that answered."
_INDEX = "Number of the answer, from 0: all to the first prompt, then all to the next."
FinishReason = Literal["stop", "length"]


class ChoiceWork(Answer):
    """What one of several answers took."""

    index: int = Field(description=_INDEX)
    seed: int = Field(description="The seed that was used for it.")
    queue_ms: float = Field(description="Waiting for the first call of the model.")
    compute_ms: float = Field(description="From the first call to the end of the last.")


class DialReport(Answer):
    """What this server did: not a part of OpenAI's API."""

    budget: Budget = Field(description="The work that was done, the same for every answer.")
    timing: Timing = Field(description="Where the time of the request went.")
    seed: int = Field(description="The seed of the first answer; send it to get all of them again.")
    choices: list[ChoiceWork] | None = Field(
        default=None,
        exclude_if=lambda choices: choices is None,
        description="What each answer took; left out if there is one.",
    )


class CompletionLogprobs(Answer):
    """How likely the model found the tokens of an answer, each list in their order."""

    tokens: list[str] = Field(description="Their texts; U+FFFD for a part of a character.")
    token_logprobs: list[float] = Field(description="Their log-probabilities.")
    top_logprobs: list[dict[str, float]] = Field(
        description="At each place the likeliest tokens and the one that came, with their "
        "log-probabilities."
    )
    text_offset: list[int] = Field(
        description="Where the text of each begins in the answer, in characters. What a stop "
        "string cut off has offsets beyond its end."
    )


class CompletionChoice(Answer):
    """One answer."""

    index: int = Field(description=_INDEX)
    text: str = Field(description="The answer; with `echo`, behind its prompt.")
    logprobs: CompletionLogprobs | None = Field(description="If asked for.")
    finish_reason: FinishReason = Field(description=_FINISH)


class CompletionResponse(Answer):
    """Texts that continue prompts, or translate them."""

    id: str = Field(description="`cmpl-` and the id of the request.")
    object: Literal["text_completion"] = Field(
        default="text_completion", description="What this is."
    )
    created: int = Field(description=_WHEN)
    model: str = Field(description=_MODEL)
    choices: list[CompletionChoice] = Field(description="The answers.")
    usage: Usage = Field(
        description="Tokens of all prompts and of all that was written, with `best_of` also of "
        "answers that are not returned."
    )
    stepdial: DialReport = Field(description="The steps that were taken.")


class CompletionPiece(Answer):
    """What one chunk adds to an answer."""

    index: int = Field(description=_INDEX)
    text: str = Field(description="Text to append; often that of one token, sometimes empty.")
    logprobs: CompletionLogprobs | None = Field(
        description="Of the token of this chunk, if asked for."
    )
    finish_reason: FinishReason | None = Field(description=f"Null before the end. {_FINISH}")


class CompletionChunk(Answer):
    """The data of one event of a stream; the last is `[DONE]`, or an error."""

    id: str = Field(description="`cmpl-` and the id of the request.")
    object: Literal["text_completion"] = Field(
        default="text_completion", description="What this is."
    )
    created: int = Field(description=_WHEN)
    model: str = Field(description=_MODEL)
    choices: list[CompletionPiece] = Field(description="One; none in a chunk that counts tokens.")
    usage: Usage | None = Field(
        default=None, description="With `include_usage`: null, and the tokens in the last chunk."
    )
    stepdial: DialReport | None = Field(
        default=None,
        exclude_if=lambda report: report is None,
        description="The steps that were taken: in the last chunk.",
    )


class TopLogprob(Answer):
    """A token that could have come."""

    token: str = Field(description="Its text; U+FFFD for a part of a character.")
    logprob: float = Field(description="Its log-probability under the model.")
    bytes: list[int] | None = Field(
        description="The text in UTF-8; null for a part of a character."
    )


class TokenLogprob(TopLogprob):
    """How likely the model found a token of an answer."""

    top_logprobs: list[TopLogprob] = Field(description="The likeliest there, likeliest first.")


class ChatLogprobs(Answer):
    """How likely the model found an answer."""

    content: list[TokenLogprob] = Field(description="Its tokens, in their order.")
    refusal: None = Field(default=None, description="Always null.")


class AssistantMessage(Answer):
    """What the model says."""

    role: Literal["assistant"] = Field(default="assistant", description="Always `assistant`.")
    content: str = Field(description="The answer.")
    refusal: None = Field(default=None, description="Always null.")


class ChatChoice(Answer):
    """One answer."""

    index: int = Field(description="Number of the answer, from 0.")
    message: AssistantMessage = Field(description="The answer.")
    logprobs: ChatLogprobs | None = Field(description="If asked for.")
    finish_reason: FinishReason = Field(description=_FINISH)


class ChatResponse(Answer):
    """Answers to a chat."""

    id: str = Field(description="`chatcmpl-` and the id of the request.")
    object: Literal["chat.completion"] = Field(
        default="chat.completion", description="What this is."
    )
    created: int = Field(description=_WHEN)
    model: str = Field(description=_MODEL)
    choices: list[ChatChoice] = Field(description="The answers.")
    usage: Usage = Field(description="Tokens of the prompt and of all that was written.")
    stepdial: DialReport = Field(description="The steps that were taken.")


class ChatDelta(Answer):
    """What one chunk adds to a message."""

    role: Literal["assistant"] | None = Field(
        default=None,
        exclude_if=lambda role: role is None,
        description="In the first chunk of an answer.",
    )
    content: str | None = Field(
        default=None,
        exclude_if=lambda content: content is None,
        description="Text to append; not in the last chunk of an answer.",
    )


class ChatPiece(Answer):
    """What one chunk adds to an answer."""

    index: int = Field(description="Number of the answer, from 0.")
    delta: ChatDelta = Field(description="What it adds.")
    logprobs: ChatLogprobs | None = Field(description="Of the token of this chunk, if asked for.")
    finish_reason: FinishReason | None = Field(description=f"Null before the end. {_FINISH}")


class ChatChunk(Answer):
    """The data of one event of a stream; the last is `[DONE]`, or an error."""

    id: str = Field(description="`chatcmpl-` and the id of the request.")
    object: Literal["chat.completion.chunk"] = Field(
        default="chat.completion.chunk", description="What this is."
    )
    created: int = Field(description=_WHEN)
    model: str = Field(description=_MODEL)
    choices: list[ChatPiece] = Field(description="One; none in a chunk that counts tokens.")
    usage: Usage | None = Field(
        default=None, description="With `include_usage`: null, and the tokens in the last chunk."
    )
    stepdial: DialReport | None = Field(
        default=None,
        exclude_if=lambda report: report is None,
        description="The steps that were taken: in the last chunk.",
    )


class OpenAIProblem(Problem):
    """What went wrong, in the shape of OpenAI's API."""

    type: str = Field(description="The kind of error, such as `invalid_request_error`.")


class OpenAIError(Answer):
    """Every answer that is not a 200, and the last event of a stream that failed."""

    error: OpenAIProblem = Field(description="What went wrong.")


_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of one answer repeats."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class Tail:
    """What is known at the end."""

    usage: Usage
    report: DialReport


class Shape(Protocol):
    """How answers look. `index` is the number of an answer, None a chunk without one."""

    @property
    def prefix(self) -> str:
        """What ids begin with."""

    def whole(self, head: Head, events: Sequence[GeneratedEvent], tail: Tail) -> dict[str, object]:
        """All of it, as the documented shape has it: not made of that, since it may be large."""

    def opening(self, head: Head, index: int) -> Answer | None:
        """What comes before the first token, if anything does."""

    def piece(self, head: Head, index: int, event: TokenEvent) -> Answer: ...

    def end(
        self,
        head: Head,
        index: int,
        event: GeneratedEvent,
        report: DialReport | None,
    ) -> Answer: ...

    def count(self, head: Head, tail: Tail) -> Answer: ...


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """Of /v1/completions."""

    echoes: Sequence[str]  # what comes before each answer
    logprobs: bool
    prefix: str = "cmpl-"

    def whole(self, head: Head, events: Sequence[GeneratedEvent], tail: Tail) -> dict[str, object]:
        choices: list[dict[str, object]] = [
            {
                "index": index,
                "text": self.echoes[index] + event.text,
                "logprobs": _columns(event.logprobs) if self.logprobs else None,
                "finish_reason": event.finish_reason,
            }
            for index, event in enumerate(events)
        ]
        return _whole("text_completion", head, choices, tail)

    def opening(self, head: Head, index: int) -> CompletionChunk | None:
        echo = self.echoes[index]
        return self._chunk(head, self._piece(index, echo)) if echo else None

    def piece(self, head: Head, index: int, event: TokenEvent) -> CompletionChunk:
        scores = None if event.logprob is None else _legacy(event.logprob)
        return self._chunk(head, self._piece(index, event.text, scores))

    def end(
        self,
        head: Head,
        index: int,
        event: GeneratedEvent,
        report: DialReport | None,
    ) -> CompletionChunk:
        piece = CompletionPiece(
            index=index, text="", logprobs=None, finish_reason=event.finish_reason
        )
        return self._chunk(head, piece, report=report)

    def count(self, head: Head, tail: Tail) -> CompletionChunk:
        return self._chunk(head, usage=tail.usage, report=tail.report)

    def _piece(
        self, index: int, text: str, scores: CompletionLogprobs | None = None
    ) -> CompletionPiece:
        return CompletionPiece(index=index, text=text, logprobs=scores, finish_reason=None)

    def _chunk(
        self,
        head: Head,
        *pieces: CompletionPiece,
        usage: Usage | None = None,
        report: DialReport | None = None,
    ) -> CompletionChunk:
        return CompletionChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[*pieces],
            usage=usage,
            stepdial=report,
        )


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Of /v1/chat/completions."""

    logprobs: bool
    prefix: str = "chatcmpl-"

    def whole(self, head: Head, events: Sequence[GeneratedEvent], tail: Tail) -> dict[str, object]:
        choices: list[dict[str, object]] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": event.text, "refusal": None},
                "logprobs": _content(event.logprobs) if self.logprobs else None,
                "finish_reason": event.finish_reason,
            }
            for index, event in enumerate(events)
        ]
        return _whole("chat.completion", head, choices, tail)

    def opening(self, head: Head, index: int) -> ChatChunk:
        return self._chunk(head, index, ChatDelta(role="assistant", content=""))

    def piece(self, head: Head, index: int, event: TokenEvent) -> ChatChunk:
        scores = None if event.logprob is None else _scores(event.logprob)
        return self._chunk(head, index, ChatDelta(content=event.text), scores)

    def end(
        self,
        head: Head,
        index: int,
        event: GeneratedEvent,
        report: DialReport | None,
    ) -> ChatChunk:
        return self._chunk(head, index, ChatDelta(), None, event.finish_reason, report)

    def count(self, head: Head, tail: Tail) -> ChatChunk:
        return ChatChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[],
            usage=tail.usage,
            stepdial=tail.report,
        )

    def _chunk(
        self,
        head: Head,
        index: int,
        delta: ChatDelta,
        scores: ChatLogprobs | None = None,
        finish_reason: FinishReason | None = None,
        report: DialReport | None = None,
    ) -> ChatChunk:
        piece = ChatPiece(index=index, delta=delta, logprobs=scores, finish_reason=finish_reason)
        return ChatChunk(
            id=head.id, created=head.created, model=head.model, choices=[piece], stepdial=report
        )


def _whole(
    kind: str, head: Head, choices: Sequence[dict[str, object]], tail: Tail
) -> dict[str, object]:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": tail.usage,
        "stepdial": tail.report,
    }


def _columns(logprobs: Sequence[EngineLogprob]) -> dict[str, object]:
    """CompletionLogprobs of a whole answer."""
    return {
        "tokens": Each(one.token for one in logprobs),
        "token_logprobs": Each(one.logprob for one in logprobs),
        "top_logprobs": Each(map(_by_token, logprobs)),
        "text_offset": Each(one.offset for one in logprobs),
    }


def _content(logprobs: Sequence[EngineLogprob]) -> dict[str, object]:
    """ChatLogprobs of a whole answer."""
    return {"content": Each(map(_place, logprobs)), "refusal": None}


def _place(one: EngineLogprob) -> dict[str, object]:
    return _alternative(one.token, one.logprob) | {
        "top_logprobs": [_alternative(token, logprob) for token, logprob in one.top]
    }


def _alternative(token: str, logprob: float) -> dict[str, object]:
    return {"token": token, "logprob": logprob, "bytes": _bytes(token)}


def _legacy(one: EngineLogprob) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[one.token],
        token_logprobs=[one.logprob],
        top_logprobs=[_by_token(one)],
        text_offset=[one.offset],
    )


def _by_token(one: EngineLogprob) -> dict[str, float]:
    """Of tokens that look alike, as parts of characters do, the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in (*one.top, (one.token, one.logprob)):
        found.setdefault(token, logprob)
    return found


def _scores(one: EngineLogprob) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=one.token,
                logprob=one.logprob,
                bytes=_bytes(one.token),
                top_logprobs=[
                    TopLogprob(token=token, logprob=logprob, bytes=_bytes(token))
                    for token, logprob in one.top
                ],
            )
        ]
    )


def _bytes(token: str) -> list[int] | None:
    return None if _PART_OF_A_CHARACTER in token else [*token.encode()]


# What requests in OpenAI's shape share: sampling, streaming, budgets; and what is refused.


EFFORT_OF: dict[str, Effort] = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}


@dataclass(frozen=True, slots=True)
class Only:
    """A field that this server takes only where it asks for nothing."""

    field: str
    neutral: tuple[Any, ...]
    instead: str  # what to do

    def check(self, value: Any) -> Any:
        if value is None or any(_same(value, one) for one in self.neutral):
            return value
        raise InvalidField(f"{self.field} is not supported: {self.instead}", param=self.field)

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"enum": [None, *self.neutral]}


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


_TEXT_AS_IT_IS = "leave it out, or send 0"


class StreamOptions(BaseModel):
    """What a stream tells beside the text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = Field(
        None, description="Whether a last chunk without choices counts the tokens."
    )
    include_obfuscation: bool | None = Field(
        None, description="Accepted, and without meaning here: chunks are never padded."
    )


class OpenAIFields(BudgetFields):
    """A request in OpenAI's shape, with the budget fields of this server."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        Field(
            None,
            description="`effort` in OpenAI's words: `none`, `minimal` and `low` mean `low`, "
            "`medium` and `high` themselves, `xhigh` and `max` mean `max`. Not together with "
            "steps or effort.",
        )
    )
    n: int | None = Field(
        None,
        ge=1,
        le=MAX_TEXTS,
        description="How many answers to each prompt; the seed of the next is one more.",
    )
    temperature: float | None = Field(
        None,
        ge=0.0,
        le=2.0,
        description="0 always takes the likeliest token; higher is more varied. By default 1 to "
        "continue a prompt, and 0 to translate.",
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description="Choose among the k likeliest tokens only, after temperature. Not OpenAI's.",
    )
    top_p: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Choose among the likeliest tokens that together have this probability, "
        "after temperature and top_k; by default 1.",
    )
    seed: int | None = Field(
        None,
        ge=0,
        le=MAX_SEED,
        description="The same seed and steps give the same answer; if missing, one is drawn and "
        "reported.",
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = Field(
        None, description="A text, or up to 4, before the first of which an answer ends."
    )
    stream: bool | None = Field(
        None,
        description="Send each token as it is chosen, as server-sent events, then `[DONE]`, or "
        "an error.",
    )
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    presence_penalty: Annotated[Any, Only("presence_penalty", (0,), _TEXT_AS_IT_IS)] = Field(
        None, description="Not supported: only 0."
    )
    frequency_penalty: Annotated[Any, Only("frequency_penalty", (0,), _TEXT_AS_IT_IS)] = Field(
        None, description="Not supported: only 0."
    )
    logit_bias: Annotated[Any, Only("logit_bias", ({},), "leave it out")] = Field(
        None, description="Not supported: only empty."
    )
    user: str | None = Field(None, description="Accepted, and without meaning here.")

    @property
    def ask(self) -> Ask:
        asked = super().ask
        if self.reasoning_effort is None:
            return asked
        return asked._replace(effort=EFFORT_OF[self.reasoning_effort])

    @property
    def answers(self) -> int:
        """How many answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def counts_in_stream(self) -> bool:
        """Whether the stream shall end with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _fits_together(self) -> "OpenAIFields":
        if self.stream_options is not None and not self.streams:
            raise InvalidField(
                "stream_options are for streams: leave them out, or send stream: true",
                param="stream_options",
            )
        for field, given in (("steps", self.steps), ("effort", self.effort)):
            if self.reasoning_effort is not None and given is not None:
                raise InvalidField(
                    f"reasoning_effort and {field} both name a rung: send one of them",
                    param="reasoning_effort",
                )
        return self


# What clients of OpenAI's API may send here: every field, its type, its limits.


COMPLETION_MAX_TOKENS = 16
MAX_TOP_LOGPROBS = 20

_NO_TOOLS = "the models here call no tools; leave it out"
_TEXT_ONLY = "the models here write text only; leave it out"
_NO_MEANING = "Accepted, and without meaning here."

_EXAMPLES_COMPLETION: list[JsonDict] = [
    {"prompt": "ROMEO:", "max_tokens": 64, "steps": 4, "seed": 7},
    {"prompt": ["ROMEO:", "JULIET:"], "n": 2, "reasoning_effort": "low"},
]
_EXAMPLES_CHAT: list[JsonDict] = [
    {"messages": [{"role": "user", "content": "Who is there?"}], "max_tokens": 64, "steps": 4}
]


class CompletionRequest(OpenAIFields):
    """Prompts to continue, or texts to translate, as in OpenAI's completions."""

    model_config = ConfigDict(json_schema_extra={"examples": [*_EXAMPLES_COMPLETION]})

    prompt: Prompts = Field(
        description="The text to continue or to translate, or its tokens; or a list of up to "
        f"{MAX_TEXTS} of these, of which each gets answers of its own."
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description=f"How many tokens to write at most, by default {COMPLETION_MAX_TOKENS}; a "
        "setting of the server limits it.",
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_TEXTS,
        description="Write this many answers to each prompt and return the n of the greatest mean "
        "log-probability a token, best first. At least n; not with `stream`.",
    )
    echo: bool | None = Field(
        None, description="Put the prompt before each answer. Not with logprobs."
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Report the log-probability of each token, and this many of the likeliest, "
        "under the model itself: without temperature and filters.",
    )
    suffix: Annotated[
        Any, Only("suffix", ("",), "the models here write forwards only; leave it out")
    ] = Field(None, description="Not supported: only empty.")

    def limit(self, most: int) -> int:
        """How many tokens to write at most; by default no more than a server does."""
        return min(COMPLETION_MAX_TOKENS, most) if self.max_tokens is None else self.max_tokens

    @property
    def candidates(self) -> int:
        """How many answers to write to each prompt."""
        return self.answers if self.best_of is None else self.best_of

    @model_validator(mode="after")
    def _fits_one_request(self) -> "CompletionRequest":
        if self.candidates < self.answers:
            raise InvalidField(
                f"best_of is {self.best_of}, but n is {self.answers}: send at least as many",
                param="best_of",
            )
        if self.streams and self.candidates > self.answers:
            raise InvalidField(
                "best_of cannot be streamed, since the best is known at the end: leave out one of "
                "best_of and stream",
                param="best_of",
            )
        if self.echo and self.logprobs is not None:
            raise InvalidField(
                "echo and logprobs do not go together, since those of the prompt are not known: "
                "leave out one of them",
                param="echo",
            )
        texts = len(self.prompt) * self.candidates
        if texts > MAX_TEXTS:
            raise InvalidField(
                f"this asks for {texts} texts, prompts times n or best_of: send at most "
                f"{MAX_TEXTS} in one request",
                param="n" if self.best_of is None else "best_of",
            )
        return self


class ChatRequest(OpenAIFields):
    """Messages to answer, as in OpenAI's chat completions."""

    model_config = ConfigDict(json_schema_extra={"examples": [*_EXAMPLES_CHAT]})

    messages: Messages = Field(
        description="The chat so far. The chat template of the bundle makes a prompt of it, or a "
        "plain one: a line `Role: content` and an empty one each, then `Assistant:`."
    )
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        description=f"How many tokens to write at most, by default {DEFAULT_MAX_TOKENS}; a "
        "setting of the server limits it.",
    )
    max_tokens: int | None = Field(
        None, ge=1, description="The older name of max_completion_tokens: send one of them."
    )
    logprobs: bool | None = Field(
        None,
        description="Report the log-probability of each token under the model itself: without "
        "temperature and filters.",
    )
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="With `logprobs`, so many of the likeliest tokens at each place.",
    )
    response_format: Annotated[
        Any, Only("response_format", ({"type": "text"},), "send text, or leave it out")
    ] = Field(None, description="Only text.")
    tools: Annotated[Any, Only("tools", ([],), _NO_TOOLS)] = Field(
        None, description="Not supported: only empty."
    )
    tool_choice: Annotated[Any, Only("tool_choice", ("none", "auto"), _NO_TOOLS)] = Field(
        None, description="Not supported: there are no tools."
    )
    parallel_tool_calls: bool | None = Field(None, description=_NO_MEANING)
    functions: Annotated[Any, Only("functions", ([],), _NO_TOOLS)] = Field(
        None, description="Not supported: only empty."
    )
    function_call: Annotated[Any, Only("function_call", ("none", "auto"), _NO_TOOLS)] = Field(
        None, description="Not supported: there are no functions."
    )
    modalities: Annotated[Any, Only("modalities", (["text"],), _TEXT_ONLY)] = Field(
        None, description="Only text."
    )
    audio: Annotated[Any, Only("audio", (), _TEXT_ONLY)] = Field(None, description="Not supported.")
    prediction: Annotated[Any, Only("prediction", (), "leave it out")] = Field(
        None, description="Not supported."
    )
    web_search_options: Annotated[Any, Only("web_search_options", (), _NO_TOOLS)] = Field(
        None, description="Not supported."
    )
    moderation: Annotated[Any, Only("moderation", (), "leave it out")] = Field(
        None, description="Not supported."
    )
    verbosity: Annotated[Any, Only("verbosity", ("medium",), "send max_tokens")] = Field(
        None, description="Not supported: only `medium`, which is the default."
    )
    store: Annotated[Any, Only("store", (False,), "nothing is stored here; leave it out")] = Field(
        None, description="Not supported: nothing is stored."
    )
    service_tier: Annotated[
        Any, Only("service_tier", ("auto", "default"), "there is one tier; leave it out")
    ] = Field(None, description="Only `auto` and `default`.")
    metadata: dict[str, str] | None = Field(None, description=_NO_MEANING)
    safety_identifier: str | None = Field(None, description=_NO_MEANING)
    prompt_cache_key: str | None = Field(None, description=_NO_MEANING)

    def limit(self, most: int) -> int:
        """How many tokens to write at most; by default no more than a server does."""
        return self.max_completion_tokens or self.max_tokens or min(DEFAULT_MAX_TOKENS, most)

    @property
    def limit_field(self) -> str:
        """Which field said so."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens to report; None: no log-probability at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _fits_a_chat(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidField(
                "max_tokens and max_completion_tokens mean the same: send one of them",
                param="max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidField(
                "top_logprobs are part of logprobs: send logprobs: true too", param="top_logprobs"
            )
        return self


# The stream of an answer in OpenAI's shape: chunks, then `[DONE]` or an error, once.


DONE = b"data: [DONE]\n\n"


@final
class ChunkWriter:
    """Writes what comes of the answers to one request, in the order in which it comes."""

    def __init__(
        self,
        shape: Shape,
        head: Head,
        answers: int,
        tail: Callable[[Sequence[GeneratedEvent]], Tail],
        path: str,
        counts: bool,
    ) -> None:
        """`tail` tells the end from those of all answers; `counts`: a last chunk has the usage."""
        self._shape = shape
        self._head = head
        self._answers = answers
        self._tail = tail
        self._path = path
        self._counts = counts
        self._opened: set[int] = set()
        self._ends: dict[int, GeneratedEvent] = {}

    def write(self, events: Sequence[tuple[int, Event]]) -> Written:
        """What these events become; nothing comes behind an error."""
        body = b""
        for index, event in events:
            match event:
                case TokenEvent():
                    body += self._open(index)
                    body += self._event(self._shape.piece(self._head, index, event))
                case GeneratedEvent():
                    body += self._open(index) + b"".join(self._end(index, event))
                case FailedEvent():
                    return Written(body + self._error(event.error), over=True)
                case _:
                    bug = InternalError("an event that no generation has")
                    return Written(body + self._error(bug), over=True)
        return Written(body, over=len(self._ends) == self._answers)

    def _open(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        opening = self._shape.opening(self._head, index)
        return b"" if opening is None else self._event(opening)

    def _end(self, index: int, event: GeneratedEvent) -> Iterator[bytes]:
        self._ends[index] = event
        last = len(self._ends) == self._answers
        tail = self._tail([self._ends[one] for one in range(self._answers)]) if last else None
        # Clients that did not ask for a chunk without choices do not expect one.
        report = None if tail is None or self._counts else tail.report
        yield self._event(self._shape.end(self._head, index, event, report))
        if tail is not None:
            if self._counts:
                yield self._event(self._shape.count(self._head, tail))
            yield DONE

    def _event(self, chunk: Answer) -> bytes:
        return event_of(chunk.model_dump_json(exclude=None if self._counts else {"usage"}))

    def _error(self, error: ServeError) -> bytes:
        return event_of(json.dumps(error_body(error, self._path)))


# What the routes in OpenAI's shape share: from a request to its answers, whole or in pieces.


OPENAI_PROBLEMS = {
    status: documented | {"model": OpenAIError} for status, documented in RUN_PROBLEMS.items()
}
STREAM_ABOUT = (
    "The answer; with `stream`, server-sent events without names: chunks, then `[DONE]`, or an "
    "error ({chunk}, OpenAIError). A connection that breaks without one of these two means that "
    "the answer is not complete."
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request, decided and ready to run."""

    order: Order
    shape: Shape
    head: Head
    prompts: int
    answers: int  # to each prompt
    counts: bool  # whether a stream ends with a chunk that counts

    @property
    def candidates(self) -> int:
        """The answers that are written to each prompt."""
        return len(self.order.wishes) // self.prompts

    async def respond(self) -> Response:
        """The response, or the stream of it."""
        async with AsyncExitStack() as work:
            running = await work.enter_async_context(self.order.running())
            if self.order.wishes[0].stream:
                return EventStream(
                    await running.first(),
                    running.mailbox,
                    work.pop_all(),
                    self._writer().write,
                    running.stream_headers,
                )
            events = await _ends(running)
        chosen = self._chosen(events)
        tail = self._tail(events, chosen)
        body = self.shape.whole(self.head, [events[index] for index in chosen], tail)
        entries = sum(entries_of(events[index]) for index in chosen)
        return answer_of(body, entries, server_timing(tail.report.timing))

    def _writer(self) -> ChunkWriter:
        everything = range(len(self.order.wishes))
        return ChunkWriter(
            self.shape,
            self.head,
            len(self.order.wishes),
            lambda events: self._tail(events, everything),
            self.order.request.url.path,
            self.counts,
        )

    def _chosen(self, events: Sequence[GeneratedEvent]) -> list[int]:
        """Which answers are returned: to each prompt the first, or the best of more, best first."""
        chosen: list[int] = []
        for prompt in range(self.prompts):
            first = prompt * self.candidates
            indices = list(range(first, first + self.candidates))
            if self.candidates > self.answers:
                indices.sort(key=lambda index: -_likelihood(events[index]))
            chosen += indices[: self.answers]
        return chosen

    def _tail(self, events: Sequence[GeneratedEvent], chosen: Sequence[int]) -> Tail:
        order = self.order
        spans = [event.span for event in events]
        whole = Span(
            queued_s=min(span.queued_s for span in spans),
            started_s=min(span.started_s for span in spans),
            ended_s=max(span.ended_s for span in spans),
        )
        report = DialReport(
            budget=budget_of(order.decision),
            timing=timing(order.request, order.engine, whole),
            seed=order.wishes[0].sampling.seed,
            choices=self._work(spans, chosen) if len(order.wishes) > 1 else None,
        )
        return Tail(self._usage(events), report)

    def _work(self, spans: Sequence[Span], chosen: Sequence[int]) -> list[ChoiceWork]:
        return [
            ChoiceWork(
                index=place,
                seed=self.order.wishes[index].sampling.seed,
                queue_ms=round(spans[index].queue_ms, 3),
                compute_ms=round(spans[index].compute_ms, 3),
            )
            for place, index in enumerate(chosen)
        ]

    def _usage(self, events: Sequence[GeneratedEvent]) -> Usage:
        read = sum(len(wish.prompt) for wish in self.order.wishes[:: self.candidates])
        written = sum(event.completion_tokens for event in events)
        return Usage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)


def exchange_of(
    request: Request,
    engine: Engine,
    served: Served,
    asked: OpenAIFields,
    decision: Decision,
    wishes: Sequence[Wish],
    prompts: int,
    shape: Shape,
) -> Exchange:
    """Ready to run, at the steps that are chosen now."""
    head = Head(shape.prefix + request_id(request), int(time.time()), served.name)
    order = Order.of(request, engine, served, asked, decision, wishes)
    return Exchange(order, shape, head, prompts, asked.answers, asked.counts_in_stream)


def decide(request: Request, served: Served, asked: OpenAIFields) -> Decision:
    """The rung for a request; what is wrong is said of the field that was sent."""
    try:
        return decide_budget(request, served, asked)
    except ImpossibleBudget as error:
        if error.param == "effort" and asked.reasoning_effort is not None:
            error.param = "reasoning_effort"
        raise


def wishes_of(
    asked: OpenAIFields,
    served: Served,
    prompts: Sequence[list[int]],
    candidates: int,
    max_tokens: int,
    logprobs: int | None,
) -> list[Wish]:
    """What to write: to each prompt so many answers, whose seeds follow each other."""
    seed = drawn_seed() if asked.seed is None else asked.seed
    return [
        wish_in(
            Manner(
                max_tokens=max_tokens,
                temperature=asked.temperature,
                top_k=asked.top_k,
                top_p=1.0 if asked.top_p is None else asked.top_p,
                seed=(seed + number) % (MAX_SEED + 1),
                stops=asked.stops,
                logprobs=logprobs,
                stream=asked.streams,
            ),
            served,
            prompt,
        )
        for prompt in prompts
        for number in range(candidates)
    ]


async def _ends(running: Running) -> list[GeneratedEvent]:
    """The ends of all texts; raises what kept one of them from being complete."""
    ends: dict[int, GeneratedEvent] = {}
    while len(ends) < len(running.jobs):
        for index, event in await running.mailbox.take():
            if isinstance(event, FailedEvent):
                raise event.error
            assert isinstance(event, GeneratedEvent)
            ends[index] = event
    return [ends[index] for index in range(len(ends))]


def _likelihood(event: GeneratedEvent) -> float:
    """The mean log-probability of a token."""
    return sum(one.logprob for one in event.logprobs) / len(event.logprobs)


# POST /v1/chat/completions: messages in, the next one out, in OpenAI's shape.


def chat_routes(settings: Settings, engine: Engine, reader: Reader) -> APIRouter:
    """The route, for an engine."""
    router = APIRouter(tags=["openai"])

    @router.post(
        "/v1/chat/completions",
        summary="Answer a chat, in OpenAI's shape",
        response_model=ChatResponse,
        responses={
            200: {
                "description": STREAM_ABOUT.format(chunk="ChatChunk"),
                "content": {"text/event-stream": {}},
            },
            **OPENAI_PROBLEMS,
        },
        openapi_extra=takes(ChatRequest),
    )
    async def chat(request: Request) -> Response:
        asked = await read_json(request, ChatRequest, reader)
        served = engine.catalog.pick(asked.model, WRITING)
        _check_chats(served)
        decision = decide(request, served, asked)
        max_tokens = asked.limit(settings.max_tokens)
        check_max_tokens(max_tokens, settings, asked.limit_field)
        check_texts(asked.answers, settings)
        check_answer(asked.answers, max_tokens, asked.alternatives, settings, asked.limit_field)
        prompt = await reader.read(
            request,
            sum(len(message.content) for message in asked.messages),
            deadline_of(request, asked),
            lambda: _prompt(asked, served),
        )
        wishes = wishes_of(asked, served, [prompt], asked.answers, max_tokens, asked.alternatives)
        shape = ChatShape(asked.alternatives is not None)
        return await exchange_of(
            request, engine, served, asked, decision, wishes, 1, shape
        ).respond()

    return router


def _check_chats(served: Served) -> None:
    if served.chat is None:
        raise WrongTask(
            f"{served.name} translates, and takes no chats: send the text as prompt to "
            "/v1/completions",
            param="model",
            endpoint="/v1/completions",
        )


def _prompt(asked: ChatRequest, served: Served) -> list[int]:
    assert served.chat is not None
    return served.codec.encode_prompt(served.chat.prompt(asked.messages), "messages")


# POST /v1/completions: prompts in, their continuations or translations out, in OpenAI's shape.


def completion_routes(settings: Settings, engine: Engine, reader: Reader) -> APIRouter:
    """The route, for an engine."""
    router = APIRouter(tags=["openai"])

    @router.post(
        "/v1/completions",
        summary="Continue prompts, or translate texts, in OpenAI's shape",
        response_model=CompletionResponse,
        responses={
            200: {
                "description": STREAM_ABOUT.format(chunk="CompletionChunk"),
                "content": {"text/event-stream": {}},
            },
            **OPENAI_PROBLEMS,
        },
        openapi_extra=takes(CompletionRequest),
    )
    async def completions(request: Request) -> Response:
        asked = await read_json(request, CompletionRequest, reader)
        served = engine.catalog.pick(asked.model, WRITING)
        decision = decide(request, served, asked)
        max_tokens = asked.limit(settings.max_tokens)
        check_max_tokens(max_tokens, settings)
        texts = len(asked.prompt) * asked.candidates
        check_texts(texts, settings)
        check_answer(texts, max_tokens, asked.logprobs, settings)
        prompts = await reader.read(
            request,
            sum(prompt.characters for prompt in asked.prompt),
            deadline_of(request, asked),
            lambda: [prompt.read(served.codec) for prompt in asked.prompt],
        )
        ranks = asked.candidates > asked.answers
        wishes = wishes_of(
            asked,
            served,
            prompts,
            asked.candidates,
            max_tokens,
            0 if ranks and asked.logprobs is None else asked.logprobs,
        )
        shape = CompletionShape(_echoes(asked, served), asked.logprobs is not None)
        return await exchange_of(
            request, engine, served, asked, decision, wishes, len(prompts), shape
        ).respond()

    return router


def _echoes(asked: CompletionRequest, served: Served) -> list[str]:
    """What comes before each answer."""
    return [
        prompt.text(served.codec) if asked.echo else ""
        for prompt in asked.prompt
        for _ in range(asked.answers)
    ]
