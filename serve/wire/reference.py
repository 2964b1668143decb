"""The page at /docs: the OpenAPI document as HTML, made here so that it needs no other host.

Knows OpenAPI; deliberately none of our routes.
"""

import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

EXAMPLE_URL = "http://127.0.0.1:8000/"  # whoever serves the page knows a better one
STYLE_FILE = Path(__file__).resolve().parent / "reference.css"

Document = dict[str, Any]


def render(document: Document) -> str:
    """The whole page."""
    title = escape(document["info"]["title"])
    parts = "".join(_operations(document))
    schemas = document.get("components", {}).get("schemas", {})
    shapes = "".join(_schema(name, schema) for name, schema in sorted(schemas.items()))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title} API</title><link rel="stylesheet" href="docs.css">'
        '<link rel="icon" href="static/icon.svg" type="image/svg+xml"></head><body><main>'
        f"<h1>{title} API</h1><p>{_prose(document['info'].get('description', ''))}</p>"
        '<p><a href="openapi.json">openapi.json</a> · <a href="./">playground</a></p>'
        f"{parts}<h2>Shapes</h2>{shapes}</main></body></html>"
    )


def _operations(document: Document) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield _operation(path, method.upper(), operation, document)


def _operation(path: str, method: str, operation: Document, document: Document) -> str:
    title = f"<h2><code>{method} {escape(path)}</code></h2>"
    about = f"<p>{escape(operation.get('summary', ''))}.</p>"
    body = ""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content:
        schema = _resolve(content["schema"], document)
        body = "<h3>Body</h3>" + _example(path, schema) + _fields(schema)
    rows = "".join(
        f"<tr><td><code>{escape(status)}</code></td><td>{_prose(response['description'])}</td>"
        f"<td>{_shape_of(response)}</td></tr>"
        for status, response in operation["responses"].items()
    )
    answers = f"<h3>Answers</h3><table>{rows}</table>"
    return f"<section>{title}{about}{body}{answers}</section>"


def _example(path: str, schema: Document) -> str:
    url = EXAMPLE_URL + escape(path.removeprefix("/"))
    examples = (escape(json.dumps(data)) for data in schema.get("examples", ()))
    return "".join(f"<pre>curl {url} -d '{data}'</pre>" for data in examples)


def _schema(name: str, schema: Document) -> str:
    about = _prose(schema.get("description", ""))
    head = f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3><p>{about}</p>'
    return f"<section>{head}{_fields(schema)}</section>"


def _fields(schema: Document) -> str:
    required = schema.get("required", ())
    fields = sorted(schema.get("properties", {}).items(), key=lambda item: item[0] not in required)
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{_type(field)}</td>"
        f"<td>{'required' if name in required else _default(field)}</td>"
        f"<td>{_prose(field.get('description', ''))}</td></tr>"
        for name, field in fields
    )
    return f"<table>{rows}</table>"


def _type(field: Document) -> str:
    if "$ref" in field:
        return _link(field["$ref"])
    if "const" in field:
        return f"<code>{escape(json.dumps(field['const']))}</code>"
    if "enum" in field:
        return " | ".join(f"<code>{escape(json.dumps(value))}</code>" for value in field["enum"])
    options = field.get("anyOf") or field.get("oneOf")
    if options:
        kinds = map(_type, options)
        return " | ".join(kind for kind in kinds if kind != "null" or "default" not in field)
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}"
    limits = [
        f"{sign} {field[key]}"
        for key, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if key in field
    ]
    return escape(" ".join([kind, *limits]))


def _default(field: Document) -> str:
    default = field.get("default")
    return "optional" if default is None else f"default {escape(json.dumps(default))}"


def _prose(text: str) -> str:
    """Text with its `code` marked."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _shape_of(response: Document) -> str:
    schemas = [content.get("schema", {}) for content in response.get("content", {}).values()]
    return " ".join(_link(schema["$ref"]) for schema in schemas if "$ref" in schema)


def _link(reference: str) -> str:
    name = escape(reference.rpartition("/")[2])
    return f'<a href="#{name}"><code>{name}</code></a>'


def _resolve(schema: Document, document: Document) -> Document:
    name = schema["$ref"].rpartition("/")[2]
    found: Document = document["components"]["schemas"][name]
    return found
