"""From the messages of a chat to a prompt: the template of a bundle, or a plain one.

A template is code that came with the model, so it runs in a sandbox, and writes only so much. It
deliberately knows neither tokens nor HTTP.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serve.bundle import Bundle, BundleError
from serve.errors import Unprocessable
from serve.inputs.messages import Message

MAX_TEMPLATE_BYTES = 1 << 16
MAX_PROMPT_CHARACTERS = 1 << 22

# For models that were trained on no chats.
PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n"
    "{% endfor %}Assistant:"
)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A template multiplies numbers only: one short product of texts could fill all memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" or not numbers:
            raise SecurityError("a template may multiply numbers only")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """Writes messages as a prompt."""

    def __init__(self, source: str, model: str) -> None:
        """TemplateSyntaxError if that is no template."""
        self._model = model
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(source)

    @classmethod
    def of(cls, bundle: Bundle) -> "ChatTemplate":
        """That of a bundle, or the plain one; BundleError if it cannot be used."""
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

    def prompt(self, messages: Sequence[Message]) -> str:
        """What the model is to continue; Unprocessable where the template does not take these."""
        written: list[str] = []
        left = MAX_PROMPT_CHARACTERS
        try:
            for piece in self._template.generate(
                messages=[message.members for message in messages],
                add_generation_prompt=True,
                bos_token="",
                eos_token="",
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
        except Exception as error:  # a template is code of others: it may raise anything
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
