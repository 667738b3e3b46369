"""The command `gridsieve ask`: asks questions about media and prints the answers, streamed or as JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import mimetypes
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from gridsieve.cli.moments import described, moment_json
from gridsieve.cli.options import (
    AccessFlags,
    AdapterOption,
    ClipFlags,
    JsonOption,
    NumFramesOption,
    OptionalEmbedderOption,
    PruningFlags,
    SamplingFlags,
    ServerOption,
    StoreOption,
    SystemOption,
    ThinkingOption,
    TimeoutOption,
    in_flags,
    of_media,
    of_output,
    of_sampling,
    print_json,
    template_options,
)
from gridsieve.cli.terminal import MediaBars, print_cost, reported_errors, stderr
from gridsieve.client.answer import Accepted, Answer, Choice, Delta, Finished, Moment, Progress, Usage
from gridsieve.client.captions import CaptionFormat, captions
from gridsieve.client.client import DEFAULT_ADDRESS, GridsieveClient
from gridsieve.client.prompt import Message, Options, Part, Text, is_url, user_turn
from gridsieve.common.contract.errors import PeerContract

CAPTION_SUFFIXES: Mapping[str, CaptionFormat] = {".vtt": "vtt", ".srt": "srt"}


def ask(
    *,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MEDIA]... QUESTION",
            help="Videos, images and sounds, as files or URLs, or a folder with an index; then the question, unless -q "
            "is given.",
        ),
    ] = None,
    question: Annotated[
        list[str] | None,
        typer.Option("--question", "-q", help="A question. Repeat it to ask several about the same media."),
    ] = None,
    pruning: PruningFlags,
    clip: ClipFlags,
    num_frames: NumFramesOption = None,
    audio: Annotated[bool, of_media("--audio", help="The model hears the sound of each video, too.")] = False,
    system: SystemOption = None,
    sampling: SamplingFlags,
    top_k: Annotated[int | None, of_sampling(help="Sample from this many of the most likely tokens; 0: all.")] = None,
    min_p: Annotated[
        float | None, of_sampling(help="Drop tokens below this fraction of the most likely token's probability.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, of_sampling(help="Above 1: make tokens of the prompt and completion less likely.")
    ] = None,
    presence_penalty: Annotated[
        float | None, of_sampling(help="Above 0, at most 2: make tokens of the completion less likely.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, of_sampling(help="Above 0, at most 2: make tokens less likely by each occurrence.")
    ] = None,
    thinking: ThinkingOption = None,
    adapter: AdapterOption = None,
    stop: Annotated[
        list[str] | None, of_output(help="End the completion before this text. Repeat it for several texts.")
    ] = None,
    moments: Annotated[
        bool,
        of_output(help="Ask for moments: times of the video, and what happens there. Only its own times can be named."),
    ] = False,
    grain_s: Annotated[
        float | None, of_output(help="Moments at multiples of so many seconds, not at the times of the frames shown.")
    ] = None,
    captions_file: Annotated[
        Path | None, of_output("--captions", help="Write the moments of a video as captions, to a .vtt or .srt file.")
    ] = None,
    as_json: JsonOption = False,
    top_logprobs: Annotated[
        int | None,
        of_output(
            help="Requires --json: print the log-probability of each token and of this many of the most likely tokens."
        ),
    ] = None,
    server: ServerOption = DEFAULT_ADDRESS,
    embedder: OptionalEmbedderOption = None,
    store: StoreOption = None,
    timeout_s: TimeoutOption = None,
    access: AccessFlags,
) -> None:
    """Ask a question about videos, images and sounds; the completion is streamed to stdout.

    Images and sounds are never pruned. All videos get the same pruning, by default the service's. In Python, each
    video can have its own.

    An argument that starts with http://, https://, file:// or data: is a URL. Preprocessing fetches the URL if its
    settings allow this. file:///path is a file on preprocessing's machine, below --media-root.

    A folder, after `gridsieve index FOLDER`: the model is shown the moments that are nearest to the question, and
    others spread over the folder, each with its file and seconds. --embedder finds them.

    Example: gridsieve ask clip.mp4 "What moves?" --pruning-rate 0.75

    Example: gridsieve ask clip.mp4 "What moves?" --pruning-threshold 0.1

    Example: gridsieve ask clip.mp4 -q "What moves?" -q "Which colour is it?"

    Example: gridsieve ask film.mkv "What happens?" --start-s 60 --end-s 90

    Example: gridsieve ask talk.mp4 "What does she say about the map?" --audio

    Example: gridsieve ask https://example.org/clip.mp4 "What moves?" --json

    Example: gridsieve ask talk.mp4 "What happens, and when?" --captions talk.vtt

    Example: gridsieve ask films "When does the red car stop?" --embedder 127.0.0.1:50063
    """
    if top_logprobs is not None and not as_json:
        raise typer.BadParameter("--top-logprobs requires --json")
    locations, questions = _media_and_questions(inputs or [], question or [])
    if captions_file:
        _check_captions(captions_file, locations, questions)
    folder = _folder(locations, clip, embedder, audio=audio)
    media: Sequence[Part] = (
        [] if folder else [clip.heard(each, audio=audio, num_frames=num_frames) for each in locations]
    )
    history = system_message(system)
    options = Options(
        **pruning.options(),
        **sampling.options(),
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop,
        moments=(moments or captions_file is not None) if grain_s is None else grain_s,
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs,
        template_options=template_options(thinking),
        adapter=adapter,
        timeout_s=timeout_s,
    )

    async def ask_all() -> None:
        answers = []
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(GridsieveClient(server, **access.access()))
            asked = None
            if folder and embedder:
                from gridsieve.cli.asked_folder import AskedFolder

                about = AskedFolder(folder, embedder, store, clip, num_frames, access.access(), as_json)
                asked = await stack.enter_async_context(about)
            for each in questions:
                parts, shown = await asked.shown_for(each) if asked else (media, [])
                if as_json:
                    with in_flags([*history, user_turn(parts, each)]):
                        answer = await client.ask(parts, each, history=history, **options)
                    answers.append(answer_json(answer) | ({"shown": list(map(moment_json, shown))} if asked else {}))
                    _write_captions(captions_file, answer.moments)
                    continue
                if len(questions) > 1:
                    stderr.print(f"[bold]{escape(each)}[/]", soft_wrap=True)
                finished, _ = await stream(client, parts, each, history, options)
                _write_captions(captions_file, finished.moments)
                for moment in shown:
                    stderr.print(f"[dim]shown: {escape(described(moment))}[/]", soft_wrap=True)
                print_cost(finished.usage, finished.timings)
        if as_json:
            several = [{"question": each, **answer} for each, answer in zip(questions, answers, strict=True)]
            print_json({"answers": several} if len(questions) > 1 else answers[0])

    with reported_errors(server, as_json=as_json):
        asyncio.run(ask_all())


def system_message(text: str | None) -> tuple[Message, ...]:
    """The history that a conversation starts with."""
    return (Message("system", (Text(text),)),) if text else ()


def _media_and_questions(inputs: Sequence[str], questions: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Raises BadParameter for a question that is empty or forgotten."""
    media = inputs
    if not questions:
        if not inputs:
            raise typer.BadParameter('a question is missing: gridsieve ask clip.mp4 "What moves?"')
        *media, last = inputs
        # Unlike Path's methods, these take texts that are too long for a name.
        if is_url(last) or os.path.exists(last) or _looks_like_media(last):  # noqa: PTH110  (Path fails for a long text)
            what = "a folder" if os.path.isdir(last) else "a media file"  # noqa: PTH112  (likewise)
            raise typer.BadParameter(f'{last} is {what}, add a question: gridsieve ask {last} "What moves?"')
        questions = [last]
    if any(not each.strip() for each in questions):
        raise typer.BadParameter("the question is empty")
    return media, questions


def _check_captions(path: Path, media: Sequence[str], questions: Sequence[str]) -> None:
    """Raises BadParameter where there is not one text for one file."""
    if path.suffix not in CAPTION_SUFFIXES:
        raise typer.BadParameter(f"{path} must end with {' or '.join(CAPTION_SUFFIXES)}", param_hint="--captions")
    if len(media) != 1 or len(questions) != 1 or os.path.isdir(media[0]):  # noqa: PTH112  (likewise)
        raise typer.BadParameter("needs one video and one question", param_hint="--captions")


def _write_captions(path: Path | None, moments: Sequence[Moment]) -> None:
    if path:
        path.write_text(captions(moments, CAPTION_SUFFIXES[path.suffix]), encoding="utf-8")


def _folder(locations: Sequence[str], clip: ClipFlags, embedder: str | None, *, audio: bool) -> Path | None:
    """The folder that is asked about; None: media. Raises BadParameter for what a folder lacks, or does not take."""
    folder = next((each for each in locations if os.path.isdir(each)), None)  # noqa: PTH112  (likewise)
    if folder is None:
        return None
    if len(locations) > 1:
        raise typer.BadParameter(f"{folder} is a folder, which is asked about alone, without other media")
    if audio or clip.start_s is not None or clip.end_s is not None:
        raise typer.BadParameter(f"--audio, --start-s and --end-s are of videos, and {folder} is a folder")
    if embedder is None:
        raise typer.BadParameter(f"{folder} is a folder: --embedder must have the address of the model of its index")
    return Path(folder)


def _looks_like_media(argument: str) -> bool:
    kind = mimetypes.guess_type(argument)[0] or ""
    return not any(map(str.isspace, argument)) and kind.startswith(("video/", "image/", "audio/"))


async def stream(
    client: GridsieveClient,
    parts: Sequence[Part],
    question: str,
    history: Sequence[Message],
    options: Options,
) -> tuple[Finished, str]:
    """Prints the completion, after progress bars and its thought on stderr. Returns how it ended, and its text."""
    text, thinks, finished = "", False, None
    try:
        with in_flags([*history, user_turn(parts, question)]), MediaBars() as bars:
            async for event in client.stream(parts, question, history=history, **options):
                match event:
                    case Accepted():
                        bars.accepted(event)
                    case Progress():
                        bars.advanced(event)
                    case Delta():
                        bars.stop()
                        if event.thought:
                            typer.secho(event.thought, nl=False, err=True, dim=True)
                        if event.text and thinks:
                            typer.echo(err=True)
                        thinks = bool(event.thought) or (thinks and not event.text)
                        if not options.get("moments"):
                            typer.echo(event.text, nl=False)
                        text += event.text
                    case Finished():
                        finished = event
                        typer.echo("\n".join(map(_moment_line, event.moments)), nl=False)
    finally:
        if text or finished:
            typer.echo()
    if finished is None:
        raise PeerContract(f"the stream from {client.address} ended before the completion was finished")
    return finished, text


def _moment_line(moment: Moment) -> str:
    unseen = "" if moment.kept else " (pruning kept nothing of it)"
    return f"{moment.start_s:.2f} to {moment.end_s:.2f} s: {moment.description}{unseen}"


def answer_json(answer: Answer) -> dict[str, Any]:
    told = {
        "answer": answer.text,
        **({"thought": answer.thought} if answer.thought else {}),
        **({"moments": [dataclasses.asdict(each) for each in answer.moments]} if answer.moments else {}),
        "finish_reason": answer.reason,
        "request_id": answer.request_id,
        "usage": _usage_json(answer.usage),
        "timings": dataclasses.asdict(answer.timings),
    }
    return told | ({"tokens": _tokens_json(answer.choices[0])} if answer.logprobs else {})


def _usage_json(usage: Usage) -> dict[str, Any]:
    told = dataclasses.asdict(usage)
    for item, counted in zip(told["media"], usage.media, strict=True):
        item["pruning_rate"] = counted.pruning_rate
    return told


def _tokens_json(choice: Choice) -> list[dict[str, Any]]:
    tops = choice.top_logprobs or ((),) * len(choice.token_ids)
    return [
        {
            **_token_json(token_id, logprob, choice),
            "top_logprobs": [_token_json(one, value, choice) for one, value in top],
        }
        for token_id, logprob, top in zip(choice.token_ids, choice.logprobs, tops, strict=True)
    ]


def _token_json(token_id: int, logprob: float, choice: Choice) -> dict[str, Any]:
    return {"token_id": token_id, "text": choice.token_texts.get(token_id), "logprob": logprob}
