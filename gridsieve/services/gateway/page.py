"""GET /: the page to try it, its files in `static/`, and the demo's clip where it is installed.

The page asks by the same API as every other client. Browsers let it load nothing from other hosts.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from gridsieve.search.parts import FIGURE

_STATIC = Path(__file__).parent / "static"
_DEMO_CLIP = Path(__file__).parents[2] / "clip.mp4"
_FILES = {
    "/": (_STATIC / "index.html", "text/html"),
    "/page/style.css": (_STATIC / "style.css", "text/css"),
    "/page/demo.mp4": (_DEMO_CLIP, "video/mp4"),
    **{f"/page/{path.name}": (path, "text/javascript") for path in (*_STATIC.glob("*.js"), FIGURE)},
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; media-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


async def _file(request: Request) -> Response:
    path, mime_type = _FILES[request.url.path]
    return FileResponse(path, media_type=mime_type, headers=_HEADERS)


PAGE_ROUTES = [Route(address, _file) for address, (path, _) in _FILES.items() if path.is_file()]
