"""The playground at / and the API reference at /docs. Both need no other host."""

import asyncio
import json
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape
from mimetypes import guess_type
from pathlib import Path

from fastapi import APIRouter, FastAPI
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Scope

from serve.api.reference import EXAMPLE_URL, render
from serve.errors import NotFound
from serve.exchange import Route

STYLE_FILE = Path(__file__).resolve().parent / "reference.css"
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
