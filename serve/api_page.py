"""The page of the documentation that lists every route and shape.

Knows OpenAPI and Markdown; deliberately none of our routes.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from serve.app import create_app
from serve.catalog import Catalog
from serve.engine.engine import Engine
from serve.metrics import Metrics
from serve.settings import Settings

_HEAD = """# API reference

<!-- Written by `python -m docs.generate` from the server's OpenAPI document. -->

Every route, every field with its limits, every status. A running server has the same at `/docs` for
people and at `/openapi.json` for programs. What steps and deadlines mean is in
[budgets.md](budgets.md); the routes in the shape of others are in [openai.md](openai.md) and
[oip.md](oip.md), keys and limits in [security.md](security.md), each error code in
[errors.md](errors.md).
"""
_TITLES = {"openai": "OpenAI"}
_LIMITS = (
    ("minimum", "≥ {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "≤ {}"),
    ("exclusiveMaximum", "< {}"),
    ("minLength", "characters ≥ {}"),
    ("maxLength", "characters ≤ {}"),
    ("minItems", "items ≥ {}"),
    ("maxItems", "items ≤ {}"),
    ("pattern", "matches {}"),
)

Document = dict[str, Any]


def document() -> Document:
    """What a server of no models says of itself; the models change nothing of it."""
    settings = Settings()
    engine = Engine(Catalog(()), settings.limits, Metrics())
    return create_app(settings, engine).openapi()


def render(api: Document) -> str:
    """The page as Markdown."""
    shapes = sorted(api["components"]["schemas"].items(), key=lambda item: item[0].lower())
    parts = [_HEAD, *_routes(api), "## Shapes\n"]
    parts += [_shape(name, shape) for name, shape in shapes]
    return "\n".join(parts)


def _routes(api: Document) -> Iterator[str]:
    tags: dict[str, list[str]] = {}
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            (tag,) = operation["tags"]
            tags.setdefault(tag, []).append(_route(path, method.upper(), operation))
    for tag, routes in tags.items():
        yield f"## {_TITLES.get(tag, tag.capitalize())}\n"
        yield from routes


def _route(path: str, method: str, operation: Document) -> str:
    lines = [f"### {method} {path}", "", f"{operation['summary']}.", ""]
    content = operation.get("requestBody", {}).get("content", {})
    if content:
        lines += [f"Body: {_shapes_of(content)}.", ""]
    parameters = [
        [
            f"`{each['name']}`",
            each["in"],
            _kind(each["schema"]),
            _need(each["schema"], bool(each["required"])),
            each.get("description", ""),
        ]
        for each in operation.get("parameters", ())
    ]
    if parameters:
        lines += [_table(("parameter", "in", "type", "", ""), parameters), ""]
    answers = [
        [status, answer["description"], _shapes_of(answer.get("content", {}))]
        for status, answer in sorted(operation["responses"].items())
    ]
    return "\n".join([*lines, _table(("status", "when", "body"), answers), ""])


def _shape(name: str, shape: Document) -> str:
    required = shape.get("required", ())
    fields = sorted(shape.get("properties", {}).items(), key=lambda item: item[0] not in required)
    rows = [
        [f"`{field}`", _kind(kind), _need(kind, field in required), kind.get("description", "")]
        for field, kind in fields
    ]
    lines = [f"### {name}", ""]
    if shape.get("description"):
        lines += [" ".join(shape["description"].split()), ""]
    if rows:
        lines += [_table(("field", "type", "", ""), rows), ""]
    elif not shape.get("properties"):
        lines += [f"Type: {_kind(shape)}.", ""]
    return "\n".join(lines)


def _kind(field: Document) -> str:
    """A type in words, with its limits."""
    if "$ref" in field:
        return _link(field["$ref"])
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    options = field.get("anyOf") or field.get("oneOf")
    if options:
        kinds = [_kind(option) for option in options]
        return " or ".join(kind for kind in kinds if kind != "null" or "default" not in field)
    kind = str(field.get("type", "any"))
    if kind == "array":
        kind = f"list of {_kind(field.get('items', {}))}"
    elif isinstance(values := field.get("additionalProperties"), dict) and values:
        kind = f"object of {_kind(values)}"
    limits = [form.format(_limit(field[key])) for key, form in _LIMITS if key in field]
    return f"{kind} ({', '.join(limits)})" if limits else kind


def _limit(value: object) -> str:
    if isinstance(value, str):
        return f"`{value}`"
    assert isinstance(value, int | float)
    return f"{int(value) if value == int(value) else value:,}"


def _need(field: Document, required: bool) -> str:
    if required:
        return "required"
    default = field.get("default")
    return "" if default is None else f"default `{json.dumps(default)}`"


def _shapes_of(content: Document) -> str:
    found = []
    for media, of in content.items():
        schema = of.get("schema", {})
        found.append(_link(schema["$ref"]) if "$ref" in schema else f"`{media}`")
    return ", ".join(found)


def _link(reference: str) -> str:
    name = reference.rpartition("/")[2]
    return f"[{name}](#{name.lower()})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    marks = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in (head, marks, *rows))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
