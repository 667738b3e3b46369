"""The clip of `make demo`, its two questions and their correct answers.

`python -m demo.example` regenerates the clip.
"""

from __future__ import annotations

from pathlib import Path

from demo.drawing import encode
from demo.questions import Question
from demo.scenes import Motion, Scene, Thing

CLIP = Path(__file__).parent / "clip.mp4"
SCENE = Scene(
    things=(
        Thing("red", "circle", x=0.25, y=0.25, half=0.15, motion=Motion("down", 3.0, 5.75, 0.45)),
        Thing("blue", "square", x=0.7, y=0.5, half=0.16),
    ),
    background="blobs",
    side_px=224,
    fps=8,
    noise=1.0,
    seed=7,
)
QUESTIONS = (
    Question("mover", "What moves?", "the red circle"),
    Question("happens", "What happens?", "A red circle moves down and a blue square stands still."),
)


def main() -> None:
    CLIP.write_bytes(encode(SCENE))
    print(f"wrote {CLIP}, {CLIP.stat().st_size} bytes")


if __name__ == "__main__":
    main()
