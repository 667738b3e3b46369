"""How commands print moments of films."""

from __future__ import annotations

from dataclasses import asdict

from gridsieve.search.films import FilmMoment


def described(moment: FilmMoment) -> str:
    """A moment in a line."""
    score = "" if moment.score is None else f"  {moment.score:.3f}"
    return f"{moment.path}  {moment.start_s:.2f}–{moment.end_s:.2f} s{score}"


def moment_json(moment: FilmMoment) -> dict[str, object]:
    told = asdict(moment)
    return {"file": told.pop("path"), **told}
