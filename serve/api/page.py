"""The playground at / and the API reference at /docs: contents, a search, every route with a form.

Both need no other host. The reference is made from the OpenAPI document alone, by the template
reference.html; `web/reference.js` does the search and sends what is tried.
"""

import asyncio
import json
import re
from collections import Counter
from functools import cache
from hashlib import sha256
from html import escape
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Scope

from serve.errors import NotFound
from serve.exchange import Route

# The reference.


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


_LONG = 1e15  # numbers from here on are shown as 1e30
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
    if isinstance(value, float) and abs(value) >= _LONG:
        return f"{value:g}".replace("e+", "e")
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


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(document: Document) -> str:
    """The whole reference page."""
    schemas = document.get("components", {}).get("schemas", {})
    return _TEMPLATES.get_template("reference.html").render(
        info=document["info"],
        groups=grouped(document),
        shared=shared_errors(document),
        schemas=dict(sorted(schemas.items())),
    )


def _shapes_of_all(operation: Document, statuses: list[str]) -> list[str]:
    """The shapes of the bodies of these statuses."""
    answers = [operation["responses"][status] for status in statuses]
    return sorted({shapes_of(answer.get("content", {})) for answer in answers} - {""})


def _prose(text: str) -> Markup:
    """Markdown of `code` and [links](#to-shapes) as HTML."""
    marked = re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))
    return Markup(re.sub(r"\[(\w+)\]\(#\w+\)", r'<a href="#\1"><code>\1</code></a>', marked))


def _anchor(method: str, path: str) -> str:
    return "-".join([method.lower(), *re.findall(r"\w+", path)])


def _breakable(path: str) -> Markup:
    """A path that may go on in the next line after a slash."""
    return Markup(escape(path).replace("/", "/<wbr>"))


_TEMPLATES.filters |= {"prose": _prose, "breakable": _breakable}
_TEMPLATES.globals |= {
    "anchor": _anchor,
    "dumps": json.dumps,
    "example_url": EXAMPLE_URL,
    "fields_of": fields_of,
    "heading": heading,
    "need_in_words": need_in_words,
    "shapes_of": shapes_of,
    "shapes_of_all": _shapes_of_all,
    "split_answers": split_answers,
    "type_in_words": type_in_words,
}


# The files of the page, and the routes.


STYLE_FILE = Path(__file__).resolve().parent / "reference.css"
_WEB = Path(__file__).resolve().parent.parent / "web"
# Browsers revalidate each time, and get 304 if nothing changed.
_FRESH = {"cache-control": "no-cache"}


class PageFiles(StaticFiles):
    """The files of the page. They are many and small: each is read here, not on other threads."""

    def __init__(self) -> None:
        super().__init__(directory=_WEB)
        self._names = frozenset(file.name for file in _WEB.iterdir() if file.is_file())

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file that browsers revalidate before they use their copy."""
        file = _WEB / path
        if scope["method"] != "GET" or path not in self._names:
            return await super().get_response(path, scope)  # which makes the error
        content = file.read_bytes()
        headers = _FRESH | {"etag": f'"{sha256(content).hexdigest()[:32]}"'}
        media_type = guess_type(path)[0] or "application/octet-stream"
        response = Response(content, media_type=media_type, headers=headers)
        if self.is_not_modified(response.headers, Headers(scope=scope)):
            return NotModifiedResponse(response.headers)
        return response


def add_page(app: FastAPI) -> None:
    """Add the routes to an application."""
    router = APIRouter(include_in_schema=False, route_class=Route)
    files = PageFiles() if _WEB.is_dir() else None

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        if files is None or not (_WEB / "index.html").is_file():
            raise NotFound("this server was installed without its page: see /docs")
        return await files.get_response("index.html", request.scope)

    @cache
    def document() -> bytes:
        return json.dumps(app.openapi()).encode()

    @cache
    def reference() -> str:
        return render(app.openapi())

    # Made on another thread: the first time takes long enough to make streams pause.
    @router.get("/openapi.json")
    async def openapi() -> Response:
        return Response(await asyncio.to_thread(document), media_type="application/json")

    @router.get("/docs")
    async def docs(request: Request) -> Response:
        page = await asyncio.to_thread(reference)
        return HTMLResponse(page.replace(EXAMPLE_URL, escape(str(request.base_url))))

    @router.get("/docs.css")
    async def style() -> Response:
        return Response(STYLE_FILE.read_bytes(), media_type="text/css", headers=_FRESH)

    app.include_router(router)
    if files is not None:
        app.mount("/static", files, name="static")
