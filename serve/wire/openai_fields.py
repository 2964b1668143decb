"""What requests in OpenAI's shape share: sampling, streaming, budgets; and what is refused.

Knows shapes only; deliberately neither models nor how requests are answered.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from serve.budget import Ask
from serve.bundle import Effort
from serve.engine.sampling import MAX_SEED
from serve.errors import InvalidField
from serve.inputs.values import MAX_TEXTS
from serve.wire.schemas import BudgetFields, Stop

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
            "`medium` and `high` themselves, `xhigh` and `max` mean `max`. Where no rung has that "
            "name, the next above it, else the greatest. Not together with steps or effort.",
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
        return asked._replace(effort=EFFORT_OF[self.reasoning_effort], effort_or_more=True)

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
