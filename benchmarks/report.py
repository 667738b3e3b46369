"""Options and output that the benchmarks share."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from benchmarks.table import Row, table
from gridsieve.common.telemetry.logs import configure_logging

Measurement: TypeAlias = Callable[[int], list[Row]]
"""The rows of a number of rounds."""


def run(
    name: str,
    doc: str | None,
    measurements: Mapping[str, Measurement],
    rounds: int,
    least_rounds: int,
    long: Mapping[str, Measurement] = MappingProxyType({}),
) -> None:
    """The command `python -m benchmarks.NAME`: measures all, or those of --only, and prints their rows.

    long: measurements that are made only where --only names them.
    """
    known = {**measurements, **long}
    args = options(name, doc, known, rounds, least_rounds).parse_args()
    configure_logging("benchmarks", "auto", "warning")  # to stderr
    beginning, rows = Beginning.of(name), list[Row]()
    for each in args.only or measurements:
        print(f"measuring {each}", file=sys.stderr)
        rows += known[each](args.rounds)
    report(beginning, rows, args.json)


def options(
    name: str, doc: str | None, measurements: Iterable[str], rounds: int, least_rounds: int
) -> argparse.ArgumentParser:
    """The command-line options. rounds: the default number of rounds."""
    parser = argparse.ArgumentParser(
        f"python -m benchmarks.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        return cls(command, str(datetime.datetime.now(datetime.UTC).date()), _machine())

    def __str__(self) -> str:
        return f"`{self.command}`\n{self.date}, {self.machine}\n"


def _machine() -> str:
    """The processor model, the number of cores and the load average."""
    cpu_info = Path("/proc/cpuinfo")
    names = [line for line in cpu_info.read_text().splitlines() if line.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else platform.processor()
    return f"{name}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the start"


def report(beginning: Beginning, rows: Sequence[Row], as_json: bool, **about: str) -> None:
    """Prints the rows below a heading. about: further entries of the heading, by name."""
    if as_json:
        measured = [asdict(row) | {"ratio": row.ratio, "met": row.met} for row in rows]
        print(json.dumps(asdict(beginning) | about | {"rows": measured}, ensure_ascii=False, indent=2))
    else:
        print(markdown(beginning, rows, **about))


def markdown(beginning: Beginning, rows: Sequence[Row], **about: str) -> str:
    """The rows as a table below the heading, as `report` prints them."""
    heading = str(replace(beginning, machine="; ".join([beginning.machine, *about.values()])))
    return "\n".join([heading, *table(rows)])
