"""The messages of a chat: who says what.

Knows shapes only; deliberately not how a model reads them.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from serve.errors import InvalidField

MAX_MESSAGES = 1024
ROLES = ("system", "developer", "user", "assistant")
# Parts of an assistant's message that clients send back as they got them: without a value, or as
# an empty list, depending on who answered.
_NEVER = ("refusal", "audio", "function_call", "tool_calls", "annotations")
_LISTS = ("tool_calls", "annotations")
_KEYS = ("role", "content", "name")


NoItems = Annotated[list[Any], Field(max_length=0)] | None


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"] = Field(description="Always `text`: models here read nothing else.")
    text: str = Field(description="The text; parts are put together with nothing between.")


class ChatMessage(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="Who says it; `developer` means `system`. There are no tools."
    )
    content: str | list[TextPart] = Field(description="What is said.")
    name: str | None = Field(None, description="Of the speaker, for templates that use it.")
    refusal: None = Field(None, description="Only null, as answers have it.")
    audio: None = Field(None, description="Only null, as answers have it.")
    function_call: None = Field(None, description="Only null: there are no tools.")
    tool_calls: NoItems = Field(None, description="Only null or empty: there are no tools.")
    annotations: NoItems = Field(None, description="Only null or empty, as answers have it.")


@dataclass(frozen=True, slots=True)
class Message:
    """One message, as a template reads it."""

    role: str
    content: str
    name: str | None = None

    @property
    def members(self) -> dict[str, str]:
        """What a template finds in it."""
        members = {"role": self.role, "content": self.content}
        return members if self.name is None else members | {"name": self.name}


def check_messages(value: object) -> tuple[Message, ...]:
    """The messages of a request; InvalidField unless they have the right shape."""
    if not isinstance(value, list):
        raise InvalidField("messages must be a list", param="messages")
    if not value:
        raise InvalidField("messages is an empty list: send at least 1 item", param="messages")
    if len(value) > MAX_MESSAGES:
        raise InvalidField(
            f"messages has {len(value)} items: send at most {MAX_MESSAGES}", param="messages"
        )
    return tuple(_message(one, f"messages[{index}]") for index, one in enumerate(value))


def _message(value: object, param: str) -> Message:
    if not isinstance(value, dict):
        raise InvalidField(f'{param} must be {{"role": ..., "content": ...}}', param=param)
    role, name = value.get("role"), value.get("name")
    if role in ("tool", "function"):
        raise InvalidField(
            f"{param}.role is {role!r}, but there are no tools here: send one of "
            f"{', '.join(ROLES)}",
            param=f"{param}.role",
        )
    for key in value:
        empty: tuple[object, ...] = (None, []) if key in _LISTS else (None,)
        if key in _NEVER and value[key] not in empty:
            raise InvalidField(
                f"{param}.{key} is not supported: leave it out", param=f"{param}.{key}"
            )
        if key not in _KEYS and key not in _NEVER:
            raise InvalidField(
                f"{param} has an unknown field {str(key)[:80]!r}: there are {', '.join(_KEYS)}",
                param=param,
            )
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidField(f"{param}.role must be one of {', '.join(ROLES)}", param=f"{param}.role")
    if name is not None and not isinstance(name, str):
        raise InvalidField(f"{param}.name must be a string", param=f"{param}.name")
    role = "system" if role == "developer" else role
    return Message(role, _content(value.get("content"), f"{param}.content"), name)


def _content(value: object, param: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidField(
            f'{param} must be a string, or a list of parts {{"type": "text", "text": ...}}',
            param=param,
        )
    return "".join(_part(one, f"{param}[{index}]") for index, one in enumerate(value))


def _part(value: Any, param: str) -> str:
    if isinstance(value, dict) and set(value) == {"type", "text"} and value["type"] == "text":
        text = value["text"]
        if isinstance(text, str):
            return text
    raise InvalidField(
        f'{param} must be {{"type": "text", "text": ...}}: the models here read text only',
        param=param,
    )


Messages = Annotated[
    tuple[Message, ...],
    PlainValidator(
        check_messages,
        json_schema_input_type=Annotated[
            list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)
        ],
    ),
]
