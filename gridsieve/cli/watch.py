"""The command `gridsieve watch`: asks about all cameras of a file, and tells the answers to its sinks."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from gridsieve.cli.options import AccessFlags, RecordingFlags, ServerOption, of_output
from gridsieve.cli.terminal import reported_errors, stderr
from gridsieve.client.client import DEFAULT_ADDRESS, GridsieveClient
from gridsieve.client.live_events import Snapshots
from gridsieve.common.process import ExitStatus

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def watch(
    *,
    file: Annotated[Path, typer.Argument(help="The cameras, the questions, and where the answers go, as TOML.")],
    check: Annotated[
        bool, typer.Option("--check", help="Only print what the file means, or what is wrong with it; call no service.")
    ] = False,
    as_json: Annotated[
        bool,
        of_output("--json", help="Print each event, or the error, as a line of JSON on stdout."),
    ] = False,
    recording: RecordingFlags,
    server: ServerOption = DEFAULT_ADDRESS,
    access: AccessFlags,
) -> None:
    """Watch the cameras of a file: ask about each at intervals, or when something changed, until Ctrl-C.

    Answers go to the sinks of the file: webhooks, MQTT brokers, stdout. Without a sink of stdout they are also printed
    for people. The command waits for cameras and services that are away. A changed file is used within seconds.
    examples/cameras.toml is an example, docs/watch.md has every key.

    After the first signal (Ctrl-C, SIGTERM, a closed terminal) the command finishes running questions and delivers
    waiting events, within 8 seconds. The second signal ends it at once.

    Exit status: 0 after a signal; 3 after a signal if a sink did not take some events; 2 if the file or an option is
    wrong; 130 (Ctrl-C), 143 (SIGTERM) or 129 (closed terminal) if ended at once.

    Example: gridsieve watch cameras.toml

    Example: gridsieve watch cameras.toml --check

    Example: gridsieve watch cameras.toml --json --server gpu-1:50053

    Example: gridsieve watch cameras.toml --index recordings --embedder 127.0.0.1:50063
    """
    recording.check()
    # Imported on use: they load pydantic's models, and clients of HTTP and MQTT.
    from gridsieve.watch.cameras import Stdout, Watched, read
    from gridsieve.watch.events import ANSWER, LOST, Event
    from gridsieve.watch.station import Station

    prints = True  # answers, for people

    def read_file() -> Watched:
        watched = read(file)
        if as_json and not any(isinstance(each, Stdout) for each in watched.sinks):
            watched = replace(watched, sinks=(*watched.sinks, Stdout()))
        if recording.index is not None:
            seen = [replace(each, options={**each.options, "snapshots": Snapshots.SLICES}) for each in watched.cameras]
            watched = replace(watched, cameras=tuple(seen))
        nonlocal prints
        prints = not any(isinstance(each, Stdout) for each in watched.sinks)
        return watched

    def tell(event: Event) -> None:
        if event.type == ANSWER:
            if prints:
                answer = event.data["answer"]
                text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
                said = f"{event.data['question']} {' '.join(text.split())}"
                typer.echo(f"{_clock(event.time.astimezone())} {event.camera}: {said}")
        else:
            say(f"{event.camera}: {'lost: ' + event.data['reason'] if event.type == LOST else 'plays'}")

    async def run() -> int:
        ending, loop = asyncio.Event(), asyncio.get_running_loop()

        def end() -> None:
            ending.set()
            for number in _SIGNALS:  # a second one ends the process
                loop.remove_signal_handler(number)

        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, end)
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(GridsieveClient(server, **access.access()))
            take = None
            if recording.index is not None:
                from gridsieve.cli.recorded import recorded  # it loads FFmpeg

                take = (await stack.enter_async_context(recorded(recording, access.access(), say, as_json))).take
            try:
                return await Station(client, read_file, tell, say, take).run(watched, ending)
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None

    with reported_errors(server, cannot_start=ExitStatus.CANNOT_START, as_json=as_json):
        watched = read_file()
        if check:
            for each in watched.cameras:
                questions = "1 question" if len(each.questions) == 1 else f"{len(each.questions)} questions"
                stderr.print(f"{each.name}: {each.address}, {questions}", soft_wrap=True, markup=False)
            return
        dropped = asyncio.run(run())
    if dropped:
        raise typer.Exit(ExitStatus.CUT_OFF)


def say(text: str) -> None:
    """A line on stderr, with the time."""
    stderr.print(f"[dim]{_clock(datetime.now().astimezone())}[/] {escape(text)}", soft_wrap=True)


def _clock(time: datetime) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
