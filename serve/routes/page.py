"""The playground at /, its files below /static, and the reference at /docs.

Knows where the files are; deliberately nothing of what is in them.
"""

from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles

from serve.errors import NotFound
from serve.wire.reference import STYLE_FILE, render

_WEB = Path(__file__).resolve().parent.parent / "web"
# Browsers ask again each time, and get 304 while nothing has changed.
_FRESH = {"cache-control": "no-cache"}


class FreshFiles(StaticFiles):
    """Files that browsers check before they use what they have."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_FRESH)
        return response


def add_page(app: FastAPI) -> None:
    """Add the routes to an application."""
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index() -> Response:
        page = _WEB / "index.html"
        if not page.is_file():
            raise NotFound("this server was installed without its page: see /docs")
        return FileResponse(page, headers=_FRESH)

    @cache
    def reference() -> str:
        return render(app.openapi())

    @router.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(reference())

    @router.get("/docs.css")
    async def style() -> Response:
        return FileResponse(STYLE_FILE, headers=_FRESH)

    app.include_router(router)
    if _WEB.is_dir():
        app.mount("/static", FreshFiles(directory=_WEB), name="static")
