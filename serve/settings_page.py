"""The page of the documentation that lists every setting.

Knows the settings and Markdown; deliberately nothing of what uses them.
"""

from typing import get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from serve.setting_names import OTHER_VARIABLES, flag, variable
from serve.settings import Settings

_HEAD = """# Settings

<!-- Written by `python -m docs.generate` from serve/settings.py. -->

Every setting of `stepdial serve` is a flag, an environment variable and a key of a settings file.
Flags come before the environment, the environment before the file, the file before the default.
`stepdial serve --help` lists the same. A name that is no setting ends the server at its start, and
so does a value that cannot be.

```toml
# stepdial.toml, for `stepdial serve --config stepdial.toml`, or STEPDIAL_CONFIG=stepdial.toml
port = 9000
queue_limit = 128
access_log = true
cors_origins = ["https://app.example.org"]
```

Relative paths begin where the server was started, wherever they are written. A switch has two
flags: `--degrade` and `--no-degrade`.

| setting | flag and variable | default | may be | what it sets |
|---|---|---|---|---|
"""
_MIDDLE = """
Beside the settings, the environment may hold:

| variable | what it holds |
|---|---|
"""
_SIGNS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))


def render() -> str:
    """The page as Markdown."""
    rows = [_row(name, field) for name, field in Settings.model_fields.items()]
    others = [f"| `{name}` | {about} |" for name, about in OTHER_VARIABLES.items()]
    return _HEAD + "\n".join(rows) + "\n" + _MIDDLE + "\n".join(others) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    about = f"{field.description}".replace("|", "\\|")
    names = f"`{flag(name)}`<br>`{variable(name)}`"
    return f"| `{name}` | {names} | {_default(name, field)} | {_allowed(field)} | {about} |"


def _default(name: str, field: FieldInfo) -> str:
    if name == "zoo":
        return "the zoo that comes with Stepdial"
    if field.default in (None, ()):
        return ""
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return f"`{field.default}`"


def _allowed(field: FieldInfo) -> str:
    if field.annotation is bool:
        return "on, off"
    limits = [
        f"{sign} {getattr(limit, key):,}"
        for kind, key, sign in _SIGNS
        for limit in field.metadata
        if isinstance(limit, kind)
    ]
    if limits:
        return ", ".join(limits)
    words = [word for word in get_args(field.annotation) if isinstance(word, str)]
    return ", ".join(f"`{word}`" for word in words)
