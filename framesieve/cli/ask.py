"""The command `framesieve ask`: a question in, one answer or several out, as they come or as JSON."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Annotated, Any

import typer

from common.contract.errors import PeerContract
from common.contract.retention import EVS
from framesieve.cli.options import (
    FpsOption,
    JsonOption,
    MaxFramesOption,
    MethodOption,
    OnServerOption,
    PlaintextTokenOption,
    RateOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TokenFileOption,
    access_of,
    media_part,
    print_json,
    pruning_of,
)
from framesieve.cli.terminal import MediaBars, errors_told, stderr, tell_cost
from framesieve.client.answer import Accepted, Answer, Choice, Delta, Finished, Progress, cost_of
from framesieve.client.client import DEFAULT_ADDRESS, FramesieveClient
from framesieve.client.credentials import Access
from framesieve.client.prompt import Image, Video
from framesieve.client.wire import Options

_CHOOSING = "How tokens are chosen (default: the model's own way)"
_ANSWERS = "What comes back"


def ask(
    *,
    media: Annotated[list[str] | None, typer.Argument(help="Videos and images, by suffix: files, URLs.")] = None,
    question: Annotated[str, typer.Argument(help="What to ask about them.")],
    pruning_rate: RateOption = 0.0,
    method: MethodOption = EVS,
    server: Annotated[str, typer.Option(help="Where generation listens.")] = DEFAULT_ADDRESS,
    fps: FpsOption = None,
    max_frames: MaxFramesOption = None,
    timeout_s: Annotated[float | None, typer.Option(help="Give up after this many seconds.")] = None,
    on_server: OnServerOption = False,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token each time.", rich_help_panel=_CHOOSING)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the likeliest that hold this much probability.", rich_help_panel=_CHOOSING),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from this many of the likeliest; 0: from all.", rich_help_panel=_CHOOSING)
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop what is less likely than this share of the likeliest.", rich_help_panel=_CHOOSING),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Above 1: against tokens of the prompt and the answer.", rich_help_panel=_CHOOSING),
    ] = None,
    presence_penalty: Annotated[
        float | None,
        typer.Option(help="Above 0, at most 2: against tokens of the answer.", rich_help_panel=_CHOOSING),
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option(help="Above 0, at most 2: once for each time they stand there.", rich_help_panel=_CHOOSING),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Makes a sampled answer repeatable.", rich_help_panel=_CHOOSING)
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="At most this many tokens of answer: what fits, at most 1024.", rich_help_panel=_ANSWERS),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be repeated.", rich_help_panel=_ANSWERS)
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(help="The adapter that answers, by the name it is served under (generation's --adapters)."),
    ] = None,
    n: Annotated[
        int | None, typer.Option("--n", help="So many answers to one question.", rich_help_panel=_ANSWERS)
    ] = None,
    as_json: JsonOption = False,
    top_logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: each token, its log-probability, and this many of the likeliest in its place.",
            rich_help_panel=_ANSWERS,
        ),
    ] = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token_file: TokenFileOption = None,
    allow_plaintext_token: PlaintextTokenOption = False,
) -> None:
    """Ask a question about videos and images; the answer streams to stdout.

    Images are never pruned. Every video has the same rate and method here; in Python, Video(pruning=...) sets its own.

    What starts with http://, https:// or data: is a URL, which preprocessing fetches where its settings allow it.

    Example: framesieve ask clip.mp4 "What moves?" --pruning-rate 0.75

    Example: framesieve ask https://example.org/clip.mp4 "What moves?"

    Example: framesieve ask clip.mp4 "What moves?" --server gpu-1:50053 --tls-ca ca.pem --token-file token

    Example: framesieve ask clip.mp4 "What moves?" --adapter traffic

    Example: framesieve ask clip.mp4 "Describe it." --n 3 --temperature 0.8 --top-p 0.9 --seed 1
    """
    if top_logprobs is not None and not as_json:
        raise typer.BadParameter("--top-logprobs is shown with --json alone")
    pruning = pruning_of(pruning_rate, method)
    parts = [media_part(each, fps, max_frames, on_server) for each in media or []]
    options = Options(
        pruning_rate=pruning.rate,
        pruning_method=pruning.method,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop,
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs,
        adapter=adapter,
        n=n,
        timeout_s=timeout_s,
    )
    with errors_told(server):
        access = access_of(tls_ca, tls_cert, tls_key, token_file, allow_plaintext_token)
        if as_json:
            print_json(_answer_json(asyncio.run(_ask(server, access, parts, question, options))))
        else:
            tell_cost(*cost_of(asyncio.run(_stream(server, access, parts, question, options))))


async def _ask(server: str, access: Access, parts: list[Image | Video], question: str, options: Options) -> Answer:
    async with FramesieveClient(server, **access) as client:
        return await client.ask(parts, question, **options)


async def _stream(
    server: str, access: Access, parts: list[Image | Video], question: str, options: Options
) -> list[Finished]:
    """Prints the answers, with bars on stderr until the first begins."""
    printer = Printer(options.get("n") or 1)
    try:
        async with FramesieveClient(server, **access) as client:
            with MediaBars() as bars:
                async for event in client.stream(parts, question, **options):
                    match event:
                        case Accepted():
                            bars.accepted(event)
                        case Progress():
                            bars.advanced(event)
                        case Delta():
                            bars.stop()
                            printer.add(event)
                        case Finished():
                            printer.finish(event)
    finally:
        printer.close()
    if not printer.complete:
        raise PeerContract(f"the stream from {server} ended before its answer did")
    return printer.finished


class Printer:
    """Prints answers to stdout one after another, although they come mixed: one as it comes, the others wait for it.

    Which one it is stands on stderr where there are several.
    """

    def __init__(self, answers: int) -> None:
        self.finished: list[Finished] = []
        self._answers = answers
        self._turn = 0
        self._waiting: dict[int, str] = {}
        self._begun = False

    @property
    def complete(self) -> bool:
        return self._turn == self._answers

    def add(self, delta: Delta) -> None:
        if delta.choice_index == self._turn:
            self._print(delta.text)
        else:
            self._waiting[delta.choice_index] = self._waiting.get(delta.choice_index, "") + delta.text

    def finish(self, finished: Finished) -> None:
        self.finished.append(finished)
        ended = {each.choice_index for each in self.finished}
        while self._turn in ended:
            self._print("")  # an answer may be empty
            self.close()
            self._turn += 1
            if self._turn in self._waiting:
                self._print(self._waiting.pop(self._turn))

    def close(self) -> None:
        """Ends the line that was begun, if any was."""
        if self._begun:
            typer.echo()
        self._begun = False

    def _print(self, text: str) -> None:
        if not self._begun and self._answers > 1:
            stderr.print(f"[dim]answer {self._turn + 1} of {self._answers}[/]")
        self._begun = True
        typer.echo(text, nl=False)


def _answer_json(answer: Answer) -> dict[str, Any]:
    return {
        "answer": answer.text,
        "finish_reason": answer.reason,
        "choices": [_choice_json(choice) for choice in answer.choices],
        "request_id": answer.request_id,
        "usage": dataclasses.asdict(answer.usage),
        "timings": dataclasses.asdict(answer.timings),
    }


def _choice_json(choice: Choice) -> dict[str, Any]:
    told: dict[str, Any] = {"answer": choice.text, "finish_reason": choice.reason}
    if choice.logprobs:
        tops = choice.top_logprobs or ((),) * len(choice.token_ids)
        told["tokens"] = [
            {
                "token_id": token_id,
                "logprob": logprob,
                "top_logprobs": [{"token_id": one, "logprob": value} for one, value in top],
            }
            for token_id, logprob, top in zip(choice.token_ids, choice.logprobs, tops, strict=True)
        ]
    return told
