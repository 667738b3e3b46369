"""Memory and processor time of a process and its descendants, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> Iterator[int]:
    """The process and its running descendants."""
    yield pid
    for task in _entries(Path(f"/proc/{pid}/task")):
        for child in _text(task / "children").split():
            yield from tree(int(child))


def resident_bytes(pid: int) -> int:
    """Resident memory of the process and its descendants; shared memory counts for each."""
    return sum(_status_bytes(each, "VmRSS") for each in tree(pid))


def proportional_bytes(pid: int) -> int:
    """Memory of the process and its descendants; each page that several share counts once among them (PSS)."""
    return sum(_file_bytes(f"/proc/{each}/smaps_rollup", "Pss") for each in tree(pid))


def peak_bytes(pid: int) -> int:
    """The most resident memory that the process ever had, without its descendants."""
    return _status_bytes(pid, "VmHWM")


def _status_bytes(pid: int, field: str) -> int:
    return _file_bytes(f"/proc/{pid}/status", field)


def _file_bytes(path: str, field: str) -> int:
    lines = _text(Path(path)).splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def cpu_s(pid: int) -> float:
    """Processor seconds of the process and its running descendants, over all threads."""
    fields = (_text(Path(f"/proc/{each}/stat")).rpartition(")")[2].split() for each in tree(pid))
    return sum(int(each[11]) + int(each[12]) for each in fields if each) / _TICKS_PER_S


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
