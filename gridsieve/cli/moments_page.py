"""Writes moments of films as a page: a picture of each, which plays the moment where it is clicked.

The page names the films by their paths from its own folder, and has no part that is loaded from elsewhere.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gridsieve.moments import FilmMoment

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
<main>
$figures
</main>
<script>
  for (const video of document.querySelectorAll("video")) {
    const { start, end } = video.dataset;
    video.onclick = () => {
      video.currentTime = Number(start);
      video.play();
    };
    video.ontimeupdate = () => {
      if (video.currentTime >= Number(end)) video.pause();
    };
  }
</script>
""")
_FIGURE = Template("""  <figure>
    <video src="$source" data-start="$start" data-end="$end" poster="$poster" preload="none" playsinline></video>
    <figcaption>$path<br>$start_shown to $end_shown s · $score</figcaption>
  </figure>""")
_QUALITY = 85


def moments_page(
    frames: Sequence[NDArray[np.uint8]], moments: Sequence[FilmMoment], title: str, films: Path, folder: Path
) -> str:
    """HTML. frames: of each moment one, uint8 [height, width, 3], RGB. films: their folder. folder: of the page."""
    figures = "\n".join(
        _FIGURE.substitute(
            source=escape(quote(os.path.relpath(films.resolve() / each.path, folder.resolve()))),
            start=each.start_s,
            end=each.end_s,
            start_shown=f"{each.start_s:.1f}",
            end_shown=f"{each.end_s:.1f}",
            poster=_data_url(frame),
            path=escape(each.path),
            score=f"{each.score or 0:.3f}",
        )
        for frame, each in zip(frames, moments, strict=True)
    )
    return _PAGE.substitute(title=escape(title), figures=figures)


def _data_url(frame: NDArray[np.uint8]) -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
