"""The command `gridsieve chat`: a conversation about media, in the terminal."""

from __future__ import annotations

import asyncio
import readline  # noqa: F401  (gives `input` line editing and a history)
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from gridsieve.cli.ask import stream, system_message
from gridsieve.cli.options import (
    AccessFlags,
    AdapterOption,
    ClipFlags,
    PruningFlags,
    SamplingFlags,
    ServerOption,
    SystemOption,
    ThinkingOption,
    TimeoutOption,
    template_options,
)
from gridsieve.cli.terminal import print_cost, report, reported_errors
from gridsieve.client.client import DEFAULT_ADDRESS, GridsieveClient
from gridsieve.client.credentials import Access
from gridsieve.client.prompt import Message, Options, Part, Text
from gridsieve.common.contract.errors import GridsieveError


def chat(
    *,
    media: Annotated[list[str] | None, typer.Argument(help="Videos, images and sounds, as files or URLs.")] = None,
    pruning: PruningFlags,
    clip: ClipFlags,
    system: SystemOption = None,
    sampling: SamplingFlags,
    thinking: ThinkingOption = None,
    adapter: AdapterOption = None,
    server: ServerOption = DEFAULT_ADDRESS,
    timeout_s: TimeoutOption = None,
    access: AccessFlags,
) -> None:
    """Talk about videos, images and sounds: the model sees the earlier questions and answers, too.

    Type one question per line; Ctrl-D ends the conversation. The services reuse what they have already computed.

    Example: gridsieve chat clip.mp4 --pruning-rate 0.75
    """
    parts = [clip.heard(each, audio=False) for each in media or []]
    options = Options(
        **pruning.options(),
        **sampling.options(),
        template_options=template_options(thinking),
        adapter=adapter,
        timeout_s=timeout_s,
    )

    with reported_errors(server):
        given = access.access()
        for path in (part.path for part in parts if part.path is not None):
            Path(path).open("rb").close()  # a file that cannot be read is reported before the first question
        _converse(server, given, parts, system_message(system), options)


def _converse(
    server: str, access: Access, media: Sequence[Part], history: tuple[Message, ...], options: Options
) -> None:
    """Ctrl-C ends the answer that is being printed, and at the prompt the conversation."""
    with asyncio.Runner() as runner:
        client = runner.run(_connected(server, access))
        try:
            for question in _questions():
                try:
                    finished, answer = runner.run(stream(client, media, question, history, options))
                except (GridsieveError, OSError) as error:
                    report(error, server)
                    continue
                except KeyboardInterrupt:
                    continue
                print_cost(finished.usage, finished.timings)
                asked = Message("user", (*media, Text(question)))
                history = (*history, asked, Message("assistant", (Text(answer),)))
                media = ()  # from now on in the history
        finally:
            runner.run(client.close())


async def _connected(server: str, access: Access) -> GridsieveClient:
    return GridsieveClient(server, **access)  # its channel belongs to the loop that runs now


def _questions() -> Iterator[str]:
    """The lines of stdin that are not blank."""
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        if line.strip():
            yield line.strip()
