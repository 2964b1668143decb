"""What clients of OpenAI's API may send here: every field, its type, its limits.

Knows shapes only; deliberately not which models there are, nor what they can do.
"""

from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from serve.errors import InvalidField
from serve.inputs.chat import Messages
from serve.inputs.values import MAX_TEXTS, Prompts
from serve.wire.openai_fields import Only, OpenAIFields
from serve.wire.schemas import DEFAULT_MAX_TOKENS, MAX_LOGPROBS

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
