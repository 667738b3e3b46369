"""How commands print moments of films."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads the decoder, which `gridsieve ask` needs for folders alone
    from gridsieve.moments import FilmMoment


def described(moment: FilmMoment) -> str:
    """A moment in a line."""
    score = "" if moment.score is None else f"  {moment.score:.3f}"
    return f"{moment.path}  {moment.start_s:.2f}–{moment.end_s:.2f} s{score}"


def moment_json(moment: FilmMoment) -> dict[str, object]:
    told = asdict(moment)
    return {"file": told.pop("path"), **told}
