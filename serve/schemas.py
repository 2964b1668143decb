"""What clients may send: every field, its type, its limits.

Knows shapes only; deliberately not which models there are, nor what they can do.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.config import JsonDict

from serve.budget import Ask
from serve.sampling import MAX_SEED, Sampling

MAX_INPUTS = 64
MAX_LOGPROBS = 5
DEFAULT_MAX_TOKENS = 128

Text = Annotated[str, StringConstraints(min_length=1)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]

_EXAMPLE_CLASSIFY: JsonDict = {"input": "A film that stays with you.", "steps": 2}
_EXAMPLE_GENERATE: JsonDict = {"prompt": "ROMEO:", "max_tokens": 64, "steps": 4, "seed": 7}


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

    @property
    def ask(self) -> Ask:
        return Ask(self.steps, self.effort)


class ClassifyRequest(BudgetFields):
    """Texts to label."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE_CLASSIFY]})

    input: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)] = Field(
        description=f"A text, or a list of up to {MAX_INPUTS}; each gets a result of its own."
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description="How many labels to list with their scores, at most as many as the model has; "
        "by default up to 5.",
    )
    truncate: bool = Field(
        True,
        description="Cut a text that is too long for the model as it was cut in training; if "
        "false, such a text is refused with 422.",
    )

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


class GenerateRequest(BudgetFields):
    """A prompt to continue."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE_GENERATE]})

    prompt: Text = Field(
        description="The text to continue; at most the model's window of tokens. When prompt and "
        "answer outgrow the window, the model goes on from its last half."
    )
    max_tokens: int = Field(
        DEFAULT_MAX_TOKENS,
        ge=1,
        description="How many tokens to write at most; a setting of the server limits it.",
    )
    temperature: float = Field(
        1.0,
        ge=0.0,
        le=2.0,
        description="0 always takes the likeliest token; higher is more varied.",
    )
    top_k: int | None = Field(
        None, ge=1, description="Choose among the k likeliest tokens only, after temperature."
    )
    top_p: float = Field(
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
    stream: bool = Field(
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

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def sampling(self, drawn_seed: int) -> Sampling:
        """How to choose tokens; the drawn seed stands in for a missing one."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=drawn_seed if self.seed is None else self.seed,
        )
