"""GET /: the page to try it, its files, and the demo's clip where it is installed."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

_PAGE = Path(__file__).parent / "page"
_DEMO = Path(__file__).parents[2] / "demo" / "clip.mp4"
_FILES = {
    "style.css": ("text/css", _PAGE / "style.css"),
    "page.js": ("text/javascript", _PAGE / "page.js"),
    "demo.mp4": ("video/mp4", _DEMO),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; media-src 'self' data: blob:; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[BaseRoute]:
    async def index(request: Request) -> Response:
        return FileResponse(_PAGE / "index.html", media_type="text/html", headers=_HEADERS)

    found: list[BaseRoute] = [Route("/", index)]
    for name, (kind, path) in _FILES.items():
        if path.is_file():
            found.append(Route(f"/page/{name}", _file(path, kind)))
    return found


def _file(path: Path, kind: str):  # type: ignore[no-untyped-def]
    async def file(request: Request) -> Response:
        return FileResponse(path, media_type=kind, headers=_HEADERS)

    return file
