"""OpenAI's API: completions and chat completions, whole or as streams, and embeddings."""

import base64
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, final

import numpy as np
from fastapi import APIRouter
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema
from starlette.responses import Response
from typing_extensions import TypedDict

from serve.api.body import (
    DEFAULT_MAX_TOKENS,
    FINISH,
    Answer,
    Budget,
    BudgetFields,
    ComputeMs,
    Logprobs,
    OpenAIError,
    QueueMs,
    Reader,
    SamplingFields,
    Timing,
    Usage,
    budget_of,
    read_json,
    server_timing,
)
from serve.api.submission import (
    RUN_PROBLEMS,
    Submission,
    answer_of,
    check_count,
    check_size,
    drawn_seed,
    entries_of,
    event_of,
    generation_request,
    takes,
)
from serve.budget import BudgetRequest
from serve.bundle import Effort
from serve.catalog import WRITING, Catalog, Served
from serve.engine.engine import Engine
from serve.engine.job import (
    ClassifiedEvent,
    Event,
    FailedEvent,
    FinishReason,
    GeneratedEvent,
    ScoredToken,
    Scores,
    Span,
    Tags,
    TokenEvent,
)
from serve.engine.writing import GenerationRequest
from serve.errors import (
    ContextLengthExceeded,
    InvalidField,
    NoEmbeddings,
    StepsForbidden,
    Unprocessable,
    WrongTask,
    error_body,
)
from serve.exchange import Exchange, Route, ThisExchange
from serve.inputs.chat import ChatTemplate, Message, Messages
from serve.inputs.rows import MAX_INPUTS, Text, Texts, read_items
from serve.inputs.text import TextCodec, TooLong
from serve.runtime.protocol import FloatArray

# Response fields.


_INDEX = "Index of the answer, from 0: first all answers to the first prompt, then all to the next."


class ChoiceWork(Answer):
    """Seed and time of one of several answers."""

    index: int = Field(description=_INDEX)
    seed: int = Field(description="Seed of this answer.")
    queue_ms: QueueMs
    compute_ms: ComputeMs


class DialReport(Answer):
    """What this server did for the answer. Not part of OpenAI's API."""

    budget: Budget = Field(description="The work that was done, the same for every answer.")
    timing: Timing = Field(description="Where the time of the request went.")
    seed: int = Field(
        description="Seed of the first answer. Send it to get all answers to one prompt again; "
        "`choices` has the seeds of several prompts."
    )
    choices: list[ChoiceWork] | None = Field(
        default=None,
        exclude_if=lambda choices: choices is None,
        description="Seed and time of each answer. Left out if there is only one.",
    )


class OpenAIObject(Answer):
    """The fields that every part of a response repeats."""

    id: str
    object: str
    created: int = Field(description="When the answer was started, in Unix seconds.")
    model: str = Field(description="The model that answered.")


class ChunkObject(OpenAIObject):
    """Data of one event of a stream. The last event is `[DONE]`, or an error."""

    choices: list[Any]
    usage: Usage | None = Field(
        default=None,
        description="Only with `include_usage`: null, and the token counts in the last chunk.",
    )
    stepdial: DialReport | None = Field(
        default=None,
        description="Steps, time and seed, in the last chunk.",
    )


class CompletionLogprobs(Answer):
    """Log-probabilities of the tokens of an answer. All lists are in token order."""

    tokens: list[str] = Field(description="Texts of the tokens; U+FFFD for part of a character.")
    token_logprobs: list[float] = Field(description="Log-probabilities of the tokens.")
    top_logprobs: list[dict[str, float]] = Field(
        description="Per token, the most likely tokens and the one that was chosen, with their "
        "log-probabilities."
    )
    text_offset: list[int] = Field(
        description="Start of each token's text in the answer, in characters. Tokens cut off by "
        "a stop string have offsets beyond the end."
    )


class CompletionChoice(Answer):
    """One answer."""

    index: int = Field(description=_INDEX)
    text: str = Field(description="The answer; with `echo`, after its prompt.")
    logprobs: CompletionLogprobs | None = Field(
        description="Log-probabilities, if `logprobs` was set."
    )
    finish_reason: FinishReason = Field(description=FINISH)


class CompletionResponse(OpenAIObject):
    """Texts that continue prompts, or translate them."""

    id: str = Field(description="`cmpl-` and the id of the request.")
    object: Literal["text_completion"] = Field(
        default="text_completion", description="Type of this object."
    )
    choices: list[CompletionChoice] = Field(description="The answers.")
    usage: Usage = Field(
        description="Tokens of all prompts and all answers, including those that `best_of` does "
        "not return."
    )
    stepdial: DialReport = Field(description="Steps, time and seed.")


class CompletionPiece(Answer):
    """What one chunk adds to an answer."""

    index: int = Field(description=_INDEX)
    text: str = Field(description="Text to append: usually that of one token, sometimes empty.")
    logprobs: CompletionLogprobs | None = Field(
        description="Log-probability of this token, if `logprobs` was set."
    )
    finish_reason: FinishReason | None = Field(description=f"Null until the end. {FINISH}")


class CompletionChunk(ChunkObject):
    """Data of one event of a stream. The last event is `[DONE]`, or an error."""

    id: str = Field(description="`cmpl-` and the id of the request.")
    object: Literal["text_completion"] = Field(
        default="text_completion", description="Type of this object."
    )
    choices: list[CompletionPiece] = Field(
        description="One entry; none in the chunk that carries the usage."
    )


class TopLogprob(Answer):
    """A token that could have been chosen."""

    token: str = Field(description="Text of the token; U+FFFD if it is part of a character.")
    logprob: float = Field(description="Log-probability that the model gives it.")
    bytes: list[int] | None = Field(
        description="UTF-8 bytes of the text; null if the token is part of a character."
    )


class TokenLogprob(TopLogprob):
    """Log-probability of a token of the answer, and of its alternatives."""

    top_logprobs: list[TopLogprob] = Field(
        description="Most likely tokens at this position, the most likely first."
    )


class ChatLogprobs(Answer):
    """Log-probabilities of an answer."""

    content: list[TokenLogprob] = Field(description="The tokens of the answer, in order.")
    refusal: None = Field(default=None, description="Always null.")


class AssistantMessage(Answer):
    """The model's message."""

    role: Literal["assistant"] = Field(default="assistant", description="Always `assistant`.")
    content: str = Field(description="The answer.")
    refusal: None = Field(default=None, description="Always null.")


class ChatChoice(Answer):
    """One answer."""

    index: int = Field(description="Index of the answer, from 0.")
    message: AssistantMessage = Field(description="The answer.")
    logprobs: ChatLogprobs | None = Field(description="Log-probabilities, if `logprobs` was set.")
    finish_reason: FinishReason = Field(description=FINISH)


class ChatResponse(OpenAIObject):
    """Answers to a chat."""

    id: str = Field(description="`chatcmpl-` and the id of the request.")
    object: Literal["chat.completion"] = Field(
        default="chat.completion", description="Type of this object."
    )
    choices: list[ChatChoice] = Field(description="The answers.")
    usage: Usage = Field(description="Tokens of the prompt and of all answers.")
    stepdial: DialReport = Field(description="Steps, time and seed.")


class ChatDelta(Answer):
    """What one chunk adds to a message."""

    role: Literal["assistant"] | None = Field(
        default=None,
        description="Only in the first chunk of an answer.",
    )
    content: str | None = Field(
        default=None,
        description="Text to append. Not in the last chunk of an answer.",
    )


class ChatPiece(Answer):
    """What one chunk adds to an answer."""

    index: int = Field(description="Index of the answer, from 0.")
    delta: ChatDelta = Field(description="What this chunk adds.")
    logprobs: ChatLogprobs | None = Field(
        description="Log-probability of this token, if `logprobs` was set."
    )
    finish_reason: FinishReason | None = Field(description=f"Null until the end. {FINISH}")


class ChatChunk(ChunkObject):
    """Data of one event of a stream. The last event is `[DONE]`, or an error."""

    id: str = Field(description="`chatcmpl-` and the id of the request.")
    object: Literal["chat.completion.chunk"] = Field(
        default="chat.completion.chunk", description="Type of this object."
    )
    choices: list[ChatPiece] = Field(
        description="One entry; none in the chunk that carries the usage."
    )


Listed = Callable[[Iterable[Any]], object]  # makes a list of an answer, or leaves it an iterator
_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


Fields = dict[str, object]


class Tail(TypedDict):
    """What a response says when all answers are complete."""

    usage: Usage
    stepdial: DialReport


class ResponseFormat(ABC):
    """How responses look: as dictionaries, since they are made for every token and may be large."""

    prefix: ClassVar[str]  # of ids
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    logprobs: bool

    @abstractmethod
    def answer(self, index: int, text: str) -> Fields:
        """The text of a whole answer of this number."""

    @abstractmethod
    def opening(self, index: int) -> Fields | None:
        """What a stream has before the first token of an answer, if anything."""

    @abstractmethod
    def delta(self, text: str | None) -> Fields:
        """The text of a token; None at the end."""

    @abstractmethod
    def scores(self, logprobs: Sequence[ScoredToken], listed: Listed = iter) -> Fields:
        """Log-probabilities, in lists of this kind."""

    def choices(self, events: Sequence[GeneratedEvent]) -> list[Fields]:
        """The choices of a whole response."""
        return [
            self.answer(index, event.text)
            | {
                "logprobs": self.scores(event.logprobs) if self.logprobs else None,
                "finish_reason": event.finish_reason,
            }
            for index, event in enumerate(events)
        ]


@dataclass(frozen=True, slots=True)
class CompletionFormat(ResponseFormat):
    """Responses of /v1/completions."""

    prefix = "cmpl-"
    whole_kind = chunk_kind = "text_completion"

    echoes: Sequence[str]  # text in front of each answer
    logprobs: bool

    def answer(self, index: int, text: str) -> Fields:
        return {"index": index, "text": self.echoes[index] + text}

    def opening(self, index: int) -> Fields | None:
        echo = self.echoes[index]
        return {"text": echo} if echo else None

    def delta(self, text: str | None) -> Fields:
        return {"text": text or ""}

    def scores(self, logprobs: Sequence[ScoredToken], listed: Listed = iter) -> Fields:
        """The fields of CompletionLogprobs."""
        return {
            "tokens": listed(one.token for one in logprobs),
            "token_logprobs": listed(one.logprob for one in logprobs),
            "top_logprobs": listed(map(_by_token, logprobs)),
            "text_offset": listed(one.offset for one in logprobs),
        }


@dataclass(frozen=True, slots=True)
class ChatFormat(ResponseFormat):
    """Responses of /v1/chat/completions."""

    prefix = "chatcmpl-"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    logprobs: bool

    def answer(self, index: int, text: str) -> Fields:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message}

    def opening(self, index: int) -> Fields:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str | None) -> Fields:
        return {"delta": {} if text is None else {"content": text}}

    def scores(self, logprobs: Sequence[ScoredToken], listed: Listed = iter) -> Fields:
        """The fields of ChatLogprobs."""
        return {"content": listed(map(_token_logprob, logprobs)), "refusal": None}


def _by_token(one: ScoredToken) -> dict[str, float]:
    """One entry per text: of tokens that look alike (parts of characters) the one that was chosen,
    or the most likely.
    """
    found: dict[str, float] = {}
    for token, logprob in one.top:
        found.setdefault(token, logprob)
    return found | {one.token: one.logprob}


def _token_logprob(one: ScoredToken) -> Fields:
    """The fields of TokenLogprob."""
    return _top_logprob(one.token, one.logprob) | {
        "top_logprobs": [_top_logprob(token, logprob) for token, logprob in one.top]
    }


def _top_logprob(token: str, logprob: float) -> Fields:
    """The fields of TopLogprob."""
    part = _PART_OF_A_CHARACTER in token
    return {"token": token, "logprob": logprob, "bytes": None if part else [*token.encode()]}


# Request fields that completions and chats share, and fields that are not supported.


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
class NeutralOnly:
    """An unsupported field: accepted only with a value that has no effect."""

    neutral: tuple[Any, ...]
    instead: str  # what to do instead
    about: str

    def check(self, value: Any, info: core_schema.ValidationInfo) -> Any:
        if value is None or any(_same(value, one) for one in self.neutral):
            return value
        raise InvalidField(
            f"{info.field_name} is not supported: {self.instead}", param=info.field_name
        )

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"enum": [None, *self.neutral], "description": self.about}


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


Penalty = Annotated[Any, NeutralOnly((0,), "leave it out, or send 0", "Not supported: must be 0.")]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = Field(
        None, description="Send a last chunk without choices that has the token counts."
    )
    include_obfuscation: bool | None = Field(
        None, description="Accepted and ignored: chunks are never padded."
    )


# Prompts of completions: one or several texts or lists of tokens.


# Texts per request: twice as many as one batch decodes by default, since clients that send their
# prompts in portions send 20.
MAX_TEXTS = 32
# More than any model's window; the model's own limit is checked later.
MAX_PROMPT_TOKENS = 2**17
_PROMPTS_SAYS = "a string, or a list of tokens"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, not read yet."""

    value: str | tuple[int, ...]
    param: str  # its place in the request

    @property
    def characters(self) -> int:
        """The length of the text to encode."""
        return len(self.value) if isinstance(self.value, str) else 0

    def read(self, codec: TextCodec) -> list[int]:
        """The tokens, if the model can read them."""
        if isinstance(self.value, str):
            return codec.encode_prompt(self.value, self.param)
        return codec.check_prompt(self.value, self.param)

    def text(self, codec: TextCodec) -> str:
        """The text of the prompt."""
        return self.value if isinstance(self.value, str) else codec.decode(list(self.value))


def check_prompts(value: object) -> tuple[Prompt, ...]:
    """The prompts of a request, in order; InvalidField if they are malformed."""
    if not isinstance(value, list) or (value and _is_token(value[0])):
        return (_prompt_of(value, "prompt", f"{_PROMPTS_SAYS}, or a list of these"),)
    if not value:
        raise InvalidField("prompt is an empty list: send at least 1 item", param="prompt")
    if len(value) > MAX_TEXTS:
        raise InvalidField(
            f"prompt has {len(value)} items: send at most {MAX_TEXTS}", param="prompt"
        )
    return tuple(
        _prompt_of(one, f"prompt[{index}]", _PROMPTS_SAYS) for index, one in enumerate(value)
    )


def _prompt_of(value: object, param: str, says: str) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise InvalidField(f"{param} is empty: send some text", param=param)
        return Prompt(value, param)
    if isinstance(value, list):
        if not value:
            raise InvalidField(f"{param} is empty: send at least 1 token", param=param)
        if len(value) > MAX_PROMPT_TOKENS:
            raise ContextLengthExceeded(
                f"{param} has {len(value)} tokens: send at most {MAX_PROMPT_TOKENS}", param=param
            )
        if set(map(type, value)) == {int}:
            return Prompt(tuple(value), param)
        for index, token in enumerate(value):
            if not _is_token(token):
                raise InvalidField(
                    f"{param}[{index}] must be a token, which is an integer",
                    param=f"{param}[{index}]",
                )
        return Prompt(tuple(map(int, value)), param)
    raise InvalidField(f"{param} must be {says}", param=param)


def _is_token(value: object) -> bool:
    if isinstance(value, float):
        return value.is_integer()  # JSON has only numbers: 4.0 is the integer 4
    return isinstance(value, int) and not isinstance(value, bool)


_Tokens = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)
]
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(
        check_prompts,
        json_schema_input_type=Text
        | _Tokens
        | Annotated[list[Text | _Tokens], Field(min_length=1, max_length=MAX_TEXTS)],
    ),
]


class OpenAIFields(SamplingFields):
    """A request in OpenAI's format, with the budget fields of this server."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        Field(
            None,
            description="`effort` in OpenAI's words: `none`, `minimal` and `low` mean `low`; "
            "`medium` and `high` mean themselves; `xhigh` and `max` mean `max`. Cannot be combined "
            "with steps or effort.",
        )
    )
    n: int | None = Field(
        None,
        ge=1,
        le=MAX_TEXTS,
        description="Number of answers per prompt. Each further answer uses the next seed.",
    )
    top_k: int | None = Field(
        None,
        ge=-1,
        description="Sample only from the k most likely tokens, after temperature. -1 and 0: from "
        "all. Not part of OpenAI's API.",
    )
    stream: bool | None = Field(
        None,
        description="Stream each token as a server-sent event, then `[DONE]`, or an error.",
    )
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: Annotated[
        Any, NeutralOnly(({},), "leave it out", "Not supported: must be empty.")
    ] = None
    min_p: Annotated[
        Any, NeutralOnly((0,), "leave it out, or send top_p", "Not supported: must be 0.")
    ] = None
    repetition_penalty: Annotated[
        Any, NeutralOnly((1,), "leave it out, or send 1", "Not supported: must be 1.")
    ] = None
    user: str | None = Field(None, description="Accepted and ignored.")

    @property
    def budget_request(self) -> BudgetRequest:
        asked = super().budget_request
        if self.reasoning_effort is None:
            return asked
        return asked._replace(effort=EFFORT_OF[self.reasoning_effort])

    @property
    def answers(self) -> int:
        """Answers per prompt."""
        return 1 if self.n is None else self.n

    @property
    def counts_in_stream(self) -> bool:
        """Whether the stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _fits_together(self) -> "OpenAIFields":
        if self.stream_options is not None and not self.stream:
            raise InvalidField(
                "stream_options are for streams: leave them out, or send stream: true",
                param="stream_options",
            )
        for name, given in (("steps", self.steps), ("effort", self.effort)):
            if self.reasoning_effort is not None and given is not None:
                raise InvalidField(
                    f"reasoning_effort and {name} both name a step count: send one of them",
                    param="reasoning_effort",
                )
        return self


# Requests.


COMPLETION_MAX_TOKENS = 16
MAX_TOP_LOGPROBS = 20

_NO_TOOLS = "the models here call no tools; leave it out"
_TEXT_ONLY = "the models here write text only; leave it out"
_NO_MEANING = "Accepted and ignored."
NoTools = Annotated[Any, NeutralOnly(([],), _NO_TOOLS, "Not supported: must be empty.")]

_EXAMPLES_COMPLETION: list[JsonDict] = [
    {"prompt": "ROMEO:", "max_tokens": 64, "steps": 4, "seed": 7},
    {"prompt": ["ROMEO:", "JULIET:"], "n": 2, "reasoning_effort": "low"},
]
_EXAMPLES_CHAT: list[JsonDict] = [
    {"messages": [{"role": "user", "content": "Who is there?"}], "max_tokens": 64, "steps": 4}
]


class CompletionRequest(OpenAIFields):
    """Prompts to continue, or texts to translate, as in OpenAI's completions API."""

    model_config = ConfigDict(json_schema_extra={"examples": [*_EXAMPLES_COMPLETION]})

    prompt: Prompts = Field(
        description="The text to continue or translate, or its tokens; or a list of up to "
        f"{MAX_TEXTS} of these, each with answers of its own."
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description=f"Most tokens to generate. Default: {COMPLETION_MAX_TOKENS}; the server's "
        "--max-tokens is the limit.",
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_TEXTS,
        description="Generate this many answers per prompt and return the n with the highest "
        "mean log-probability per token, best first. At least n; with `stream` only equal to n.",
    )
    echo: bool | None = Field(
        None, description="Return the prompt in front of each answer. Not with logprobs."
    )
    logprobs: Logprobs = None
    suffix: Annotated[
        Any,
        NeutralOnly(
            ("",),
            "the models here write forwards only; leave it out",
            "Not supported: must be empty.",
        ),
    ] = None

    def limit(self, most: int) -> int:
        """Most tokens to generate: as asked, else the default, at most the server's limit."""
        return min(COMPLETION_MAX_TOKENS, most) if self.max_tokens is None else self.max_tokens

    @property
    def texts_field(self) -> str:
        """What asks for so many texts."""
        if self.candidates > self.answers:
            return "best_of"
        return "n" if self.answers > 1 else "prompt"

    @property
    def candidates(self) -> int:
        """Answers to generate per prompt."""
        return self.answers if self.best_of is None else self.best_of

    @model_validator(mode="after")
    def _fits_one_request(self) -> "CompletionRequest":
        if self.candidates < self.answers:
            raise InvalidField(
                f"best_of is {self.best_of}, but n is {self.answers}: send at least as many",
                param="best_of",
            )
        if self.stream and self.candidates > self.answers:
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
                param=self.texts_field,
            )
        return self


class ChatRequest(OpenAIFields):
    """Messages to answer, as in OpenAI's chat completions API."""

    model_config = ConfigDict(json_schema_extra={"examples": [*_EXAMPLES_CHAT]})

    messages: Messages = Field(
        description="The chat so far. The bundle's chat template turns it into a prompt. "
        "Without one, each message becomes a line `Role: content` and an empty "
        "line, followed by `Assistant:`."
    )
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        description=f"Most tokens to generate. Default: {DEFAULT_MAX_TOKENS}; the server's "
        "--max-tokens is the limit.",
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Older name of max_completion_tokens: send only one of them."
    )
    logprobs: bool | None = Field(
        None,
        description="Return the log-probability of each token. It is the model's own, before "
        "temperature, top_k and top_p.",
    )
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="With `logprobs`: number of most likely tokens to return per token.",
    )
    response_format: Annotated[
        Any, NeutralOnly(({"type": "text"},), "send text, or leave it out", "Must be text.")
    ] = None
    tools: NoTools = None
    tool_choice: Annotated[
        Any, NeutralOnly(("none", "auto"), _NO_TOOLS, "Not supported: there are no tools.")
    ] = None
    parallel_tool_calls: bool | None = Field(None, description=_NO_MEANING)
    functions: NoTools = None
    function_call: Annotated[
        Any, NeutralOnly(("none", "auto"), _NO_TOOLS, "Not supported: there are no functions.")
    ] = None
    modalities: Annotated[Any, NeutralOnly((["text"],), _TEXT_ONLY, "Must be text.")] = None
    audio: Annotated[Any, NeutralOnly((), _TEXT_ONLY, "Not supported.")] = None
    prediction: Annotated[Any, NeutralOnly((), "leave it out", "Not supported.")] = None
    web_search_options: Annotated[Any, NeutralOnly((), _NO_TOOLS, "Not supported.")] = None
    moderation: Annotated[Any, NeutralOnly((), "leave it out", "Not supported.")] = None
    verbosity: Annotated[
        Any,
        NeutralOnly(
            ("medium",), "send max_tokens", "Not supported: must be `medium`, the default."
        ),
    ] = None
    store: Annotated[
        Any,
        NeutralOnly(
            (False,), "nothing is stored here; leave it out", "Not supported: nothing is stored."
        ),
    ] = None
    service_tier: Annotated[
        Any,
        NeutralOnly(
            ("auto", "default"), "there is one tier; leave it out", "Must be `auto` or `default`."
        ),
    ] = None
    metadata: dict[str, str] | None = Field(None, description=_NO_MEANING)
    safety_identifier: str | None = Field(None, description=_NO_MEANING)
    prompt_cache_key: str | None = Field(None, description=_NO_MEANING)
    prompt_cache_options: dict[str, str] | None = Field(None, description=_NO_MEANING)
    prompt_cache_retention: str | None = Field(None, description=_NO_MEANING)

    def limit(self, most: int) -> int:
        """Most tokens to generate: as asked, else the default, at most the server's limit."""
        return self.max_completion_tokens or self.max_tokens or min(DEFAULT_MAX_TOKENS, most)

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def alternatives(self) -> int | None:
        """How many of the most likely tokens to return; None: no log-probabilities."""
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


# Streams: chunks, then `[DONE]` or an error, once.


DONE = b"data: [DONE]\n\n"


@final
@dataclass(slots=True)
class ChunkWriter:
    """Writes the events of all answers to one request, in the order in which they arrive."""

    _format: ResponseFormat
    _head: Fields  # of every chunk
    _answers: int
    _tail: Callable[[Sequence[GeneratedEvent]], Tail]
    _path: str
    _counts: bool  # whether a last chunk has the usage
    _opened: set[int] = field(default_factory=set)
    _ends: dict[int, GeneratedEvent] = field(default_factory=dict)

    def write(self, events: Sequence[tuple[int, Event]]) -> bytes:
        """The bytes for these events. Nothing follows an error."""
        body = b""
        for index, event in events:
            if isinstance(event, FailedEvent):
                return body + event_of(error_body(event.error, self._path))
            assert not isinstance(event, ClassifiedEvent), "an event that no generation has"
            body += self._open(index)
            if isinstance(event, TokenEvent):
                body += self._token(index, event)
            else:
                body += self._end(index, event)
        return body

    def _open(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        opening = self._format.opening(index)
        return b"" if opening is None else self._choice(index, opening)

    def _token(self, index: int, event: TokenEvent) -> bytes:
        scores = None if event.logprob is None else self._format.scores([event.logprob], list)
        return self._choice(index, self._format.delta(event.text), scores)

    def _end(self, index: int, event: GeneratedEvent) -> bytes:
        self._ends[index] = event
        delta, reason = self._format.delta(None), event.finish_reason
        if len(self._ends) < self._answers:
            return self._choice(index, delta, finish_reason=reason)
        tail = self._tail([self._ends[one] for one in range(self._answers)])
        if not self._counts:
            # Clients that did not ask for a chunk without choices do not expect one.
            return self._choice(index, delta, None, reason, tail["stepdial"]) + DONE
        last = self._event([], tail["usage"], tail["stepdial"])
        return self._choice(index, delta, finish_reason=reason) + last + DONE

    def _choice(
        self,
        index: int,
        delta: Fields,
        scores: Fields | None = None,
        finish_reason: FinishReason | None = None,
        report: DialReport | None = None,
    ) -> bytes:
        piece = {"index": index, **delta, "logprobs": scores, "finish_reason": finish_reason}
        return self._event([piece], None, report)

    def _event(
        self, choices: Sequence[Fields], usage: Usage | None, report: DialReport | None
    ) -> bytes:
        chunk = self._head | {"choices": choices}
        if self._counts:
            chunk["usage"] = usage
        if report is not None:
            chunk["stepdial"] = report
        return event_of(chunk)


# From a request to its response, for both routes.


OPENAI_PROBLEMS = {
    status: documented | {"model": OpenAIError} for status, documented in RUN_PROBLEMS.items()
}
_NOT_READ = (
    "The body is not valid JSON, or the prompt has more tokens than the model reads "
    "(`context_length_exceeded`)."
)
STREAM_ABOUT = (
    "The answer. With `stream`: server-sent events without names, one chunk each, then `[DONE]` "
    "or an error ({chunk}, OpenAIError). If the connection breaks before that, the answer is "
    "incomplete."
)


@dataclass(frozen=True, slots=True)
class OpenAIAnswer:
    """Generates the answers to one request, and writes them in OpenAI's format."""

    submission: Submission
    response_format: ResponseFormat
    asked: OpenAIFields
    prompts: Sequence[list[int]]
    candidates: int  # answers to generate per prompt

    async def respond(self, max_tokens: int, logprobs: int | None) -> Response:
        """The response or the stream; where the server chooses the step count, it does so now."""
        submission, response_format = self.submission, self.response_format
        submission.generate(self._requests(max_tokens, logprobs))
        head: Fields = {
            "id": response_format.prefix + submission.exchange.id,
            "object": response_format.chunk_kind
            if self.asked.stream
            else response_format.whole_kind,
            "created": int(time.time()),
            "model": submission.served.name,
        }
        if self.asked.stream:
            everything = range(len(submission.requests))
            writer = ChunkWriter(
                response_format,
                head,
                len(everything),
                lambda events: self._tail(events, everything),
                submission.exchange.path,
                self.asked.counts_in_stream,
            )
            return await submission.stream(writer.write)
        events = await submission.ends()
        chosen = self._chosen(events)
        best = [events[index] for index in chosen]
        tail = self._tail(events, chosen)
        body = {**head, "choices": response_format.choices(best), **tail}
        entries = sum(map(entries_of, best))
        return answer_of(body, entries, server_timing(tail["stepdial"].timing))

    def _requests(self, max_tokens: int, logprobs: int | None) -> list[GenerationRequest]:
        """Several answers per prompt, with consecutive seeds.

        With a given seed a prompt is answered alike, whatever others come with it. Without one no
        two answers have the same, as the same prompt may come several times.
        """
        asked = self.asked
        seed, apart = (drawn_seed(), self.candidates) if asked.seed is None else (asked.seed, 0)
        return [
            generation_request(
                asked,
                self.submission.served,
                prompt,
                max_tokens=max_tokens,
                seed=seed + place * apart + number,
                logprobs=logprobs,
                stream=asked.stream,
            )
            for place, prompt in enumerate(self.prompts)
            for number in range(self.candidates)
        ]

    def _chosen(self, events: Sequence[GeneratedEvent]) -> list[int]:
        """The answers to return: per prompt the first, or the best of several, best first."""
        chosen: list[int] = []
        for first in range(0, len(events), self.candidates):
            indices = list(range(first, first + self.candidates))
            if self.candidates > self.asked.answers:
                indices.sort(key=lambda index: -_likelihood(events[index]))
            chosen += indices[: self.asked.answers]
        return chosen

    def _tail(self, events: Sequence[GeneratedEvent], chosen: Sequence[int]) -> Tail:
        submission = self.submission
        read = sum(map(len, self.prompts))
        written = sum(event.completion_tokens for event in events)
        spans = [event.span for event in events]
        report = DialReport(
            budget=budget_of(submission.decision),
            timing=submission.timing(Span.over(spans)),
            seed=submission.requests[0].sampling.seed,
            choices=self._work(spans, chosen) if len(submission.requests) > 1 else None,
        )
        return {"usage": Usage.of(read, written), "stepdial": report}

    def _work(self, spans: Sequence[Span], chosen: Sequence[int]) -> list[ChoiceWork]:
        return [
            ChoiceWork(
                index=place,
                seed=self.submission.requests[index].sampling.seed,
                queue_ms=round(spans[index].queue_ms, 3),
                compute_ms=round(spans[index].compute_ms, 3),
            )
            for place, index in enumerate(chosen)
        ]


def _submission(
    exchange: Exchange, engine: Engine, served: Served, asked: OpenAIFields
) -> Submission:
    """A submission to this model. Errors name the field that was sent."""
    with _named("effort", "effort" if asked.reasoning_effort is None else "reasoning_effort"):
        return Submission.of(exchange, engine, served, asked)


@contextmanager
def _named(field: str, sent: str) -> Iterator[None]:
    """In errors, the field as it was sent."""
    try:
        yield
    except (Unprocessable, StepsForbidden) as error:
        as_sent = partial(re.compile(rf"\b{field}\b").sub, sent)
        error.message = as_sent(error.message)
        error.param = error.param and as_sent(error.param)
        raise


@contextmanager
def _context_length() -> Iterator[None]:
    """Says of a prompt that is too long what OpenAI says."""
    try:
        yield
    except TooLong as error:
        raise ContextLengthExceeded(error.message, param=error.param, **error.details) from None


def _likelihood(event: GeneratedEvent) -> float:
    """The mean log-probability per token."""
    return sum(one.logprob for one in event.logprobs) / len(event.logprobs)


def _chats_of(served: Served) -> ChatTemplate:
    if served.chat is None:
        raise WrongTask(
            f"{served.name} translates, and takes no chats: send the text as prompt to "
            "/v1/completions",
            param="model",
            endpoint="/v1/completions",
        )
    return served.chat


def read_chat(messages: Sequence[Message], chats: ChatTemplate, codec: TextCodec) -> list[int]:
    """The prompt that a chat is."""
    for index, message in enumerate(messages):  # what is wrong is said of what was sent
        codec.check_characters(message.content, f"messages[{index}].content")
    prompt = chats.prompt(messages, codec.end_mark)
    breaks = codec.breaks([text for one in messages for text in (one.content, one.name or "")])
    if not breaks:
        return codec.encode_prompt(prompt, "messages")
    broken = [
        replace(
            one,
            content=codec.broken(one.content, breaks),
            name=one.name and codec.broken(one.name, breaks),
        )
        for one in messages
    ]
    return codec.encode_chat(prompt, chats.prompt(broken, codec.end_mark), breaks, "messages")


def _echoes(asked: CompletionRequest, served: Served) -> list[str]:
    """The text in front of each answer."""
    return [
        prompt.text(served.codec) if asked.echo else ""
        for prompt in asked.prompt
        for _ in range(asked.answers)
    ]


# Embeddings, of classifiers of texts: the pooled state at a chosen step.


_EXAMPLES_EMBEDDING: list[JsonDict] = [
    {"model": "topics", "input": "Shares slide as oil climbs."},
    {"input": ["A film that stays with you.", "A dull mess."], "steps": 2},
]


class EmbeddingRequest(BudgetFields):
    """Texts to turn into vectors."""

    model_config = ConfigDict(json_schema_extra={"examples": [*_EXAMPLES_EMBEDDING]})

    input: Texts = Field(
        description=f"A text, or a list of up to {MAX_INPUTS}. Texts that are too long are cut, "
        "as in training. Lists of tokens are refused: those of another tokenizer would mean other "
        "words."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        "float",
        description="`float`: a list of numbers. `base64`: as little-endian 32-bit floats.",
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Accepted only if it is the width of the model's vectors, which are never cut.",
    )
    user: str | None = Field(None, description="Accepted and ignored.")


class EmbeddingItem(TypedDict):
    """The vector of one text."""

    object: Annotated[Literal["embedding"], Field(description="Type of this object.")]
    index: Annotated[int, Field(description="Index of the text in the request, from 0.")]
    embedding: Annotated[
        list[float] | str, Field(description="The vector, of length 1, as `encoding_format` says.")
    ]
    steps: Annotated[
        int,
        Field(description="Steps taken. Only vectors of the same steps are made to be compared."),
    ]


class EmbeddingUsage(TypedDict):
    """Tokens read."""

    prompt_tokens: Annotated[int, Field(description="Tokens of all texts, as the model read them.")]
    total_tokens: Annotated[int, Field(description="The same.")]


class EmbeddingReport(TypedDict):
    """What this server did for the answer. Not part of OpenAI's API."""

    budget: Annotated[Budget, Field(description="The work that was done, at the fewest steps.")]
    timing: Annotated[Timing, Field(description="Where the time of the request went.")]
    truncated: Annotated[list[int], Field(description="Indices of texts that were cut to fit.")]


class EmbeddingResponse(TypedDict):
    """One vector for each text, in the same order."""

    object: Annotated[Literal["list"], Field(description="Type of this object.")]
    model: Annotated[str, Field(description="The model that answered.")]
    data: Annotated[list[EmbeddingItem], Field(description="One entry per text, in order.")]
    usage: Annotated[EmbeddingUsage, Field(description="Tokens read.")]
    stepdial: Annotated[EmbeddingReport, Field(description="Steps and time.")]


def embedder(catalog: Catalog, name: str | None) -> Served:
    """The model with this name, or the first that gives embeddings; NoEmbeddings if none does."""
    if name is None:
        for one in catalog:
            if one.manifest.embedding is not None:
                return one
        raise NoEmbeddings(
            "no served model gives embeddings: serve a classifier of texts that was exported by "
            "this release",
            param="model",
        )
    served = catalog.find(name)
    manifest = served.manifest
    if manifest.embedding is not None:
        return served
    if manifest.task == "classify" and manifest.input.kind == "text":
        reason = (
            "it was exported before there were embeddings, or its readout has no pooled state; "
            "export its run again with this release"
        )
    else:
        reason = "only classifiers of texts do: name another model, or leave model out"
    raise NoEmbeddings(f"{name} gives no embeddings: {reason}", param="model")


def _check_dimensions(dimensions: int | None, served: Served) -> None:
    if dimensions not in (None, served.manifest.embedding):
        raise InvalidField(
            f"dimensions is {dimensions}, but the vectors of {served.name} have "
            f"{served.manifest.embedding} numbers and are never cut: leave it out",
            param="dimensions",
        )


def _embedding_submission(
    exchange: Exchange, engine: Engine, served: Served, asked: EmbeddingRequest
) -> Submission:
    """With the steps of all texts. Only a deadline lets the server choose: vectors must fit."""
    if asked.max_disagreement is not None:
        raise InvalidField(
            "max_disagreement is about labels, and says nothing of vectors: send steps or effort",
            param="max_disagreement",
        )
    submission = Submission.of(exchange, engine, served, asked)
    if asked.deadline_ms is None:
        submission.decision = submission.decision._replace(choices=())
    return submission


def unit_vectors(found: Sequence[Scores | Tags]) -> FloatArray:
    """The vectors of all texts (B, D), each of length 1."""
    states = np.array([one for one in found if not isinstance(one, Tags)])  # (B, D)
    lengths = np.sqrt((states**2).sum(axis=1, keepdims=True))
    vectors: FloatArray = (states / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
    return vectors


def _embedding_items(
    vectors: FloatArray, steps: Sequence[int], as_bytes: bool
) -> Iterator[EmbeddingItem]:
    for index, (vector, taken) in enumerate(zip(vectors, steps, strict=True)):
        shown: list[float] | str
        if as_bytes:
            shown = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        else:
            shown = vector.tolist()
        yield {"object": "embedding", "index": index, "embedding": shown, "steps": taken}


# The routes.


def _responses(chunk: str) -> dict[int | str, dict[str, Any]]:
    about = STREAM_ABOUT.format(chunk=chunk)
    return {
        200: {"description": about, "content": {"text/event-stream": {}}},
        **OPENAI_PROBLEMS,
        400: {"model": OpenAIError, "description": _NOT_READ},
    }


def openai_routes(engine: Engine, reader: Reader) -> APIRouter:
    router, settings = APIRouter(tags=["openai"], route_class=Route), reader.settings

    @router.post(
        "/v1/completions",
        summary="OpenAI-compatible completion of prompts, or translation of texts",
        response_model=CompletionResponse,
        responses=_responses("CompletionChunk"),
        openapi_extra=takes(CompletionRequest),
    )
    async def completions(exchange: ThisExchange) -> Response:
        asked = await read_json(exchange, CompletionRequest, reader)
        served = engine.catalog.pick(asked.model, WRITING)
        submission = _submission(exchange, engine, served, asked)
        max_tokens = asked.limit(settings.max_tokens)
        texts = len(asked.prompt) * asked.candidates
        check_size(texts, max_tokens, asked.logprobs, settings, texts_param=asked.texts_field)
        with _context_length():
            prompts = await reader.read(
                exchange,
                sum(prompt.characters for prompt in asked.prompt),
                submission.deadline,
                lambda: [prompt.read(served.codec) for prompt in asked.prompt],
            )
        response_format = CompletionFormat(_echoes(asked, served), asked.logprobs is not None)
        answer = OpenAIAnswer(submission, response_format, asked, prompts, asked.candidates)
        ranks = asked.candidates > asked.answers and asked.logprobs is None
        return await answer.respond(max_tokens, 0 if ranks else asked.logprobs)

    @router.post(
        "/v1/chat/completions",
        summary="OpenAI-compatible chat completion",
        response_model=ChatResponse,
        responses=_responses("ChatChunk"),
        openapi_extra=takes(ChatRequest),
    )
    async def chat(exchange: ThisExchange) -> Response:
        asked = await read_json(exchange, ChatRequest, reader)
        served = engine.catalog.pick(asked.model, WRITING)
        chats = _chats_of(served)
        submission = _submission(exchange, engine, served, asked)
        max_tokens = asked.limit(settings.max_tokens)
        check_size(asked.answers, max_tokens, asked.alternatives, settings, asked.limit_field)
        with _context_length():
            prompt = await reader.read(
                exchange,
                sum(message.characters for message in asked.messages),
                submission.deadline,
                lambda: read_chat(asked.messages, chats, served.codec),
            )
        response_format = ChatFormat(asked.alternatives is not None)
        answer = OpenAIAnswer(submission, response_format, asked, [prompt], asked.answers)
        with _named("max_tokens", asked.limit_field):
            return await answer.respond(max_tokens, asked.alternatives)

    @router.post(
        "/v1/embeddings",
        summary="OpenAI-compatible embeddings of texts",
        response_model=EmbeddingResponse,
        response_description="One vector per text.",
        responses=OPENAI_PROBLEMS,
        openapi_extra=takes(EmbeddingRequest),
    )
    async def embeddings(exchange: ThisExchange) -> Response:
        asked = await read_json(exchange, EmbeddingRequest, reader)
        served = embedder(engine.catalog, asked.model)
        _check_dimensions(asked.dimensions, served)
        submission = _embedding_submission(exchange, engine, served, asked)
        check_count(asked.input, settings.max_inputs)
        inputs, event = await submission.classify(
            reader,
            len(asked.input),
            sum(len(item.value) for item in asked.input),
            lambda: read_items(asked.input, served.manifest, served.text, truncate=True),
            embeds=True,
        )
        spent = submission.timing(event.span)
        vectors = unit_vectors([row.found for row in event.rows])
        tokens = sum(len(one.row) for one in inputs)
        body = {
            "object": "list",
            "model": served.name,
            "data": _embedding_items(vectors, event.steps, asked.encoding_format == "base64"),
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "stepdial": {
                "budget": budget_of(submission.decision.served_at(min(event.steps))),
                "timing": spent,
                "truncated": [index for index, one in enumerate(inputs) if one.truncated],
            },
        }
        answered = answer_of(body, vectors.size, server_timing(spent))
        engine.answer.observe(engine.clock() - event.span.ended_s)
        return answered

    return router
