"""The command `gridsieve bench`: its flags, and its output as a table or JSON.

`gridsieve.bench.run` executes the run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gridsieve.bench.report import Report, report_json, table
from gridsieve.bench.run import Run, measure, served
from gridsieve.bench.workload import Workload, read_sharegpt, synthetic_questions
from gridsieve.cli.options import THRESHOLD_HELP, AccessFlags, JsonOption, print_json, said_pruning
from gridsieve.cli.terminal import reported_errors
from gridsieve.cli.variables import source
from gridsieve.client.client import DEFAULT_ADDRESS, GridsieveClient
from gridsieve.client.credentials import Access
from gridsieve.client.prompt import Options, Pruning
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.retention import METHODS, NONE, named_method

_server = partial(typer.Option, rich_help_panel="Server")
_load = partial(typer.Option, rich_help_panel="Load")
_questions = partial(typer.Option, rich_help_panel="Questions")

_CLIENTS = 8


def bench(
    context: typer.Context,
    *,
    server: Annotated[
        str | None,
        _server(
            envvar="GRIDSIEVE_SERVER",
            help=f"Address of generation. Default: {DEFAULT_ADDRESS} if a server listens there (gridsieve serve), "
            "otherwise as with --start.",
        ),
    ] = None,
    start: Annotated[
        bool, _server("--start", help="Start the three services for this run and stop them afterwards.")
    ] = False,
    model: Annotated[
        Path | None,
        _server(
            help="Checkpoint folder; implies --start. Default: random weights, which say nothing and cost what a model "
            "of 73 M parameters costs."
        ),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        _server(
            help="host:port of a service's /metrics (plain HTTP); repeat for every replica of all three services. "
            "--json then includes their costs (docs/capacity.md). Not needed with --start."
        ),
    ] = None,
    clients: Annotated[
        int | None,
        _load(min=1, help=f"Closed loop: number of clients, each with one request at a time. Default: {_CLIENTS}."),
    ] = None,
    request_rate: Annotated[
        float | None, _load(help="Open loop: requests per second on average, with Poisson arrivals.")
    ] = None,
    requests: Annotated[int, _load(min=1, help="Number of requests at each pruning rate.")] = 32,
    warmup: Annotated[int, _load(min=0, help="Number of requests sent before the measurement.")] = 8,
    workload: Annotated[
        Path | None,
        _questions(
            help="Questions: a ShareGPT file, whose conversations have video or image: paths relative to the file, or "
            "URLs, file:/// below preprocessing's --media-root. Default: questions about synthetic clips."
        ),
    ] = None,
    pruning_rate: Annotated[
        list[float] | None,
        _questions(
            help="Fraction of each video's tokens to drop. Repeat it to measure several rates, one after another."
        ),
    ] = None,
    pruning_method: Annotated[
        str | None, _questions(help=f"Which tokens are kept: {', '.join(METHODS)}. Default: the server's.")
    ] = None,
    pruning_threshold: Annotated[float | None, _questions(help=THRESHOLD_HELP)] = None,
    max_new_tokens: Annotated[int, _questions(min=1, help="Maximum tokens of each completion.")] = 64,
    ignore_eos: Annotated[
        bool, _questions("--ignore-eos", help="Always generate --max-new-tokens, past the model's end tokens.")
    ] = False,
    timeout_s: Annotated[float, _load(help="Deadline of each request, in seconds.")] = 300.0,
    as_json: JsonOption = False,
    access: AccessFlags,
) -> None:
    """Measure a server under load: latencies, throughput, and what pruning saves.

    Without flags, 8 clients send 32 questions about synthetic clips to the services on this machine. If none run, the
    command starts them, with random weights unless --model names a checkpoint.

    This client measures the latencies. With --request-rate they count from when a request was due, not from when it
    was sent, so they include the backlog of a server that falls behind. Rejected requests count as failed and are not
    retried. Ctrl-C ends the run early and still prints the report. The exit status is 1 if every request failed.

    Several pruning rates are measured one after another, each alone, with the same questions at the same times, and
    stand side by side in one table. Its figures are those of `vllm bench serve`, which measures the gateway's HTTP.
    Every mp4 file gets other bytes each time and so hits no cache, but those of a --workload at one rate are sent as
    they are.

    A ShareGPT file is asked in order, and again from its start if there are more requests. The length of its replies
    is not used: a completion has at most --max-new-tokens, and exactly so many with --ignore-eos.

    Example: gridsieve bench --pruning-rate 0 --pruning-rate 0.75

    Example: gridsieve bench --server gpu-1:50053 --request-rate 4 --requests 240

    Example: gridsieve bench --workload sharegpt.json --json > bench.json
    """
    if (start or model) and source(context, "server") == "environment":  # the variable is that of all commands
        server = context.params["server"] = None
    _check_flags(
        {"--clients": clients, "--request-rate": request_rate},
        {"--server": server, "--start": start or None},
        {"--server": server, "--model": model},
        {"--metrics": metrics, "--start": start or None},
        {"--metrics": metrics, "--model": model},
        positive={"--request-rate": request_rate, "--timeout-s": timeout_s},
    )
    with reported_errors(server or DEFAULT_ADDRESS, as_json=as_json):
        rates = dict.fromkeys(pruning_rate or [0.0])
        prunings = tuple(said_pruning(each, pruning_method, pruning_threshold) for each in rates)
        asked = _workload(workload, has_new_bytes=workload is None or len(prunings) > 1)
        given = access.access()
        options = Options(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, timeout_s=timeout_s)
        began = datetime.now(UTC).isoformat(timespec="seconds")
        with served(server, start, model, metrics or ()) as target:
            usual = asyncio.run(_usual_method(target.address, given))
            named = named_method(pruning_method, pruning_threshold, usual)
            prunings = tuple(dataclasses.replace(each, method=named) for each in prunings)
            loop = clients or (None if request_rate else _CLIENTS)
            run = Run(target, asked, prunings, loop, request_rate, requests, warmup, options, given)
            outcome = asyncio.run(measure(run))
    reports = [Report.of(each.pruning, each.records, each.wall_s) for each in outcome.phases]
    about = {
        "command": _command(context),
        "began": began,
        "server": target.description,
        "load": run.load,
        "pruning": _pruning_description(prunings[0]),
        "media": _media_description(workload, asked.has_new_bytes),
        "warmup": _warmup_description(warmup, outcome.warmup_failed, len(prunings)),
    }
    if as_json:
        result = {
            "run": about,
            "interrupted": outcome.interrupted,
            "abandoned": outcome.abandoned,
            "by_pruning": [
                {**report_json(report), "services": [dataclasses.asdict(each) for each in phase.spent]}
                for report, phase in zip(reports, outcome.phases, strict=True)
            ],
        }
        print_json(result)
    else:
        typer.echo("\n".join([about.pop("command"), *(f"{name + ':':<9}{value}" for name, value in about.items()), ""]))
        if outcome.interrupted:
            typer.echo(f"interrupted: {outcome.abandoned} running requests were abandoned")
        typer.echo(table(reports))
    if outcome.interrupted:
        raise typer.Exit(130)
    if not any(report.answered for report in reports):
        raise typer.Exit(1)


# --- flags ------------------------------------------------------------------------------------------------------


def _check_flags(*exclusive: dict[str, object], positive: dict[str, float | None]) -> None:
    """Raises BadParameter if more than one flag of a group is set, or a number is not positive and finite."""
    for group in exclusive:
        given = [name for name, value in group.items() if value is not None]
        if len(given) > 1:
            raise typer.BadParameter(f"{' and '.join(given)} exclude each other")
    for name, number in positive.items():
        if number is not None and not 0 < number < float("inf"):
            raise typer.BadParameter(f"{name} must be above 0 and finite, got {number:g}")


def _workload(file: Path | None, *, has_new_bytes: bool) -> Workload:
    try:
        return Workload(read_sharegpt(file) if file else synthetic_questions(), has_new_bytes)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error


async def _usual_method(server: str, access: Access) -> str:
    """By which the server prunes where a request names a rate and no method."""
    async with GridsieveClient(server, **access) as client:
        model, *_ = await client.models()
        return model.pruning_method


# --- description of the run -------------------------------------------------------------------------------------


def _command(context: typer.Context) -> str:
    """The command line with the flags that were given, also by the environment, quoted for a shell."""
    words = ["gridsieve", "bench"]
    for flag in context.command.params:
        value = context.params.get(flag.name or "")
        if value is None or source(context, str(flag.name)) == "default":
            continue
        if isinstance(value, bool):
            words += flag.opts[:1] if value else ()
            continue
        for each in value if isinstance(value, (list, tuple)) else (value,):
            words += [flag.opts[0], f"{each:g}" if isinstance(each, float) else str(each)]
    return shlex.join(words)


def _pruning_description(pruning: Pruning) -> str:
    threshold = "" if pruning.threshold is None else f", threshold {pruning.threshold:g}"
    return NONE if pruning.method == NONE else f"by {pruning.method}{threshold}"


def _media_description(workload: Path | None, has_new_bytes: bool) -> str:
    if workload is None:
        return "synthetic clips, all different, so none hits a cache"
    if has_new_bytes:
        return f"{workload}; mp4 files are sent with other bytes each time and hit no cache, other media may"
    return f"{workload}; repeated media may hit caches"


def _warmup_description(warmup: int, failed: int, prunings: int) -> str:
    each = " at each rate" if prunings > 1 else ""
    return f"{warmup} requests{each}, not counted, {failed} of them failed" if warmup else "none"
