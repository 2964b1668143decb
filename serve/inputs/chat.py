"""Chat messages, and the template that turns them into a prompt."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from serve.bundle import Bundle, BundleError
from serve.errors import InvalidField, Unprocessable

MAX_MESSAGES = 1024

Role = Literal["system", "developer", "user", "assistant"]
ROLES = get_args(Role)
NoItems = Annotated[list[Any], Field(max_length=0)] | None


class TextPart(BaseModel):
    """A text part of a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"] = Field(description="Always `text`: models here read nothing else.")
    text: str = Field(description="The text; parts are put together with nothing between.")


class ChatMessage(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid")

    role: Role = Field(description="Who says it; `developer` means `system`. There are no tools.")
    content: str | list[TextPart] = Field(description="What is said.")
    name: str | None = Field(None, description="Of the speaker, for templates that use it.")
    refusal: None = Field(None, description="Only null, as answers have it.")
    audio: None = Field(None, description="Only null, as answers have it.")
    function_call: None = Field(None, description="Only null: there are no tools.")
    tool_calls: NoItems = Field(None, description="Only null or empty: there are no tools.")
    annotations: NoItems = Field(None, description="Only null or empty, as answers have it.")
    parsed: None = Field(None, description="Only null, as clients add it to answers.")
    reasoning: None = Field(None, description="Only null, as answers of other servers have it.")
    reasoning_content: None = Field(None, description="Only null, as `reasoning`.")


_KEYS = ("role", "content", "name")
# Fields of assistant messages that clients send back as they got them: null or empty, depending on
# the server that made them.
_NEVER = ChatMessage.model_fields.keys() - {*_KEYS}
_LISTS = ("tool_calls", "annotations")


@dataclass(frozen=True, slots=True)
class Message:
    """One message, as a template sees it."""

    role: str
    content: str
    name: str | None = None

    @property
    def characters(self) -> int:
        """The length of the text to encode, if the template writes all of it."""
        return len(self.content) + len(self.name or "")

    @property
    def members(self) -> dict[str, str]:
        """The fields that a template sees."""
        members = {"role": self.role, "content": self.content}
        return members if self.name is None else members | {"name": self.name}


def check_messages(value: object) -> tuple[Message, ...]:
    """The messages of a request; InvalidField if they are malformed."""
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


# Templates. A bundle's template is code that came with the model, so it runs in a sandbox with
# limited output.


MAX_TEMPLATE_BYTES = 1 << 16
MAX_PROMPT_CHARACTERS = 1 << 22

# For models that were not trained on chats.
PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n"
    "{% endfor %}Assistant:"
)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Templates may multiply only numbers: one product of texts could fill all memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" or not numbers:
            raise SecurityError("a template may multiply numbers only")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """Turns messages into a prompt."""

    def __init__(self, source: str, model: str) -> None:
        """TemplateSyntaxError if this is not a template."""
        self._model = model
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(source)

    @classmethod
    def of(cls, bundle: Bundle) -> "ChatTemplate":
        """The bundle's template, or a plain one; BundleError if it cannot be used."""
        path = bundle.chat_template_path
        if path is None:
            return cls(PLAIN, bundle.manifest.name)
        try:
            return cls(_source(path), bundle.manifest.name)
        except TemplateSyntaxError as error:
            raise BundleError(
                f"is no chat template: {error.message} in line {error.lineno}; export the bundle "
                "again with one that Jinja can read",
                file=str(path),
            ) from None

    def prompt(self, messages: Sequence[Message], end_mark: str = "") -> str:
        """The prompt; Unprocessable if the template rejects the messages.

        `end_mark` stands behind each answer, as the token that ends it.
        """
        written: list[str] = []
        left = MAX_PROMPT_CHARACTERS
        try:
            for piece in self._template.generate(
                messages=[message.members for message in messages],
                add_generation_prompt=True,
                bos_token="",
                eos_token=end_mark,
            ):
                written.append(piece)
                left -= len(piece)
                if left < 0:
                    raise self._refusal(
                        f"writes them as more than {MAX_PROMPT_CHARACTERS} characters: send fewer"
                    )
        except Unprocessable:
            raise
        except TemplateError as error:
            raise self._refusal(f"does not take them: {error.message}") from None
        except Exception as error:  # a template may raise anything
            raise self._refusal(
                f"cannot write them ({type(error).__name__}: {str(error)[:200]}): send other "
                "roles or contents"
            ) from None
        return "".join(written)

    def _refusal(self, reason: str) -> Unprocessable:
        return Unprocessable(
            f"the chat template of {self._model} gets these messages, and {reason}",
            param="messages",
        )


def _source(path: Path) -> str:
    text = path.read_bytes()
    if len(text) > MAX_TEMPLATE_BYTES:
        raise BundleError(
            f"is larger than {MAX_TEMPLATE_BYTES} bytes, so it is no chat template; export the "
            "bundle again with a smaller one",
            file=str(path),
        )
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise BundleError(
            "is not UTF-8, so it is no chat template; export the bundle again", file=str(path)
        ) from None


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(str(reason)[:500])


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
