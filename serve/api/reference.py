"""The API reference at /docs as HTML: contents, a search, every route with a form to try it.

Made from the OpenAPI document alone; `web/reference.js` does the search and sends what is tried.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from html import escape
from typing import Any

EXAMPLE_URL = "http://127.0.0.1:8000/"  # replaced by the server's address when the page is served
SHARED_BY = 3  # routes: an error of so many stands in one table, not at each of them

Document = dict[str, Any]
Routes = list[tuple[str, str, Document]]  # method, path, operation


def grouped(document: Document) -> dict[str, Routes]:
    """The routes by their tag, in the order of the document."""
    groups: dict[str, Routes] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            (tag,) = operation["tags"]
            groups.setdefault(tag, []).append((method.upper(), path, operation))
    return groups


def heading(tag: str) -> str:
    """A tag as people write it."""
    return {"openai": "OpenAI"}.get(tag, tag.capitalize())


def shared_errors(document: Document) -> dict[str, list[str]]:
    """What a status means at many routes: one or more sentences for each status."""
    count = Counter(
        (status, answer["description"])
        for methods in document["paths"].values()
        for operation in methods.values()
        for status, answer in operation["responses"].items()
        if int(status) >= 400
    )
    shared: dict[str, list[str]] = {}
    for (status, meaning), routes in sorted(count.items()):
        if routes >= SHARED_BY:
            shared.setdefault(status, []).append(meaning)
    return shared


def split_answers(
    operation: Document, shared: dict[str, list[str]]
) -> tuple[list[tuple[str, Document]], list[str]]:
    """The answers to write out at a route, and the statuses that the shared table explains."""
    own, others = [], []
    for status, answer in sorted(operation["responses"].items()):
        if answer["description"] in shared.get(status, ()):
            others.append(status)
        else:
            own.append((status, answer))
    return own, others


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


def fields_of(schema: Document) -> list[tuple[str, Document, str]]:
    """Each field of a shape with its name, and whether it is needed; required ones first."""
    required = schema.get("required", ())
    fields = sorted(schema.get("properties", {}).items(), key=lambda item: item[0] not in required)
    return [(name, field, need_in_words(field, name in required)) for name, field in fields]


def need_in_words(field: Document, required: bool) -> str:
    """Whether a field is required, or its default."""
    if required:
        return "required"
    default = field.get("default")
    return "" if default is None else f"default `{json.dumps(default)}`"


def type_in_words(field: Document) -> str:
    """A type with its limits, as Markdown."""
    if "$ref" in field:
        return _link(field["$ref"])
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    options = field.get("anyOf") or field.get("oneOf")
    if options:
        kinds = map(type_in_words, options)
        return " or ".join(kind for kind in kinds if kind != "null" or "default" not in field)
    kind = str(field.get("type", "any"))
    if kind == "array":
        kind = f"list of {type_in_words(field.get('items', {}))}"
    elif isinstance(values := field.get("additionalProperties"), dict) and values:
        kind = f"object of {type_in_words(values)}"
    limits = [form.format(_limit(field[key])) for key, form in _LIMITS if key in field]
    return f"{kind} ({', '.join(limits)})" if limits else kind


def _limit(value: object) -> str:
    if isinstance(value, str):
        return f"`{value}`"
    assert isinstance(value, int | float)
    return f"{int(value) if value == int(value) else value:,}"


def shapes_of(content: Document) -> str:
    """The shapes of a body, or its media types where it has none, as Markdown."""
    schemas = ((media, of.get("schema", {})) for media, of in content.items())
    return ", ".join(
        _link(schema["$ref"]) if "$ref" in schema else f"`{media}`" for media, schema in schemas
    )


def _link(reference: str) -> str:
    name = reference.rpartition("/")[2]
    return f"[{name}](#{name.lower()})"


def render(document: Document) -> str:
    """The whole reference page."""
    title = escape(document["info"]["title"])
    groups = grouped(document)
    shapes = sorted(document.get("components", {}).get("schemas", {}).items())
    shared = shared_errors(document)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>{title} API</title><link rel="icon" href="static/icon.svg" type="image/svg+xml">'
        '<link rel="stylesheet" href="static/style.css"><link rel="stylesheet" href="docs.css">'
        '<script src="static/theme.js"></script>'
        '<script type="module" src="static/reference.js"></script></head><body>'
        f'<header class="top"><h1 class="wordmark">{title} API</h1><nav aria-label="Server">'
        '<a href="./">Playground</a><a href="openapi.json">openapi.json</a>'
        '<button type="button" class="quiet" id="theme">Auto</button></nav></header>'
        f'<div class="sides">{_contents(groups, shapes)}<main>'
        f"<p>{_prose(document['info'].get('description', ''))}</p>"
        '<p class="fine" id="found" role="status"></p>'
        f"{''.join(_groups(groups, shared, document))}"
        f'<h2 id="errors">Errors of many routes</h2>{_meanings(shared)}'
        f'<h2 id="shapes">Shapes</h2>{"".join(_shape(*shape) for shape in shapes)}'
        "</main></div></body></html>"
    )


def _contents(groups: dict[str, Routes], shapes: list[tuple[str, Document]]) -> str:
    parts = []
    for tag, routes in groups.items():
        links = "".join(
            f'<li><a href="#{_anchor(method, path)}"><b>{method}</b> {_breakable(path)}</a></li>'
            for method, path, _ in routes
        )
        parts.append(f"<h2>{escape(heading(tag))}</h2><ul>{links}</ul>")
    names = "".join(f'<li><a href="#{escape(name)}">{escape(name)}</a></li>' for name, _ in shapes)
    return (
        '<aside><label for="search">Search</label>'
        '<input type="search" id="search" placeholder="route, field or word" autocomplete="off">'
        '<details id="contents" open><summary>Contents</summary>'
        f'<nav aria-label="Contents">{"".join(parts)}'
        '<h2><a href="#errors">Errors</a></h2>'
        f"<details><summary>Shapes</summary><ul>{names}</ul></details></nav></details>"
        '<label for="api-key">API key, if this server wants one</label>'
        '<input type="password" id="api-key" autocomplete="off"></aside>'
    )


def _groups(
    groups: dict[str, Routes], shared: dict[str, list[str]], document: Document
) -> Iterator[str]:
    for tag, routes in groups.items():
        yield f"<h2>{escape(heading(tag))}</h2>"
        for method, path, operation in routes:
            yield _operation(method, path, operation, shared, document)


def _operation(
    method: str,
    path: str,
    operation: Document,
    shared: dict[str, list[str]],
    document: Document,
) -> str:
    title = f"<h3><code>{method} {_breakable(path)}</code></h3>"
    about = f"<p>{escape(operation.get('summary', ''))}.</p>"
    parameters = "".join(
        _row(
            each["name"],
            each["schema"],
            need_in_words(each["schema"], each["required"]),
            each.get("description", ""),
        )
        for each in operation.get("parameters", ())
    )
    if parameters:
        parameters = _table(("parameter", "type", "needed", "meaning"), parameters)
    body = ""
    examples: list[str] = []
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content:
        schema = _resolve(content["schema"], document)
        examples = [json.dumps(data) for data in schema.get("examples", ())]
        body = "<h4>Body</h4>" + _examples(path, examples) + _fields(schema)
    return (
        f'<section class="entry" id="{_anchor(method, path)}">{title}{about}{parameters}{body}'
        f"{_try(method, path, operation, content is not None, examples)}"
        f"<h4>Answers</h4>{_answers(operation, shared)}</section>"
    )


def _examples(path: str, examples: list[str]) -> str:
    url = EXAMPLE_URL + escape(path.removeprefix("/"))
    first, *others = [f"<pre>curl {url} -d '{escape(data)}'</pre>" for data in examples] or [""]
    if not others:
        return first
    return f"{first}<details><summary>More examples</summary>{''.join(others)}</details>"


def _try(method: str, path: str, operation: Document, has_body: bool, examples: list[str]) -> str:
    """A form that sends the request from the page; `reference.js` reads it by these names."""
    anchor = _anchor(method, path)
    fields = []
    for each in operation.get("parameters", ()):
        if each["in"] == "path":
            name = escape(each["name"])
            fields.append(
                f'<label>{name} <input name="{name}" data-in="path" autocomplete="off"></label>'
            )
    if len(examples) > 1:
        options = "".join(
            f'<option value="{escape(data)}">Example {number}</option>'
            for number, data in enumerate(examples, 1)
        )
        fields.append(f"<label>Begin with <select>{options}</select></label>")
    if has_body:
        begin = escape(json.dumps(json.loads(examples[0]), indent=2) if examples else "{}")
        fields.append(
            f'<label class="body" for="{anchor}-body">Body</label>'
            f'<textarea id="{anchor}-body" rows="6" spellcheck="false">{begin}</textarea>'
        )
    return (
        f'<details class="try"><summary>Try it</summary>'
        f'<form data-method="{method}" data-path="{escape(path.removeprefix("/"))}">'
        f'{"".join(fields)}<button type="submit" class="primary">Send</button>'
        '<p class="fine" role="status"></p><pre tabindex="0" hidden></pre></form></details>'
    )


def _answers(operation: Document, shared: dict[str, list[str]]) -> str:
    own, others = split_answers(operation, shared)
    rows = "".join(
        f"<tr><td><code>{escape(status)}</code></td><td>{_prose(answer['description'])}</td>"
        f"<td>{_shapes_in(answer)}</td></tr>"
        for status, answer in own
    )
    more = ""
    if others:
        shapes = {_shapes_in(operation["responses"][status]) for status in others} - {""}
        listed = ", ".join(f"<code>{status}</code>" for status in others)
        said = f" in a body of {' or '.join(sorted(shapes))}" if shapes else ""
        more = f'<p class="fine">Also {listed}{said}: <a href="#errors">what they mean</a>.</p>'
    return _table(("status", "when", "body"), rows) + more


def _meanings(shared: dict[str, list[str]]) -> str:
    rows = "".join(
        f"<tr><td><code>{status}</code></td><td>{'<br>or '.join(map(_prose, meanings))}</td></tr>"
        for status, meanings in shared.items()
    )
    return _table(("status", "when"), rows)


def _shape(name: str, schema: Document) -> str:
    about = _prose(schema.get("description", ""))
    return (
        f'<details class="entry shape" id="{escape(name)}"><summary>'
        f"<code>{escape(name)}</code></summary><p>{about}</p>{_fields(schema)}</details>"
    )


def _fields(schema: Document) -> str:
    rows = "".join(_row(*one) for one in fields_of(schema))
    return _table(("field", "type", "needed", "meaning"), rows) if rows else ""


def _row(name: str, field: Document, need: str, about: str | None = None) -> str:
    about = field.get("description", "") if about is None else about
    return (
        f"<tr><td><code>{escape(name)}</code></td><td>{_prose(type_in_words(field))}</td>"
        f"<td>{_prose(need or 'optional')}</td><td>{_prose(about)}</td></tr>"
    )


def _table(head: tuple[str, ...], rows: str) -> str:
    cells = "".join(f'<th scope="col">{name}</th>' for name in head)
    columns = f"<thead><tr>{cells}</tr></thead>"
    return f'<table class="of-{len(head)}">{columns}<tbody>{rows}</tbody></table>'


def _prose(text: str) -> str:
    """Markdown of `code` and [links](#to-shapes) as HTML."""
    marked = re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\[(\w+)\]\(#\w+\)", r'<a href="#\1"><code>\1</code></a>', marked)


def _shapes_in(answer: Document) -> str:
    return _prose(shapes_of(answer.get("content", {})))


def _anchor(method: str, path: str) -> str:
    words = re.findall(r"\w+", path)
    return "-".join([method.lower(), *words])


def _breakable(path: str) -> str:
    """A path that may go on in the next line after a slash."""
    return escape(path).replace("/", "/<wbr>")


def _resolve(schema: Document, document: Document) -> Document:
    name = schema["$ref"].rpartition("/")[2]
    found: Document = document["components"]["schemas"][name]
    return found
