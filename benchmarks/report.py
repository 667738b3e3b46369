"""What `make bench-media` and `make bench-engine` have in common: what is asked for, and how its rows are printed."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.table import Row, table
from benchmarks.timing import machine


def options(doc: str | None, measurements: Iterable[str], rounds: int, least_rounds: int) -> argparse.ArgumentParser:
    """`rounds` are taken of every measurement unless told otherwise."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--rounds", type=_at_least(least_rounds), default=rounds)
    parser.add_argument("--only", choices=list(measurements), action="append", help="measure this; may be repeated")
    parser.add_argument("--json", action="store_true")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a run was started, when, and on which machine: its load says what others did before anything was measured."""

    command: str
    date: str
    machine: str

    @classmethod
    def of(cls, module: str) -> Beginning:
        command = f"python -m benchmarks.{module}{''.join(f' {each}' for each in sys.argv[1:])}"
        return cls(command, str(datetime.datetime.now(datetime.UTC).date()), machine())


def report(beginning: Beginning, rows: Sequence[Row], as_json: bool, **about: str) -> None:
    """Prints the rows below their heading. about: what else the heading says, by name."""
    if as_json:
        measured = [asdict(row) | {"ratio": row.ratio, "met": row.met} for row in rows]
        print(json.dumps(asdict(beginning) | about | {"rows": measured}, ensure_ascii=False, indent=2))
    else:
        print(f"`{beginning.command}`\n{beginning.date}, {'; '.join([beginning.machine, *about.values()])}\n")
        print(*table(rows), sep="\n")
