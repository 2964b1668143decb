"""The prompts of a completion: texts or lists of tokens, one or several.

Knows shapes only; what a model can read is its tokenizer's to say.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PlainValidator

from serve.errors import InvalidField
from serve.inputs.items import Text
from serve.inputs.text import TextCodec

# Texts of one request: as many as decode together by default, so that none waits for its own kin.
MAX_TEXTS = 16
# More than any window holds; how many a model reads is its own matter.
MAX_PROMPT_TOKENS = 2**17
_SAYS = "a string, or a list of tokens"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, not read yet."""

    value: str | tuple[int, ...]
    param: str  # where it stands in the request

    @property
    def characters(self) -> int:
        """How much text there is to encode."""
        return len(self.value) if isinstance(self.value, str) else 0

    def read(self, codec: TextCodec) -> list[int]:
        """Its tokens, if the model can read them."""
        if isinstance(self.value, str):
            return codec.encode_prompt(self.value, self.param)
        return codec.check_prompt(self.value, self.param)

    def text(self, codec: TextCodec) -> str:
        """What it says."""
        return self.value if isinstance(self.value, str) else codec.decode(list(self.value))


def check_prompts(value: object) -> tuple[Prompt, ...]:
    """The prompts of a request, in their order; InvalidField unless they have the right shape."""
    if not isinstance(value, list) or (value and _is_token(value[0])):
        return (_prompt(value, "prompt", f"{_SAYS}, or a list of these"),)
    if not value:
        raise InvalidField("prompt is an empty list: send at least 1 item", param="prompt")
    if len(value) > MAX_TEXTS:
        raise InvalidField(
            f"prompt has {len(value)} items: send at most {MAX_TEXTS}", param="prompt"
        )
    return tuple(_prompt(one, f"prompt[{index}]", _SAYS) for index, one in enumerate(value))


def _prompt(value: object, param: str, says: str) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise InvalidField(f"{param} is empty: send some text", param=param)
        return Prompt(value, param)
    if isinstance(value, list):
        if not value:
            raise InvalidField(f"{param} is empty: send at least 1 token", param=param)
        if len(value) > MAX_PROMPT_TOKENS:
            raise InvalidField(
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
        return value.is_integer()  # JSON knows numbers only: 4.0 is the integer 4
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
