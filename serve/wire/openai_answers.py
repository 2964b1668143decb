"""What clients of OpenAI's API get: every field of every answer, documented.

Knows shapes only; the routes fill them.
"""

from typing import Literal

from pydantic import Field

from serve.wire.answers import Answer, Budget, Problem, Timing, Usage

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
