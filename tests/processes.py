"""Processes as the kernel tells of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children(process: int | str = "self") -> set[int]:
    """The process ids of its child processes."""
    found: set[int] = set()
    for task in Path(f"/proc/{process}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # threads that serve metrics end at any time
            found.update(map(int, (task / "children").read_text().split()))
    return found


def runs(process: int) -> bool:
    """Whether it exists and is not a zombie."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ended after the file was opened
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"
