"""The command `gridsieve live`: asks about a video file while it plays, a camera or a stream, again and again."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, TypeAlias
from urllib.parse import urlsplit

import typer
from rich.markup import escape

from gridsieve.cli.ask import answer_json, system_message
from gridsieve.cli.moments import described, moment_json
from gridsieve.cli.options import (
    AccessFlags,
    AdapterOption,
    MaxPixelsOption,
    RecordingFlags,
    SamplingFlags,
    ServerOption,
    SystemOption,
    ThresholdOption,
    in_flags,
    of_media,
    of_output,
    print_json,
    said_pruning,
)
from gridsieve.cli.terminal import StatusLine, report, reported_errors, stderr, warn
from gridsieve.client.answer import Answer
from gridsieve.client.client import DEFAULT_ADDRESS, GridsieveClient
from gridsieve.client.live import LiveSession
from gridsieve.client.live_events import (
    DropReason,
    LiveDelta,
    LiveDropped,
    LiveEvent,
    LiveFinished,
    LiveRefused,
    LiveRestarted,
    LiveSlice,
    LiveStream,
    LiveUsage,
    Snapshots,
    StreamState,
)
from gridsieve.client.prompt import Options, Pruning, Trigger, check_scheme
from gridsieve.common.contract.errors import InvalidRequest, Unavailable
from gridsieve.common.contract.retention import EVS_CAUSAL, NONE, PIXEL_CHANGE, SUGGESTED
from gridsieve.search.films import FilmMoment

_when = partial(typer.Option, rich_help_panel="When it is asked")
_session = partial(typer.Option, rich_help_panel="Session")
_EVERY_S = 5.0
_FPS = 2.0
# Of sources, which the service watches.
_SCHEMES = ("http", "https", "rtsp", "rtsps")

_Ask: TypeAlias = Callable[[str], Coroutine[Any, Any, None]]


def live(
    *,
    source: Annotated[
        str,
        typer.Argument(help="A video file, played at its own pace; a camera, such as /dev/video0; or a stream's URL."),
    ],
    question: Annotated[str, typer.Argument(help="The question.")],
    every_s: Annotated[
        float | None,
        _when(
            help="Ask whenever so many seconds of the video have passed, or at the end of a shorter video; 0: not by "
            f"time. Default: {_EVERY_S:g}, or 0 with --on-change. 0 without --on-change: ask once, at the end."
        ),
    ] = None,
    on_change: Annotated[
        float | None, _when(help="Ask when this share of the picture has changed within a slice, such as 0.3.")
    ] = None,
    transient: Annotated[
        bool,
        _when(
            "--transient/--remember",
            help="Whether the session forgets this question and its answers, or keeps them in the conversation.",
        ),
    ] = True,
    fps: Annotated[float, _session(help="Frames to use per second.")] = _FPS,
    speed: Annotated[float, _session(help="Play a file so many times as fast.")] = 1.0,
    window_tokens: Annotated[
        int | None,
        _session(
            help="Tokens that the session remembers; it forgets the oldest part first. Default: 4096, or as "
            "many as fit."
        ),
    ] = None,
    answer_tokens: Annotated[
        int | None, _session(help="Tokens of a question and its answer together. Default: 1024.")
    ] = None,
    window_s: Annotated[
        float | None, _session(help="Seconds of video that the session remembers. Default: no limit.")
    ] = None,
    pruning_threshold: ThresholdOption = None,
    pruning_rate: Annotated[
        float | None, of_media(help=f"With --pruning-method {EVS_CAUSAL}: the fraction of each slice's tokens to drop.")
    ] = None,
    pruning_method: Annotated[
        str | None,
        of_media(
            help=f"Which tokens are kept. {PIXEL_CHANGE}: tokens whose pixels changed. "
            f"{EVS_CAUSAL}: the tokens that changed most. {NONE}: all. Default: "
            f"{SUGGESTED.method} with a threshold of {SUGGESTED.threshold:g}; {NONE} for models that do not take it."
        ),
    ] = None,
    max_pixels: MaxPixelsOption = None,
    system: SystemOption = None,
    sampling: SamplingFlags,
    schema: Annotated[
        Path | None,
        of_output(help="File with a JSON schema that each answer to the question satisfies, unless it is cut off."),
    ] = None,
    adapter: AdapterOption = None,
    recording: RecordingFlags,
    recall: Annotated[
        int,
        _session(
            min=0,
            help="With --index: show the model so many of its best earlier moments, then the newest pictures. "
            "Questions are then requests of their own, which have nothing of the session's window.",
        ),
    ] = 0,
    as_json: Annotated[
        bool, of_output("--json", help="Print each answer, or the error, as a line of JSON on stdout.")
    ] = False,
    server: ServerOption = DEFAULT_ADDRESS,
    access: AccessFlags,
) -> None:
    """Ask about a video while it plays, again and again.

    Each answer is printed with the time up to which the model has seen the video. In a terminal, type further
    questions; Ctrl-C ends the session. By default, tokens whose pixels do not change are dropped.

    Example: gridsieve live clip.mp4 "What happens?"

    Example: gridsieve live /dev/video0 "Is someone at the door?" --every-s 2 --max-new-tokens 8

    Example: gridsieve live /dev/video0 "What has changed?" --on-change 0.3 --json

    Example: gridsieve live rtsp://camera.example/stream "Is someone at the door?" --on-change 0.3

    Example: gridsieve live /dev/video0 "Who is at the door?" --schema people.json --json

    Example: gridsieve live match.mp4 "Sum up what happened." --every-s 0 --speed 4

    Example: gridsieve live /dev/video0 "When did the van leave?" --index yard --embedder 127.0.0.1:50063 --recall 4
    """
    recording.check()
    if recall and recording.index is None:
        raise typer.BadParameter("--recall needs --index, the folder with earlier moments")
    if recall and on_change is not None:
        raise typer.BadParameter("--recall and --on-change exclude each other: the session itself asks on a change")
    if not question.strip():
        raise typer.BadParameter("the question is empty")
    if not speed > 0:
        raise typer.BadParameter(f"--speed must be above 0, got {speed:g}")
    if every_s is None and on_change is None:
        every_s = _EVERY_S
    drawn = sampling.options()
    at_end = not every_s and on_change is None
    url = source if "://" in source else None
    said = said_pruning(pruning_rate, pruning_method, pruning_threshold)

    async def watch() -> None:
        asked = (
            drawn if schema is None else drawn | {"json_schema": schema.read_text(encoding="utf-8", errors="replace")}
        )
        trigger = Trigger(question, every_s=every_s or None, on_change=on_change, transient=transient, sampling=asked)
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(GridsieveClient(server, **access.access()))
            kept = None
            if recording.index is not None:
                from gridsieve.cli.recorded import Recall, recorded  # imported on use: it loads FFmpeg

                kept = await stack.enter_async_context(recorded(recording, access.access(), warn, as_json))
            opening = client.live(
                system=system,
                pruning=None if said == Pruning() else said,
                fps=fps,
                max_pixels=max_pixels,
                window_tokens=window_tokens,
                answer_tokens=answer_tokens,
                window_s=window_s,
                triggers=() if at_end or recall else (trigger,),
                source=url,
                snapshots=Snapshots.SLICES if kept else None,
                adapter=adapter,
            )
            session = await stack.enter_async_context(opening)
            printer = stack.enter_context(_Printer(as_json))
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(printer.follow(session.events()))
                    ask: _Ask = partial(_ask, lambda text: session.answer(text, **drawn))
                    if kept is not None:
                        own = Options(adapter=adapter)
                        recalls = Recall(
                            client, kept, _name_of(source), recall, system_message(system), own, printer.recalled, warn
                        )
                        following = recalls.follow(session.events(), question, asked, every_s or 0)
                        recorded_all = tasks.create_task(following)
                        if recall:
                            ask = partial(_ask, partial(recalls.ask, sampling=drawn))
                    typing = tasks.create_task(_type(ask, printer))
                    if url is None:
                        was_due = await _play(session, source, fps, speed) >= (every_s or 0)
                    else:
                        await _ended(session.events())
                        was_due = printer.asked
                    if kept is not None and recall:
                        typing.cancel()
                        await session.close()
                        await recorded_all
                        if at_end or not printer.asked:
                            await kept.complete()
                            await recalls.ask(question, asked)
                    elif at_end or (every_s and not was_due):
                        await session.answer(question, transient=transient, **asked)
                        printer.answered = True
                    typing.cancel()
                    await session.close()
                    if (every_s or printer.asked) and not printer.answered:
                        raise Unavailable("the question could not be answered", "generation")
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None

    with reported_errors(server, as_json=as_json):
        if url is not None:
            check_scheme(url, _SCHEMES)
        elif not Path(source).is_fifo():  # whose writer would end
            Path(source).open("rb").close()  # a file that cannot be read is reported before anything is called
        with in_flags():
            asyncio.run(watch())


def _name_of(source: str) -> str:
    """The camera's name in a recording: the host of a URL, else the name of the file or device."""
    return urlsplit(source).hostname or source if "://" in source else Path(source).stem


async def _ended(events: AsyncIterator[LiveEvent]) -> None:
    """Returns when the source ends."""
    async for event in events:
        if isinstance(event, LiveStream) and event.state is StreamState.ENDED:
            return


async def _play(session: LiveSession, source: str, fps: float, speed: float) -> float:
    """Shows the frames of a camera as they come, and those of a file when they are due.

    Returns the time of the last slice: two frames are one, and a last one alone is none before a question comes.
    """
    from gridsieve.cli.footage import is_camera, pictures  # imported on use: it loads FFmpeg

    frames, shown, seen_s = pictures(source, fps), 0, 0.0
    while frame := await _next(frames):
        time_s, picture = frame
        if not shown:
            began_s = time.monotonic()
        if not is_camera(source):
            await asyncio.sleep(began_s + time_s / speed - time.monotonic())
        await session.show(picture, time_s)
        shown += 1
        seen_s = seen_s if shown % 2 else time_s
    return seen_s


async def _next(frames: Iterator[tuple[float, bytes]]) -> tuple[float, bytes] | None:
    """The next frame, read in a daemon thread: Ctrl-C does not wait for a camera."""
    found: Future[tuple[float, bytes] | None] = Future()
    found.set_running_or_notify_cancel()  # a result may then be set after the waiting task was cancelled

    def read() -> None:
        try:
            found.set_result(next(frames, None))
        except BaseException as error:
            found.set_exception(error)

    Thread(target=read, daemon=True).start()
    return await asyncio.wrap_future(found)


async def _type(ask: _Ask, printer: _Printer) -> None:
    """Asks what is typed, a question a line, if stdin is a terminal. An empty line makes room for the next one."""
    if not sys.stdin.isatty():
        return
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, lambda: lines.put_nowait(sys.stdin.readline()))
    try:
        async with asyncio.TaskGroup() as asked:
            while line := await lines.get():
                printer.prompt(not line.strip())
                if line.strip():
                    asked.create_task(ask(line.strip()))
    finally:
        loop.remove_reader(sys.stdin)


async def _ask(answer: Callable[[str], Coroutine[Any, Any, object]], question: str) -> None:
    """Its answer is printed as those of the trigger. If it is refused, the session goes on."""
    try:
        with in_flags(), suppress(Unavailable):  # the event of this question reports it
            await answer(question)
    except InvalidRequest as error:
        report(error)


class _Printer:
    """Prints answers to stdout and how the session does to stderr, and at the end the sums of the session."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._status = StatusLine()
        self._seen_s = 0.0
        self._answering = False  # an answer's line has begun
        self.answers = self._recalled_tokens = 0
        self.asked = self.answered = False  # the question of the command
        self._usage: LiveUsage | None = None

    def __enter__(self) -> _Printer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_line()
        self._status.clear()
        if (usage := self._usage) is None:
            return
        told = f"{self._seen_s:.1f} s · {usage.frames} frames, {usage.used_frames} used, {usage.dropped_frames} dropped"
        if full := usage.media_tokens_full:
            dropped = 1 - usage.media_tokens / full
            told += f" · kept {usage.media_tokens} of {full} tokens of media ({dropped:.0%} dropped)"
        told += f" · {self.answers} answers of {usage.completion_tokens + self._recalled_tokens} tokens"
        stderr.print(f"[dim]{told}[/]", soft_wrap=True)

    def prompt(self, shown: bool) -> None:
        """Asks for a question in place of the line about the session, until the next call."""
        self._status.prompt(shown)

    def recalled(self, question: str, answer: Answer, shown: Sequence[FilmMoment]) -> None:
        """The answer to a question that is not the session's, and the moments before it."""
        self.answers += 1
        self._recalled_tokens += answer.usage.completion_tokens
        self.asked = self.answered = True
        self._status.clear()
        if self._as_json:
            told = {"time_s": self._seen_s, "question": question, **answer_json(answer)}
            print_json({**told, "shown": list(map(moment_json, shown))})
            return
        self._say(answer.text)
        self._end_line()
        for each in shown:
            stderr.print(f"[dim]shown: {escape(described(each))}[/]", soft_wrap=True)

    async def follow(self, events: AsyncIterator[LiveEvent]) -> None:
        async for event in events:
            if isinstance(event, LiveDelta | LiveFinished | LiveRefused) and event.ask_id.startswith("trigger-"):
                self.asked = True
                self.answered |= isinstance(event, LiveFinished)
            match event:
                case LiveSlice():
                    self._usage, self._seen_s = event.usage, event.last_time_s
                    self._status.show(
                        f"{self._seen_s:.1f} s · {event.usage.frames} frames, {event.usage.dropped_frames} dropped · "
                        f"{event.usage.held_tokens} tokens held"
                    )
                case LiveDelta() if not self._as_json:
                    self._say(event.delta.text)
                case LiveFinished():
                    self.answers += 1
                    self._usage = event.usage
                    self._finish(event)
                case LiveRefused(error=InvalidRequest()) if event.ask_id.startswith("trigger-"):
                    raise event.error
                case LiveRefused(error=Unavailable()):
                    self._warn(f"not answered: {event.error}")
                case LiveDropped(reason=DropReason.UNAVAILABLE):
                    self._warn(f"{event.frames} frames were lost: the encoder or preprocessing cannot be reached")
                case LiveDropped(reason=DropReason.REFUSED):
                    self._warn(f"{event.frames} frames were refused: {event.error}")
                case LiveRestarted():
                    self._warn(f"the session begins again with its last {event.segments} slices, questions and answers")
                case LiveStream(state=StreamState.ENDED) if event.reason:
                    self._warn(event.reason)
                case LiveStream(state=StreamState.LOST):
                    self._warn(f"the stream broke off and is opened again: {event.reason}")

    def _warn(self, text: str) -> None:
        self._end_line()
        self._status.clear()
        warn(text)

    def _say(self, text: str) -> None:
        if not self._answering:
            self._status.clear()
            typer.echo(f"{self._seen_s:.1f} s: ", nl=False)
        self._answering = True
        typer.echo(text, nl=False)

    def _finish(self, event: LiveFinished) -> None:
        if self._as_json:
            self._status.clear()
            told = {"time_s": event.seen_s, "question": event.question, **answer_json(event.answer)}
            print_json({**told, "session": dataclasses.asdict(event.usage)})
        else:
            self._say("")  # an answer may be empty
            self._end_line()

    def _end_line(self) -> None:
        if self._answering:
            typer.echo()
        self._answering = False
