"""What the command shows on a terminal's stderr: bars while media is read, what an answer cost, errors.

Answers and JSON are `framesieve.__main__`'s, on stdout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from common.contract.errors import FramesieveError, StartupError, Unavailable
from common.process import ExitStatus
from framesieve.client.answer import Accepted, Progress, Timings, Usage

stderr = Console(stderr=True, highlight=False)


class MediaBars:
    """Two bars on a terminal's stderr: slices read and slices encoded, over all media."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
        self._progress = Bars(
            *columns, TimeElapsedColumn(), console=stderr, transient=True, disable=not stderr.is_terminal
        )
        self._tasks: list[TaskID] = []
        self._seen: dict[int, Progress] = {}

    def __enter__(self) -> MediaBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._progress.stop()

    def accepted(self, event: Accepted) -> None:
        slices = sum(item.grid.t for item in event.usage.media)
        if slices:
            self._tasks = [self._progress.add_task(name, total=slices) for name in ("reading ", "encoding")]

    def advanced(self, event: Progress) -> None:
        self._seen[event.media_index] = event
        if self._tasks:
            read, encoded = self._tasks
            self._progress.update(read, completed=sum(each.decoded_slices for each in self._seen.values()))
            self._progress.update(encoded, completed=sum(each.encoded_slices for each in self._seen.values()))


def tell_cost(usage: Usage, timings: Timings) -> None:
    first_s = timings.time_to_first_token_s
    total_s = first_s + timings.generate_s
    pruned = f"{usage.prompt_tokens_full} → {usage.prompt_tokens} prompt tokens"
    spent = f"{usage.completion_tokens} tokens in {total_s:.2f} s, the first after {first_s:.2f} s"
    stderr.print(f"[dim]{pruned} · {spent}[/]", soft_wrap=True)
    for number, item in enumerate(usage.media, start=1):
        if item.repaired_frames:
            _warn(f"media {number}: {item.repaired_frames} damaged frames repeat the one before")
        if item.first_slice_only:
            _warn(f"media {number}: this rate leaves only the first moment, so no motion can be seen")


# What the system says where no socket is, and where nobody listens at one.
_NOBODY_THERE = ("No such file or directory", "Connection refused")


@contextmanager
def errors_told(server: str | None = None, cannot_start: ExitStatus = ExitStatus.FAILED) -> Iterator[None]:
    """Turns errors into one line on stderr and an exit status: `cannot_start` for a StartupError."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except StartupError as error:
        _fail("STARTUP", str(error), cannot_start)
    except Unavailable as error:
        told = ": ".join([str(error), *getattr(error, "__notes__", ())])
        if server and any(words in told for words in _NOBODY_THERE):
            _fail(error.reason, f"nothing answers at {server}; `framesieve serve` starts the services on this machine")
        if "Socket closed" in told:  # as a listener that speaks TLS does to who does not, or shows nothing
            told += "; does the service want TLS (--tls-ca) or a certificate (--tls-cert, --tls-key)?"
        _fail(error.reason, told)
    except FramesieveError as error:
        _fail(error.reason, str(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        _fail("FILE", f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _warn(message: str) -> None:
    stderr.print(f"[yellow]{escape(message)}[/]", soft_wrap=True)


def _fail(reason: str, message: str, status: ExitStatus = ExitStatus.FAILED) -> NoReturn:
    stderr.print(f"[red]{reason}[/]: {escape(message)}", soft_wrap=True)
    raise typer.Exit(status)
