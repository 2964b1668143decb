"""What clients may send: every field, its type, its limits.

Knows shapes only; deliberately not which models there are, nor what they can do.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator
from pydantic.config import JsonDict

from serve.budget import Ask
from serve.engine.sampling import MAX_SEED
from serve.inputs.values import MAX_INPUTS, Items, Text

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
        None, description="A named rung of the model's ladder. Not together with steps."
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
