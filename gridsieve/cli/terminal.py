"""What commands print to stderr: progress bars, the cost of a request, warnings and errors."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from gridsieve.client.answer import Accepted, Progress, Timings, Usage
from gridsieve.common.contract.errors import DeadlinePassed, GridsieveError, StartupError, Unavailable
from gridsieve.common.process import ExitStatus

_TLS_S = 2.0
# Returns to the line's beginning and erases it (ECMA-48, EL).
_CLEARED = "\r\x1b[2K"

stderr = Console(stderr=True, highlight=False)


class MediaBars(Bars):
    """Two progress bars, if stderr is a terminal that can show them: slices decoded and encoded, over all media."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
        super().__init__(
            *columns, TimeElapsedColumn(), console=stderr, transient=True, disable=not stderr.is_interactive
        )
        self._seen: dict[int, Progress] = {}

    def accepted(self, event: Accepted) -> None:
        """Starts the bars: the number of slices is known now."""
        slices = sum(item.grid.t for item in event.usage.media)
        if slices:
            for name in ("decoding", "encoding"):
                self.add_task(name, total=slices)

    def advanced(self, event: Progress) -> None:
        self._seen[event.media_index] = event
        if self.tasks:
            read, encoded = self.task_ids
            self.update(read, completed=sum(each.decoded_slices for each in self._seen.values()))
            self.update(encoded, completed=sum(each.encoded_slices for each in self._seen.values()))


class StatusLine:
    """A line on stderr that each text replaces, if stderr is a terminal that can do that."""

    def __init__(self) -> None:
        self._prompting = False

    def show(self, text: str) -> None:
        if stderr.is_interactive and not self._prompting:
            stderr.file.write(f"{_CLEARED}{text[: stderr.width - 1]}")
            stderr.file.flush()

    def clear(self) -> None:
        self.show("")

    def prompt(self, shown: bool) -> None:
        """Shows a prompt, or no longer: until then no text replaces what is typed."""
        self._prompting = False
        self.show("> " if shown else "")
        self._prompting = shown


def print_cost(usage: Usage, timings: Timings) -> None:
    first_s = timings.time_to_first_token_s
    total_s = first_s + timings.generate_s
    pruned = f"{usage.prompt_tokens_full} → {usage.prompt_tokens} prompt tokens"
    full, kept = sum(item.grid.tokens for item in usage.media), sum(item.num_kept for item in usage.media)
    if kept < full:
        pruned += f", kept {kept} of {full} tokens of media ({1 - kept / full:.0%} dropped)"
    spent = f"{usage.completion_tokens} tokens in {total_s:.2f} s, the first after {first_s:.2f} s"
    stderr.print(f"[dim]{pruned} · {spent}[/]", soft_wrap=True)
    for number, item in enumerate(usage.media, start=1):
        if item.repaired_frames:
            warn(f"media {number}: {item.repaired_frames} damaged frames were replaced by the previous frame")
        if item.missing_frames:
            warn(f"media {number}: the file was cut off, {item.missing_frames} frames are missing")
        if item.dropped_frames:
            warn(f"media {number}: {item.dropped_frames} frames have the time of another one and are not shown")
        if item.first_slice_only:
            warn(f"media {number}: this pruning rate keeps only the first slice, so the model sees no motion")


# The operating system's errors for a missing socket, and for an address without a listener.
_NO_LISTENER = ("No such file or directory", "Connection refused")


@contextmanager
def reported_errors(
    server: str | None = None, cannot_start: ExitStatus = ExitStatus.FAILED, as_json: bool = False
) -> Iterator[None]:
    """Reports an error and exits.

    server, as_json: see `report`. cannot_start: the exit status for a StartupError.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise
    except (StartupError, GridsieveError, OSError) as error:
        report(error, server, as_json)
        raise typer.Exit(cannot_start if isinstance(error, StartupError) else ExitStatus.FAILED) from None


def report(error: Exception, server: str | None = None, as_json: bool = False) -> None:
    """Prints an error: one line on stderr that begins with its reason, or one JSON object on stdout.

    server: the address that was called.
    """
    reason, message = _described(error, server)
    if as_json:
        typer.echo(json.dumps({"error": {"reason": reason, "message": message}}))
    else:
        stderr.print(f"[red]{reason}[/]: {escape(message)}", soft_wrap=True)


def _described(error: Exception, server: str | None) -> tuple[str, str]:
    match error:
        case StartupError():
            return "STARTUP", str(error)
        case Unavailable():
            message = ": ".join([str(error), *getattr(error, "__notes__", ())])
            if server and any(words in message for words in _NO_LISTENER):
                message = f"no service listens at {server}; `gridsieve serve` starts the services on this machine"
            if server and "WRONG_VERSION_NUMBER" in message:
                message = f"{server} does not use TLS: leave out --tls-ca"
            if server and "Failed parsing HTTP/2" in message:
                message = f"{server} is not a gRPC server; generation listens on port 50053 by default"
            if server and "Socket closed" in message and _speaks_tls(server):  # which it closes without a reason
                message = f"{server} requires TLS: pass --tls-ca, and --tls-cert and --tls-key if it asks for them"
            return error.reason, message
        case DeadlinePassed():
            return error.reason, f"{error} (--timeout-s)"
        case GridsieveError():
            return error.reason, str(error)
        case OSError() if error.filename:
            return "FILE", f"{error.filename}: {error.strerror}"
    return "FILE", str(error)


def _speaks_tls(address: str) -> bool:
    """Whether the first of these addresses answers a TLS handshake; its certificate is not checked."""
    host, _, port = address.partition(",")[0].rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError, ValueError):
        connection = socket.create_connection((host.strip("[]"), int(port)), _TLS_S)
        with connection, context.wrap_socket(connection):
            return True
    return False


def warn(message: str) -> None:
    stderr.print(f"[yellow]{escape(message)}[/]", soft_wrap=True)
