"""Fields of requests and answers that several routes share, with their documentation.

Answers that every request makes are typed dictionaries: they are several times faster to make and
write than pydantic models.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator
from pydantic.config import JsonDict
from typing_extensions import TypedDict

from serve.budget import BudgetRequest, Decision, Reason
from serve.bundle import Method, Metric
from serve.engine.sampling import MAX_SEED
from serve.inputs.values import MAX_INPUTS, Items, Text

METRIC = "`loss` (nats per token, lower is better), `accuracy`, or `bleu` (0 to 100)."
_FINISH = (
    "`stop`: a stop string was reached, or the model ended its text. `length`: max_tokens were "
    "generated."
)


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
        int, Field(description="Evaluations of the model's velocity in those steps: the true cost.")
    ]
    reason: Annotated[
        Reason,
        Field(
            description="Why this step count: `exact` (the request set `steps`), `effort`, "
            "`disagreement` (`max_disagreement`), `deadline` (`deadline_ms`), "
            "`load` (fewer than usual, because the server was busy) or `default`."
        ),
    ]
    full_steps: Annotated[int, Field(description="Largest step count on the model's ladder.")]
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


def budget_of(decision: Decision, evaluations: int | None = None) -> Budget:
    """The budget of this decision; `evaluations` if the row took fewer than its rung has."""
    rung, full = decision.rung, decision.full
    nfe = rung.nfe if evaluations is None else evaluations
    budget: Budget = {
        "steps": rung.steps * nfe // rung.nfe,
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


class Timing(TypedDict):
    """Where the time went, in milliseconds."""

    queue_ms: Annotated[
        float, Field(description="Waiting in the queue, until the first model call.")
    ]
    compute_ms: Annotated[
        float, Field(description="From the start of the first model call to the end of the last.")
    ]
    total_ms: Annotated[float, Field(description="From the arrival of the request to this answer.")]


def server_timing(timing: Timing) -> tuple[bytes, bytes]:
    """The Server-Timing header, which browsers show."""
    queue_ms, compute_ms, total_ms = timing.values()
    said = f"queue;dur={queue_ms}, compute;dur={compute_ms}, total;dur={total_ms}"
    return b"server-timing", said.encode()


class LabelScore(TypedDict):
    """A label and how likely it is."""

    label: Annotated[str, Field(description="One of the model's labels.")]
    score: Annotated[float, Field(description="Probability that the model gives it.")]


class ClassifyResult(TypedDict):
    """The answer for one input."""

    label: Annotated[str, Field(description="Most likely label.")]
    score: Annotated[float, Field(description="Probability that the model gives it.")]
    top: Annotated[
        list[LabelScore], Field(description="Most likely labels, the most likely first.")
    ]
    truncated: Annotated[bool, Field(description="Whether a text was cut to fit the model.")]
    budget: Annotated[Budget, Field(description="The work that was done.")]
    trace: NotRequired[
        Annotated[
            list["Readout"],
            Field(
                description="What the model would have answered after "
                "each step, if `trace` was set."
            ),
        ]
    ]


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


class TagResult(TypedDict):
    """The answer for one text of a model that labels each token."""

    tokens: Annotated[
        list[TokenLabel],
        Field(
            description="Every character for a model that labels characters, else every word, "
            "in order."
        ),
    ]
    text: NotRequired[
        Annotated[
            str,
            Field(
                description="The input with each character replaced by its label, for a model "
                "whose labels are characters: a filled-in puzzle, for example."
            ),
        ]
    ]
    truncated: Annotated[
        bool,
        Field(
            description="Whether the text was cut to fit the model. The part cut off has no labels."
        ),
    ]
    budget: Annotated[Budget, Field(description="The work that was done.")]
    trace: NotRequired[
        Annotated[
            list["Readout"],
            Field(
                description="What the model would have answered after "
                "each step, if `trace` was set."
            ),
        ]
    ]


class Readout(TypedDict):
    """What the model would have answered after a step."""

    steps: Annotated[int, Field(description="Steps taken so far.")]
    labels: Annotated[
        list[str],
        Field(
            description="Most likely label of each entry of `tokens`; for a classifier, one label."
        ),
    ]
    scores: Annotated[list[float], Field(description="Probability of each of these labels.")]
    text: NotRequired[
        Annotated[str, Field(description="Like `text` of the result, with these labels.")]
    ]


class ClassifyResponse(TypedDict):
    """One result for each input, in the same order."""

    id: Annotated[str, Field(description="Id of the request, also in the header x-request-id.")]
    model: Annotated[str, Field(description="The model that answered.")]
    results: Annotated[
        list[ClassifyResult] | list[TagResult],
        Field(
            description="One result per input, in order. Results have `tokens` if the model's "
            "task is `tag`."
        ),
    ]
    timing: Annotated[Timing, Field(description="Where the time went.")]


class Usage(Answer):
    """Tokens read and written."""

    prompt_tokens: int = Field(description="Tokens in the prompt.")
    completion_tokens: int = Field(description="Tokens in the answer.")
    total_tokens: int = Field(description="Sum of both.")


class Alternative(Answer):
    """A token that could have been chosen."""

    token: str = Field(description="Text of the token; U+FFFD if it is part of a character.")
    logprob: float = Field(description="Log-probability that the model gives it.")


class TokenScore(Answer):
    """Log-probability of a token of the answer, and of its alternatives."""

    token: str = Field(description="Text of the token; U+FFFD if it is part of a character.")
    logprob: float = Field(description="Log-probability that the model gives it.")
    top: list[Alternative] = Field(description="Most likely tokens, the most likely first.")


class GenerateResponse(Answer):
    """The text that continues the prompt, or translates it."""

    id: str = Field(description="Id of the request, also in the header x-request-id.")
    model: str = Field(description="The model that answered.")
    text: str = Field(description="The answer, without the prompt and the stop string.")
    finish_reason: Literal["stop", "length"] = Field(description=_FINISH)
    seed: int = Field(description="Seed that was used. Send it to get this answer again.")
    logprobs: list[TokenScore] | None = Field(
        None, description="One entry per token of the answer, if `logprobs` was set."
    )
    usage: Usage = Field(description="Tokens read and written.")
    budget: Budget = Field(description="The work that was done.")
    timing: Timing = Field(description="Where the time went.")


class TokenChunk(Answer):
    """Data of an event without a name: one more token."""

    index: int = Field(description="Index of the token in the answer, from 0.")
    text: str = Field(
        description="Text to append. Empty while a character is incomplete or a stop string may "
        "have begun; a later event carries the text."
    )
    steps: int = Field(description="Steps taken for this token.")
    logprob: TokenScore | None = Field(
        None, description="Log-probability of the token, if `logprobs` was set."
    )


class DoneChunk(Answer):
    """Data of the event `done`, the last one of a stream that succeeded."""

    id: str = Field(description="Id of the request, also in the header x-request-id.")
    model: str = Field(description="The model that answered.")
    finish_reason: Literal["stop", "length"] = Field(description=_FINISH)
    seed: int = Field(description="Seed that was used.")
    usage: Usage = Field(description="Tokens read and written.")
    budget: Budget = Field(description="The work that was done.")
    timing: Timing = Field(description="Where the time went.")


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


# Request fields.


MAX_LOGPROBS = 5
MAX_BEAMS = 8
DEFAULT_MAX_TOKENS = 128
MAX_DEADLINE_MS = 3_600_000.0

Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]

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
        description="Use exactly this many steps, which must be on the model's ladder. The "
        "server never changes it. Cannot be combined with effort.",
    )
    effort: Literal["low", "medium", "high", "max"] | None = Field(
        None,
        description="A named step count. Every model takes all four words: one that its ladder "
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
        "that may differ from those at full steps. Only for models that were "
        "calibrated for it. Cannot be combined with steps or effort.",
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


class GenerateRequest(BudgetFields):
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
    top_p: float | None = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="Sample only from the most likely tokens that together have this "
        "probability, after temperature and top_k.",
    )
    seed: int | None = Field(
        None,
        ge=0,
        le=MAX_SEED,
        description="The same seed and steps give the same answer. If left out, a random seed "
        "is used and returned.",
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = Field(
        None,
        description="A stop string, or up to 4. The answer ends before the first one that occurs.",
    )
    stream: bool | None = Field(
        False,
        description="Stream each token as a server-sent event, then exactly one event `done` or "
        "`error`.",
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Return the log-probability of each token, and of this many of the most "
        "likely tokens. They are the model's own, before temperature, top_k and "
        "top_p.",
    )

    def limit(self, most: int) -> int:
        """Most tokens to generate: as asked, else the default, at most the server's limit."""
        return min(DEFAULT_MAX_TOKENS, most) if self.max_tokens is None else self.max_tokens

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop
