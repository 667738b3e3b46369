"""Scenes of the demo in which nothing but the things differs."""

from __future__ import annotations

from demo.scenes import Scene, Thing


def scene(*things: Thing, background: str = "plain", seed: int = 0) -> Scene:
    """Without noise, 112 pixels a side, four frames a second."""
    return Scene(things, background, side_px=112, fps=4, noise=0.0, seed=seed)
