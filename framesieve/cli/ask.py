"""The command `framesieve ask`: sends one question and prints its completions, streamed or as JSON."""

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
from framesieve.cli.terminal import MediaBars, print_cost, reported_errors, stderr
from framesieve.client.answer import Accepted, Answer, Choice, Delta, Finished, Progress, cost_of
from framesieve.client.client import DEFAULT_ADDRESS, FramesieveClient
from framesieve.client.credentials import Access
from framesieve.client.prompt import Image, Options, Video

_SAMPLING = "Sampling (default: the model's)"
_OUTPUT = "Output"


def ask(
    *,
    media: Annotated[list[str] | None, typer.Argument(help="Videos and images (by suffix): files or URLs.")] = None,
    question: Annotated[str, typer.Argument(help="The question.")],
    pruning_rate: RateOption = 0.0,
    method: MethodOption = EVS,
    server: Annotated[
        str, typer.Option(help="Address of generation; several replicas separated by commas.")
    ] = DEFAULT_ADDRESS,
    fps: FpsOption = None,
    max_frames: MaxFramesOption = None,
    timeout_s: Annotated[float | None, typer.Option(help="Deadline of the request, in seconds.")] = None,
    on_server: OnServerOption = False,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy decoding.", rich_help_panel=_SAMPLING)] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the most likely tokens with this total probability.", rich_help_panel=_SAMPLING),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(help="Sample from this many of the most likely tokens; 0: all.", rich_help_panel=_SAMPLING),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Drop tokens less likely than this fraction of the most likely one.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1: penalise tokens that occur in the prompt or completion.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 0, at most 2: penalise tokens that occur in the completion.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option(help="Above 0, at most 2: the same, for each occurrence.", rich_help_panel=_SAMPLING),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.", rich_help_panel=_SAMPLING)] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Maximum tokens of a completion. Default: what fits, at most 1024.", rich_help_panel=_OUTPUT),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End a completion before this text; may be repeated.", rich_help_panel=_OUTPUT),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(help="Name of a LoRA adapter that generation has loaded (--adapters)."),
    ] = None,
    n: Annotated[int | None, typer.Option("--n", help="Number of completions.", rich_help_panel=_OUTPUT)] = None,
    as_json: JsonOption = False,
    top_logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: each token's log-probability, and this many of the most likely tokens in its place.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token_file: TokenFileOption = None,
    allow_plaintext_token: PlaintextTokenOption = False,
) -> None:
    """Ask a question about videos and images; the completion is streamed to stdout.

    Images are never pruned. All videos have the same rate and method here; in Python, Video(pruning=...) sets its own.

    An argument that starts with http://, https:// or data: is a URL. Preprocessing fetches it if its settings allow it.

    Example: framesieve ask clip.mp4 "What moves?" --pruning-rate 0.75

    Example: framesieve ask https://example.org/clip.mp4 "What moves?"

    Example: framesieve ask clip.mp4 "What moves?" --server gpu-1:50053 --tls-ca ca.pem --token-file token

    Example: framesieve ask clip.mp4 "What moves?" --adapter traffic

    Example: framesieve ask clip.mp4 "Describe it." --n 3 --temperature 0.8 --top-p 0.9 --seed 1
    """
    if top_logprobs is not None and not as_json:
        raise typer.BadParameter("--top-logprobs needs --json")
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
    with reported_errors(server):
        access = access_of(tls_ca, tls_cert, tls_key, token_file, allow_plaintext_token)
        if as_json:
            print_json(_answer_json(asyncio.run(_ask(server, access, parts, question, options))))
        else:
            print_cost(*cost_of(asyncio.run(_stream(server, access, parts, question, options))))


async def _ask(server: str, access: Access, parts: list[Image | Video], question: str, options: Options) -> Answer:
    async with FramesieveClient(server, **access) as client:
        return await client.ask(parts, question, **options)


async def _stream(
    server: str, access: Access, parts: list[Image | Video], question: str, options: Options
) -> list[Finished]:
    """Prints the completions, after progress bars on stderr until the first token."""
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
        raise PeerContract(f"the stream from {server} ended before all completions were finished")
    return printer.finished


class Printer:
    """Prints interleaved completions one after another: streams the current one and buffers the later ones.

    With more than one completion, a heading on stderr precedes each.
    """

    def __init__(self, completions: int) -> None:
        self.finished: list[Finished] = []
        self._completions = completions
        self._current = 0
        self._buffered: dict[int, str] = {}
        self._begun = False

    @property
    def complete(self) -> bool:
        return self._current == self._completions

    def add(self, delta: Delta) -> None:
        if delta.choice_index == self._current:
            self._print(delta.text)
        else:
            self._buffered[delta.choice_index] = self._buffered.get(delta.choice_index, "") + delta.text

    def finish(self, finished: Finished) -> None:
        self.finished.append(finished)
        ended = {each.choice_index for each in self.finished}
        while self._current in ended:
            self._print("")  # a completion may be empty
            self.close()
            self._current += 1
            if self._current in self._buffered:
                self._print(self._buffered.pop(self._current))

    def close(self) -> None:
        """Ends the current line, if one was begun."""
        if self._begun:
            typer.echo()
        self._begun = False

    def _print(self, text: str) -> None:
        if not self._begun and self._completions > 1:
            stderr.print(f"[dim]completion {self._current + 1} of {self._completions}[/]")
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
    result: dict[str, Any] = {"answer": choice.text, "finish_reason": choice.reason}
    if choice.logprobs:
        tops = choice.top_logprobs or ((),) * len(choice.token_ids)
        result["tokens"] = [
            {
                "token_id": token_id,
                "logprob": logprob,
                "top_logprobs": [{"token_id": one, "logprob": value} for one, value in top],
            }
            for token_id, logprob, top in zip(choice.token_ids, choice.logprobs, tops, strict=True)
        ]
    return result
