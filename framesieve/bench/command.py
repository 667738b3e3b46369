"""The command `framesieve bench`: its flags, the run that they ask for, and its report.

How a run goes is `framesieve.bench.run`'s. This module alone prints: a table or JSON on stdout, the rest on stderr.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from common.contract.errors import InvalidRequest
from common.contract.retention import EVS, METHODS
from framesieve.bench.load import Extent
from framesieve.bench.plot import check_plotting, plot
from framesieve.bench.report import Report, record_json, report_json, table
from framesieve.bench.run import Run, measure, served
from framesieve.bench.workload import Entry, Workload, read_workload, synthesised
from framesieve.cli.options import (
    JsonOption,
    PlaintextTokenOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TokenFileOption,
    access_of,
    print_json,
    pruning_of,
)
from framesieve.cli.terminal import reported_errors
from framesieve.client.client import DEFAULT_ADDRESS
from framesieve.client.prompt import Options

_CLIENTS = 8
_REQUESTS = 100


def bench(
    context: typer.Context,
    *,
    server: Annotated[
        str | None,
        typer.Option(
            help=f"Where generation listens. Default: {DEFAULT_ADDRESS} if anything listens there (framesieve serve), "
            "else as with --start."
        ),
    ] = None,
    start: Annotated[
        bool, typer.Option("--start", help="Start the three services for this run and stop them again.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="Their checkpoint folder; implies --start. Default: the embedded demo model.")
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            help="host:port of a service's /metrics, by plain HTTP, once for each replica of all three; --json then "
            "says what they spent, for framesieve capacity. Known of services that are started for the run."
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(min=1, help=f"Closed loop: so many clients, each asking on when answered. Default: {_CLIENTS}."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Open loop: Poisson arrivals, so many a second on average, answered or not."),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help=f"How many to ask. Default: {_REQUESTS}.")] = None,
    duration_s: Annotated[
        float | None, typer.Option(help="Or: begin none after so many seconds; what runs is waited for.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="How many to ask beforehand, uncounted.")] = 8,
    workload: Annotated[
        Path | None,
        typer.Option(
            help="What to ask, as JSON lines: question; video or image (paths, from the file's folder) or url; and "
            "pruning_rate, method, max_new_tokens, weight, where they are a line's own. Default: synthesised clips."
        ),
    ] = None,
    on_server: Annotated[
        bool, typer.Option("--on-server", help="The workload's paths are below the server's --media-root.")
    ] = False,
    unique: Annotated[
        bool | None,
        typer.Option(
            "--unique/--repeat",
            help="Whether each synthesised clip is new to caches, or a few come again and again. Default: new.",
        ),
    ] = None,
    pruning_rate: Annotated[
        list[float] | None,
        typer.Option(help="Share of each video's tokens to drop. Several take turns, so one load compares them."),
    ] = None,
    method: Annotated[str, typer.Option(help=f"Which tokens are kept: {', '.join(METHODS)}.")] = EVS,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most this many tokens of each answer.")] = 64,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Let every answer have --max-new-tokens, ended or not.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and of synthesised clips.")] = 0,
    timeout_s: Annotated[float, typer.Option(help="A question unanswered for so long has failed.")] = 300.0,
    as_json: JsonOption = False,
    with_records: Annotated[bool, typer.Option("--records", help="With --json: every question too.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--plot", help="Write distributions and throughput as a PNG; needs the extra 'plot'."),
    ] = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token_file: TokenFileOption = None,
    allow_plaintext_token: PlaintextTokenOption = False,
) -> None:
    """Measure a server under load: latencies, throughput, what pruning saves.

    Without flags: 8 clients ask 100 questions about synthesised clips, of the framesieve that runs on this machine or,
    where none does, of one that is started for it with the embedded model.

    Latencies are seen from here. With --rate they count from when a question was due, not from when it was sent, so a
    server that falls behind shows it. What a server refuses counts as failed and is not asked again. Ctrl-C ends early
    and still reports. Exit status 1 if every question failed.

    Rates that take turns also share the server's batches, so each is slowed or helped by the others: for the throughput
    of a rate, give it a run of its own.

    Example: framesieve bench --pruning-rate 0 --pruning-rate 0.75 --plot load.png

    Example: framesieve bench --server gpu-1:50053 --rate 4 --duration-s 60 --workload questions.jsonl --json
    """
    _check_flags(
        {"--clients": clients, "--rate": rate},
        {"--requests": requests, "--duration-s": duration_s},
        {"--server": server, "--start": start or None},
        {"--server": server, "--model": model},
        {"--metrics": metrics, "--start": start or None},
        {"--metrics": metrics, "--model": model},
        {"--workload": workload, "--unique/--repeat": unique},
        positive={"--rate": rate, "--duration-s": duration_s, "--timeout-s": timeout_s},
    )
    if output is not None and not output.parent.is_dir():
        raise typer.BadParameter(f"--plot needs a folder that exists, {output.parent} is none")
    if on_server and workload is None:
        raise typer.BadParameter("--on-server needs --workload")
    if with_records and not as_json:
        raise typer.BadParameter("--records needs --json")
    with reported_errors(server or DEFAULT_ADDRESS):
        if output is not None:
            check_plotting()
        prunings = [pruning_of(each, method) for each in pruning_rate or [0.0]]
        entries = _entries(workload, on_server) if workload else synthesised(seed)
        asked = Workload(entries, prunings, unique=workload is None and unique is not False)
        extent = Extent(None if duration_s else requests or _REQUESTS, duration_s)
        access = access_of(tls_ca, tls_cert, tls_key, token_file, allow_plaintext_token)
        options = Options(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, timeout_s=timeout_s)
        began = datetime.now(UTC).isoformat(timespec="seconds")
        with served(server, start, model, metrics or ()) as target:
            loop = clients or (None if rate else _CLIENTS)
            run = Run(target.address, asked, loop, rate, extent, warmup, seed, options, access, target.metrics)
            outcome = asyncio.run(measure(run))
        if output is not None:
            plot(outcome.records, outcome.wall_s, f"{_command(context)}  ·  {began}", output)
    report = Report.of(outcome.records, outcome.wall_s)
    about = {
        "command": _command(context),
        "began": began,
        "server": target.told,
        "load": run.load,
        "media": _media_told(workload, unique),
        "warmup": f"{warmup} requests, uncounted, of which {outcome.warmup_failed} failed" if warmup else "none",
    }
    if as_json:
        told = {"run": about, "interrupted": outcome.interrupted, "abandoned": outcome.abandoned, **report_json(report)}
        told["services"] = [dataclasses.asdict(each) for each in outcome.spent]
        if with_records:
            told["records"] = [record_json(record) for record in outcome.records]
        print_json(told)
    else:
        typer.echo("\n".join([about.pop("command"), *(f"{name + ':':<9}{value}" for name, value in about.items()), ""]))
        if outcome.interrupted:
            typer.echo(f"interrupted: {outcome.abandoned} requests under way were given up")
        typer.echo(table(report))
    if outcome.interrupted:
        raise typer.Exit(130)
    if not report.all.answered:
        raise typer.Exit(1)


# --- flags ------------------------------------------------------------------------------------------------------


def _check_flags(*exclusive: dict[str, object], positive: dict[str, float | None]) -> None:
    """Raises BadParameter where more than one of a group is set, or a number is not above 0."""
    for group in exclusive:
        given = [name for name, value in group.items() if value is not None]
        if len(given) > 1:
            raise typer.BadParameter(f"{' and '.join(given)} exclude each other")
    for name, number in positive.items():
        if number is not None and not 0 < number < float("inf"):
            raise typer.BadParameter(f"{name} must be above 0 and finite, got {number:g}")


def _entries(workload: Path, on_server: bool) -> list[Entry]:
    try:
        return read_workload(workload, on_server=on_server)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error


# --- what the report says of the run ----------------------------------------------------------------------------


def _command(context: typer.Context) -> str:
    """The command with the flags that were given, as a shell reads it."""
    words = ["framesieve", "bench"]
    for flag in context.command.params:
        source = context.get_parameter_source(flag.name or "")
        if flag.name is None or source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[flag.name]
        if isinstance(value, bool):
            words.append(flag.opts[0] if value else (flag.secondary_opts or flag.opts)[0])
            continue
        for each in value if isinstance(value, (list, tuple)) else (value,):
            words += [flag.opts[0], f"{each:g}" if isinstance(each, float) else str(each)]
    return shlex.join(words)


def _media_told(workload: Path | None, unique: bool | None) -> str:
    if workload is not None:
        return f"{workload}; what comes again there may come from caches"
    if unique is False:
        return "synthesised clips that come again and again: caches answer"
    return "synthesised clips, each new to every cache"
