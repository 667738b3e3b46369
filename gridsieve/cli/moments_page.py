"""Writes moments of films as a page: a picture of each, which plays the moment where it is clicked.

The page names the films by their paths from its own folder, and has no part that is loaded from elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from urllib.parse import quote

from gridsieve.cli.moments import moment_json
from gridsieve.search.films import FilmMoment
from gridsieve.search.parts import FIGURE, data_url

_PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
  body { margin: 2rem; background: #101217; color: #e8eaee; font: 15px system-ui, sans-serif }
  main { display: grid; grid-template-columns: repeat(auto-fill, minmax(18rem, 1fr)); gap: 1.5rem }
  figure { margin: 0 }
  video { width: 100%; cursor: pointer }
  figcaption { color: #8a909c; overflow-wrap: anywhere }
</style>
<h1>$title</h1>
<main></main>
<script type="module">
$script
  document.querySelector("main").append(...$moments.map(figureOf));
</script>
""")


def moments_page(
    pictures: Sequence[bytes], moments: Sequence[FilmMoment], title: str, films: Path, folder: Path
) -> str:
    """HTML. pictures: of each moment a frame, JPEG, or empty. films: their folder. folder: of the page."""
    drawn = []
    for picture, each in zip(pictures, moments, strict=True):
        film = quote(os.path.relpath(films.resolve() / each.path, folder.resolve()))
        drawn.append({**moment_json(each), "picture": data_url(picture), "film": film})
    told = json.dumps(drawn).replace("<", "\\u003c")  # no text may end the script
    return _PAGE.substitute(title=escape(title), script=FIGURE.read_text(encoding="utf-8"), moments=told)
