"""The `framesieve` command: serve, ask, inspect, bench, capacity.

Answers and JSON go to stdout, everything else to stderr. Exit status: 0; 1 for an error, told in one line that begins
with its reason; 2 for wrong usage; 130 after Ctrl-C. `serve` is told to stop by that, and has statuses of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from common.contract.errors import StartupError
from common.contract.plan import Modality
from common.contract.retention import EVS, NONE, RANDOM, VIDCOM2, Pruning
from common.process import ExitStatus, at_once
from framesieve.bench.capacity import capacity
from framesieve.bench.command import bench
from framesieve.cli.ask import ask
from framesieve.cli.contact_sheet import contact_sheet
from framesieve.cli.inspection import Inspection, inspect
from framesieve.cli.launcher import SERVICES, Endpoint, LocalStack
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
from framesieve.cli.signals import DrainOnSignals, unwind_on_signals
from framesieve.cli.terminal import errors_told, stderr
from framesieve.client.client import DEFAULT_ADDRESS
from framesieve.client.prompt import file_name

app = typer.Typer(
    name="framesieve",
    help="Answers questions about video, with the patches that do not change pruned away.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _print_any_name() -> None:
    """As stderr does: a file's name need not be text."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@app.command()
def serve(
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint folder in transformers' format. Default: the embedded demo model.")
    ] = None,
    media_root: Annotated[Path | None, typer.Option(help="Folder below which requests may name paths.")] = None,
    listen: Annotated[str, typer.Option(help="Where clients ask: host:port or unix:/path.")] = DEFAULT_ADDRESS,
    preprocessing_listen: Annotated[str, typer.Option(help="Where preprocessing listens.")] = "127.0.0.1:50051",
    encoder_listen: Annotated[str, typer.Option(help="Where the encoder listens.")] = "127.0.0.1:50052",
    metrics_port: Annotated[
        int, typer.Option(help="Preprocessing's; the encoder and generation have the next two. 0: no metrics.")
    ] = 9101,
) -> None:
    """Run the three services on this machine until Ctrl-C, which lets running requests finish; a second ends them.

    Other settings of the services are read from their FRAMESIEVE_… environment variables, but for FRAMESIEVE_DRAIN_S:
    each service gets 30 seconds to finish. Exit status: 0 if all requests finished, 3 if some were cut off, 2 if a
    service could not start, 1 if one ended by itself later, 130 or 143 after a second Ctrl-C or SIGTERM, or one before
    all were ready (129 for a closed terminal). Closing the terminal later lets them finish, too, unless nohup started
    this: then they go on.

    Example: framesieve serve --model ~/models/Qwen2.5-VL-3B-Instruct --media-root ~/videos
    """
    addresses = (preprocessing_listen, encoder_listen, listen)
    ports = (metrics_port, metrics_port + 1, metrics_port + 2) if metrics_port else (0, 0, 0)
    endpoints = dict(zip(SERVICES, map(Endpoint, addresses, ports), strict=True))
    stack = LocalStack(model, media_root=media_root, endpoints=endpoints, show_logs=True)
    signals = DrainOnSignals(stack)
    with errors_told(cannot_start=ExitStatus.CANNOT_START):
        try:
            stack.start()
        except StartupError:
            if signals.first is None:
                raise
            raise typer.Exit(at_once(signals.first)) from None
    with errors_told():
        try:
            stderr.print(
                f"[bold]framesieve answers at {listen}[/]; Ctrl-C stops it. In another terminal:", soft_wrap=True
            )
            server = "" if listen == DEFAULT_ADDRESS else f" --server {listen}"
            stderr.print(f'  framesieve ask clip.mp4 "What moves?" --pruning-rate 0.75{server}', soft_wrap=True)
            stack.watch()
        finally:
            stack.stop()
    raise typer.Exit(stack.exit_status)


app.command()(ask)


@app.command("inspect")
def inspect_media(
    media: Annotated[str, typer.Argument(help="A video or an image: a file or a URL.")],
    pruning_rate: RateOption = 0.75,
    method: MethodOption = EVS,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the PNG is written.")] = Path("kept.png"),
    fps: FpsOption = None,
    max_frames: MaxFramesOption = None,
    preprocessing: Annotated[str | None, typer.Option(help="Where preprocessing listens.")] = None,
    encoder: Annotated[str | None, typer.Option(help="Where the encoder listens.")] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder, where no service is named.")] = None,
    on_server: OnServerOption = False,
    as_json: JsonOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token_file: TokenFileOption = None,
    allow_plaintext_token: PlaintextTokenOption = False,
) -> None:
    """Draw which patches of a video pruning keeps: frames side by side, pruned patches dimmed.

    Without --preprocessing and --encoder the services are started for this one picture and stopped again.

    Example: framesieve inspect clip.mp4 --pruning-rate 0.75 -o kept.png
    """
    pruning = pruning_of(pruning_rate, method)
    part = media_part(media, fps, max_frames, on_server)
    if (preprocessing is None) != (encoder is None):
        raise typer.BadParameter("--preprocessing and --encoder are given together or not at all")
    with errors_told():
        access = access_of(tls_ca, tls_cert, tls_key, token_file, allow_plaintext_token)
        if preprocessing is not None and encoder is not None:
            seen = asyncio.run(inspect(preprocessing, encoder, part, pruning, **access))
        else:
            unwind_on_signals()
            started = LocalStack(model, services=("preprocessing", "encoder"))
            with stderr.status("starting two services, looking, stopping them …"), started as stack:
                addresses = stack.addresses["preprocessing"], stack.addresses["encoder"]
                seen = asyncio.run(inspect(*addresses, part, pruning, **access))
        _draw(seen, pruning, file_name(media)).save(output, format="PNG")
    _tell_inspection(seen, pruning, output, as_json)


app.command()(bench)
app.command()(capacity)


_METHOD_NAMES = {EVS: "EVS", VIDCOM2: "VidCom2", RANDOM: "a random choice", NONE: "no pruning"}


def _draw(seen: Inspection, pruning: Pruning, name: str) -> Any:
    grid, kept = seen.plan.grid, seen.kept.size
    share = f"{kept} of {grid.tokens} tokens ({kept / grid.tokens:.1%})"
    caption = (
        f"{_METHOD_NAMES[pruning.method]} at rate {pruning.rate:g} keeps {share}  ·  "
        f"{_moments(seen)} of {grid.h} by {grid.w} tokens"
    )
    return contact_sheet(seen.frames, grid, seen.kept, seen.plan.timestamps_s, name, caption)


def _tell_inspection(seen: Inspection, pruning: Pruning, output: Path, as_json: bool) -> None:
    grid, kept = seen.plan.grid, int(seen.kept.size)
    if as_json:
        by_slice = [int(((seen.kept // grid.slice_tokens) == index).sum()) for index in range(grid.t)]
        print_json(
            {
                "output": str(output),
                "modality": seen.plan.modality,
                "grid": dataclasses.asdict(grid),
                "tokens": grid.tokens,
                "kept_tokens": kept,
                "kept_tokens_by_slice": by_slice,
                "pruning": dataclasses.asdict(pruning),
                "repaired_frames": seen.repaired_frames,
            }
        )
        return
    print(f"{output}: {kept} of {grid.tokens} tokens kept, {_moments(seen)} of {grid.h} × {grid.w}")


def _moments(seen: Inspection) -> str:
    if seen.plan.modality is Modality.IMAGE:
        return "1 picture"
    return f"{seen.plan.grid.t} slice{'' if seen.plan.grid.t == 1 else 's'}"
