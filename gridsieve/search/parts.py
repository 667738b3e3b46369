"""Moments as parts of prompts and of pages."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from gridsieve.client.prompt import FrameOptions, Video

FIGURE = Path(__file__).with_name("figure.js")
"""A module of JavaScript, with which pages draw moments."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Films on this machine. on_server: the service opens them by their paths; else their bytes are sent."""

    path: Path
    on_server: bool

    def part(self, film: str, start_s: float, end_s: float, frames: FrameOptions) -> Video:
        """A part of a film. film: its path, relative to the folder."""
        path = self.path / film
        if self.on_server:
            return Video(server_path=str(path.resolve()), start_s=start_s, end_s=end_s, **frames)
        return Video(path, start_s=start_s, end_s=end_s, **frames)


def data_url(picture: bytes) -> str:
    """Of a JPEG; empty for none."""
    return f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}" if picture else ""
