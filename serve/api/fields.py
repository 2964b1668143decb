"""Fields of requests and answers that several routes share, every one documented.

What every request makes is plain dictionaries, which are made and written several times as quickly
as objects that check themselves.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator
from pydantic.config import JsonDict
from typing_extensions import TypedDict

from serve.budget import Ask, Decision, Reason
from serve.bundle import Method, Metric
from serve.engine.sampling import MAX_SEED
from serve.inputs.values import MAX_INPUTS, Items, Text

METRIC = "`loss` (nats a token; lower is better), `accuracy`, or `bleu` (0 to 100)."
_FINISH = (
    "`stop`: a stop string came, or a translation was complete; `length`: the most tokens were "
    "written."
)


class Answer(BaseModel):
    """A part of a response."""

    model_config = ConfigDict(frozen=True)


class Expected(TypedDict):
    """The measured quality of the rung that was used, beside that of the full one."""

    metric: Annotated[Metric, Field(description=METRIC)]
    value: Annotated[float, Field(description="Of the steps that were used, on held-out data.")]
    full_value: Annotated[float, Field(description="Of the full steps, on the same data.")]


class Budget(TypedDict):
    """The work that was done."""

    steps: Annotated[int, Field(description="Steps that were taken.")]
    method: Annotated[Method, Field(description="How a step uses the velocity.")]
    nfe: Annotated[int, Field(description="Velocity evaluations of those steps: the true cost.")]
    reason: Annotated[
        Reason,
        Field(
            description="What decided: `exact` (the request's steps), `effort`, `disagreement` "
            "(max_disagreement), `deadline` (deadline_ms), `load` (fewer than usual, since much "
            "waited), or `default`."
        ),
    ]
    full_steps: Annotated[int, Field(description="The most steps that the model's ladder has.")]
    expected: Annotated[
        Expected,
        Field(
            description="How good answers of these steps are; of early ones, that of the full "
            "steps, which they differ from as rarely as max_disagreement says."
        ),
    ]
    max_disagreement: NotRequired[
        Annotated[
            float,
            Field(
                description="The certified level that was applied: how often such an answer "
                "differs from that of the full steps at most. Left out where no answer could "
                "come early."
            ),
        ]
    ]


def budget_of(decision: Decision, evaluations: int | None = None) -> Budget:
    """What was done by this decision, in so many evaluations if not all of the rung's."""
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

    queue_ms: Annotated[float, Field(description="Waiting for the first call of the model.")]
    compute_ms: Annotated[float, Field(description="From the first call to the end of the last.")]
    total_ms: Annotated[float, Field(description="From the arrival of the request to this answer.")]


def server_timing(timing: Timing) -> tuple[bytes, bytes]:
    """The header that says it to browsers."""
    queue_ms, compute_ms, total_ms = timing.values()
    said = f"queue;dur={queue_ms}, compute;dur={compute_ms}, total;dur={total_ms}"
    return b"server-timing", said.encode()


class LabelScore(TypedDict):
    """A label and how likely it is."""

    label: Annotated[str, Field(description="One of the model's labels.")]
    score: Annotated[float, Field(description="Its probability under the model.")]


class ClassifyResult(TypedDict):
    """The answer for one input."""

    label: Annotated[str, Field(description="The likeliest label.")]
    score: Annotated[float, Field(description="Its probability under the model.")]
    top: Annotated[list[LabelScore], Field(description="The likeliest labels, likeliest first.")]
    truncated: Annotated[bool, Field(description="Whether a text was cut to fit the model.")]
    budget: Annotated[Budget, Field(description="The work that was done.")]
    trace: NotRequired[
        Annotated[list["Readout"], Field(description="One for each step, if asked for.")]
    ]


class TokenLabel(TypedDict):
    """A part of the text and its label: a character, or a word between spaces."""

    text: Annotated[
        str, Field(description="The character, or the word: it has the label of its first token.")
    ]
    start: Annotated[
        int, Field(description="Where it begins in the input, in characters (Unicode code points).")
    ]
    end: Annotated[int, Field(description="Where it ends: the first character behind it.")]
    label: Annotated[str, Field(description="Its likeliest label.")]
    score: Annotated[float, Field(description="The probability of that label under the model.")]


class TagResult(TypedDict):
    """The answer for one text of a model that labels each token."""

    tokens: Annotated[
        list[TokenLabel],
        Field(
            description="Every character of a model of characters, else every word, in their order."
        ),
    ]
    text: NotRequired[
        Annotated[
            str,
            Field(
                description="The input with the label of each character in its place, of a model "
                "whose labels are characters: a puzzle filled in."
            ),
        ]
    ]
    truncated: Annotated[
        bool, Field(description="Whether the text was cut to fit the model: the rest has no label.")
    ]
    budget: Annotated[Budget, Field(description="The work that was done.")]
    trace: NotRequired[
        Annotated[list["Readout"], Field(description="One for each step, if asked for.")]
    ]


class Readout(TypedDict):
    """What was read out after a step."""

    steps: Annotated[int, Field(description="Steps that had been taken.")]
    labels: Annotated[
        list[str],
        Field(description="The likeliest label of each token in `tokens`; of other models one."),
    ]
    scores: Annotated[list[float], Field(description="The probability of each of them.")]
    text: NotRequired[
        Annotated[str, Field(description="As `text` of the result, with these labels.")]
    ]


class ClassifyResponse(TypedDict):
    """One result for each input, in the same order."""

    id: Annotated[str, Field(description="Of the request; also in the header x-request-id.")]
    model: Annotated[str, Field(description="The model that answered.")]
    results: Annotated[
        list[ClassifyResult] | list[TagResult],
        Field(description="One for each input, in their order; `tokens` if the task is `tag`."),
    ]
    timing: Annotated[Timing, Field(description="Where the time went.")]


class Usage(Answer):
    """Tokens read and written."""

    prompt_tokens: int = Field(description="Tokens of the prompt.")
    completion_tokens: int = Field(description="Tokens of the answer.")
    total_tokens: int = Field(description="Both together.")


class Alternative(Answer):
    """A token that could have come."""

    token: str = Field(description="The text of a token; U+FFFD for a part of a character.")
    logprob: float = Field(description="Its log-probability under the model.")


class TokenScore(Answer):
    """How likely the model found a token."""

    token: str = Field(description="The text of the token; U+FFFD for a part of a character.")
    logprob: float = Field(description="Its log-probability under the model.")
    top: list[Alternative] = Field(description="The likeliest tokens, likeliest first.")


class GenerateResponse(Answer):
    """The text that continues the prompt, or translates it."""

    id: str = Field(description="Of the request; also in the header x-request-id.")
    model: str = Field(description="The model that answered.")
    text: str = Field(description="The answer, without the prompt and without the stop string.")
    finish_reason: Literal["stop", "length"] = Field(description=_FINISH)
    seed: int = Field(description="The seed that was used; send it to get this answer again.")
    logprobs: list[TokenScore] | None = Field(
        None, description="One for each token of the answer, if asked for."
    )
    usage: Usage = Field(description="Tokens read and written.")
    budget: Budget = Field(description="The work that was done.")
    timing: Timing = Field(description="Where the time went.")


class TokenChunk(Answer):
    """The data of an event without a name: one more token."""

    index: int = Field(description="Number of the token in the answer, from 0.")
    text: str = Field(
        description="Text to append. Empty while a character is not complete or a stop string "
        "may be coming; a later event then carries it."
    )
    steps: int = Field(description="Steps that this token took.")
    logprob: TokenScore | None = Field(None, description="Its likelihood, if asked for.")


class DoneChunk(Answer):
    """The data of the event `done`, the last of a stream that went well."""

    id: str = Field(description="Of the request; also in the header x-request-id.")
    model: str = Field(description="The model that answered.")
    finish_reason: Literal["stop", "length"] = Field(description=_FINISH)
    seed: int = Field(description="The seed that was used.")
    usage: Usage = Field(description="Tokens read and written.")
    budget: Budget = Field(description="The work that was done.")
    timing: Timing = Field(description="Where the time went.")


class Health(Answer):
    """That all is well; what is not comes as an error."""

    status: str = Field(description="`live` or `ready`.")


class Problem(BaseModel):
    """What went wrong, and what to do about it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    code: str = Field(description="For programs: stable.")
    message: str = Field(description="For people: what to do.")
    param: str | None = Field(description="The field that is to blame, if one is.")


class ErrorResponse(Answer):
    """Every answer that is not a 200."""

    error: Problem = Field(description="What went wrong.")


# What clients may send: every field, its type, its limits.


MAX_LOGPROBS = 5
MAX_BEAMS = 8
DEFAULT_MAX_TOKENS = 128
MAX_DEADLINE_MS = 3_600_000.0

Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]

_EXAMPLES_CLASSIFY: list[JsonDict] = [
    {"input": "A film that stays with you.", "steps": 2},
    {"model": "logic", "input": "1...5.", "steps": 8, "trace": True},
    {"input": {"image": [[0, 64, 255], [0, 128, 255], [0, 64, 255]]}, "top_k": 3},
    {"input": {"image": "data:image/png;base64,iVBORw0KGgo..."}, "effort": "low"},
    {"input": {"points": [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.0, 0.5, 0.5]]}},
]
_EXAMPLES_GENERATE: list[JsonDict] = [
    {"prompt": "ROMEO:", "max_tokens": 64, "steps": 4, "seed": 7},
    {"prompt": "Ein Hund läuft über den Strand.", "num_beams": 4},
]


def whole(value: Any) -> Any:
    """JSON knows numbers only: 4.0 is the integer 4, and some languages write it so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class BudgetFields(BaseModel):
    """How much work a request asks for; without any of these, the model's default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    model: str | None = Field(
        None,
        max_length=200,
        description="Name of the model; by default the first served that has this task.",
    )
    steps: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="Exactly this many steps: one of the model's ladder. Never changed by the "
        "server. Not together with effort.",
    )
    effort: Literal["low", "medium", "high", "max"] | None = Field(
        None,
        description="A word instead of a number. Every model takes all four: one that its ladder "
        "does not name means the nearest that it does. Not together with steps.",
    )
    deadline_ms: float | None = Field(
        None,
        gt=0,
        le=MAX_DEADLINE_MS,
        description="The whole answer within this time of the request's arrival, with the most "
        "steps that are predicted to make it. 422 if that is impossible even for an idle server, "
        "429 if it is because of what waits, 504 if the time passes after all. With steps or "
        "effort, those are kept.",
    )
    min_steps: int | None = Field(
        None, ge=1, le=2**31 - 1, description="Where the server chooses, at least this many steps."
    )
    max_steps: int | None = Field(
        None, ge=1, le=2**31 - 1, description="Where the server chooses, at most this many steps."
    )
    max_disagreement: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Stop early where the answer is sure: the share of answers that may differ "
        "from those of the full steps, at most. Only for models that were calibrated for it. Not "
        "together with steps or effort.",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        return whole(value)

    @property
    def ask(self) -> Ask:
        return Ask(
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
        description="What the model takes, as `input` of /v1/models says: a text, an image or a "
        f"cloud of points; or a list of up to {MAX_INPUTS}; each gets a result of its own. "
        "Without `model`, the first model that takes this kind answers."
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description="How many labels to list with their scores, at most as many as the model has; "
        "by default up to 5. Not for a model that labels each token, which gives one label each.",
    )
    trace: bool | None = Field(
        False,
        description="Also report what was read out after each step: how the answer came to be. "
        "Only for models that run step by step here.",
    )
    truncate: bool | None = Field(
        True,
        description="Cut a text that is too long for the model as it was cut in training; if "
        "false, such a text is refused with 422. Means nothing for images and points.",
    )


class GenerateRequest(BudgetFields):
    """A prompt to continue, or a text to translate."""

    model_config = ConfigDict(json_schema_extra={"examples": [*_EXAMPLES_GENERATE]})

    prompt: Text = Field(
        description="The text to continue, or to translate; at most the model's window of tokens, "
        "and a text to translate is never cut. When prompt and answer outgrow the window, a "
        "generator goes on from its last half."
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description=f"How many tokens to write at most, by default {DEFAULT_MAX_TOKENS}; a "
        "setting of the server limits it. A translation also ends at the model's own limit, "
        "`target_max_tokens`.",
    )
    num_beams: int | None = Field(
        None,
        ge=1,
        le=MAX_BEAMS,
        description="Translation only: keep this many translations at a time, and answer the one "
        "of the greatest mean log-probability a token. 1 is greedy. The answer is not random, so "
        "temperature must be 0 or left out; with `stream` it comes as one piece.",
    )
    temperature: float | None = Field(
        None,
        ge=0.0,
        le=2.0,
        description="0 always takes the likeliest token; higher is more varied. By default 1 to "
        "continue a prompt, and 0 to translate.",
    )
    top_k: int | None = Field(
        None, ge=1, description="Choose among the k likeliest tokens only, after temperature."
    )
    top_p: float | None = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="Choose among the likeliest tokens that together have this probability, "
        "after temperature and top_k.",
    )
    seed: int | None = Field(
        None,
        ge=0,
        le=MAX_SEED,
        description="The same seed and steps give the same answer; if missing, one is drawn and "
        "reported.",
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = Field(
        None, description="A text, or up to 4, before the first of which the answer ends."
    )
    stream: bool | None = Field(
        False,
        description="Send each token as it is chosen, as server-sent events, then exactly one "
        "event `done` or `error`.",
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Report the log-probability of each token, and this many of the likeliest, "
        "under the model itself: without temperature and filters.",
    )

    def limit(self, most: int) -> int:
        """How many tokens to write at most; by default no more than a server does."""
        return min(DEFAULT_MAX_TOKENS, most) if self.max_tokens is None else self.max_tokens

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop
