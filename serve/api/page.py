"""The playground at / and the API reference at /docs. Both need no other host."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Scope

from serve.errors import NotFound
from serve.exchange import Route

EXAMPLE_URL = "http://127.0.0.1:8000/"  # replaced by the server's address when the page is served
STYLE_FILE = Path(__file__).resolve().parent / "reference.css"

Document = dict[str, Any]


def render(document: Document) -> str:
    """The whole reference page."""
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
    """Text with `code` marked."""
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


# The routes: / and /static, /docs and /openapi.json.


_WEB = Path(__file__).resolve().parent.parent / "web"
# Browsers revalidate each time, and get 304 if nothing changed.
_FRESH = {"cache-control": "no-cache"}


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file as it was when it was read."""

    changed_ns: int
    content: bytes
    media_type: str
    etag: str


class CachedFiles(StaticFiles):
    """Files in memory: a page of many small files loads at once, not one thread hop per file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(directory=folder)
        self._folder = folder
        self._kept: dict[str, CachedFile] = {}

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file that browsers revalidate before they use their copy."""
        kept = self._read(path) if scope["method"] == "GET" else None
        if kept is None:
            return await super().get_response(path, scope)  # which makes the error
        headers = _FRESH | {"etag": kept.etag}
        response = Response(kept.content, media_type=kept.media_type, headers=headers)
        if self.is_not_modified(response.headers, Headers(scope=scope)):
            return NotModifiedResponse(response.headers)
        return response

    def _read(self, name: str) -> CachedFile | None:
        path = self._folder / name
        if Path(name).name != name or not path.is_file():
            return None
        changed_ns = path.stat().st_mtime_ns
        kept = self._kept.get(name)
        if kept is None or kept.changed_ns != changed_ns:
            content = path.read_bytes()
            media_type = guess_type(name)[0] or "application/octet-stream"
            etag = f'"{sha256(content).hexdigest()[:32]}"'
            kept = self._kept[name] = CachedFile(changed_ns, content, media_type, etag)
        return kept


def add_page(app: FastAPI) -> None:
    """Add the routes to an application."""
    router = APIRouter(include_in_schema=False, route_class=Route)
    files = CachedFiles(_WEB) if _WEB.is_dir() else None

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
        return FileResponse(STYLE_FILE, headers=_FRESH)

    app.include_router(router)
    if files is not None:
        app.mount("/static", files, name="static")
