"""The monitoring page: static files that hold no data. What it shows it asks of the admin routes, with the admin key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

PATH = "/dashboard"
_INDEX = "index.html"
_JAVASCRIPT = "text/javascript; charset=utf-8"
_CSS = "text/css; charset=utf-8"
FILES = {
    "style.css": _CSS,
    "app.js": _JAVASCRIPT,
    "api.js": _JAVASCRIPT,
    "charts.js": _JAVASCRIPT,
    "dialogs.js": _JAVASCRIPT,
    "dom.js": _JAVASCRIPT,
    "format.js": _JAVASCRIPT,
    "heatmap.js": _JAVASCRIPT,
    "history.js": _JAVASCRIPT,
    "panels.js": _JAVASCRIPT,
    "preferences.js": _JAVASCRIPT,
    "texts.js": _JAVASCRIPT,
    "uPlot.iife.min.js": _JAVASCRIPT,
    "uPlot.min.css": _CSS,
    "uPlot.LICENSE.txt": "text/plain; charset=utf-8",
}
"""All that is served beside the page, with its content type: a name that is not here is no file."""

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # No script may turn text into markup, not even by mistake.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    # Asked for each time, and sent only if it has changed: a page and its scripts are never of two releases.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    content_type: str
    etag: str


def add_page(app: FastAPI) -> None:
    """Adds `/dashboard` and its files, read once. Both have to be reachable without a key."""
    folder = files("vera.server") / "dashboard"
    index = _load((folder / _INDEX).read_bytes(), "text/html; charset=utf-8")
    loaded = {name: _load((folder / name).read_bytes(), content_type) for name, content_type in FILES.items()}

    @app.head(PATH, include_in_schema=False)
    @app.get(PATH, include_in_schema=False)
    async def dashboard(request: Request) -> Response:
        """The page itself."""
        return _answer(request, index)

    @app.head(f"{PATH}/{{name}}", include_in_schema=False)
    @app.get(f"{PATH}/{{name}}", include_in_schema=False)
    async def dashboard_file(request: Request, name: str) -> Response:
        """A file of the page."""
        if name not in loaded:
            raise HTTPException(404, "there is no such file")
        return _answer(request, loaded[name])


def _load(content: bytes, content_type: str) -> _File:
    return _File(content, content_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _answer(request: Request, file: _File) -> Response:
    headers = {**HEADERS, "ETag": file.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if known & {file.etag, "*"}:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers={**headers, "Content-Type": file.content_type})
