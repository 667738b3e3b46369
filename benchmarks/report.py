"""Options and output that the benchmarks share."""

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
    """The command-line options. rounds: the default number of rounds."""
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
    """The command, time and machine of a run, with the machine's load average before the first measurement."""

    command: str
    date: str
    machine: str

    @classmethod
    def of(cls, module: str) -> Beginning:
        command = f"python -m benchmarks.{module}{''.join(f' {each}' for each in sys.argv[1:])}"
        return cls(command, str(datetime.datetime.now(datetime.UTC).date()), machine())


def report(beginning: Beginning, rows: Sequence[Row], as_json: bool, **about: str) -> None:
    """Prints the rows below a heading. about: further entries of the heading, by name."""
    if as_json:
        measured = [asdict(row) | {"ratio": row.ratio, "met": row.met} for row in rows]
        print(json.dumps(asdict(beginning) | about | {"rows": measured}, ensure_ascii=False, indent=2))
    else:
        print(markdown(beginning, rows, **about))


def markdown(beginning: Beginning, rows: Sequence[Row], **about: str) -> str:
    """The rows as a table below the heading, as `report` prints them."""
    heading = f"`{beginning.command}`\n{beginning.date}, {'; '.join([beginning.machine, *about.values()])}\n"
    return "\n".join([heading, *table(rows)])
