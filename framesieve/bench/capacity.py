"""The command `framesieve capacity`: what a load needs, by what a bench measured, as a table or as JSON on stdout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from framesieve.bench.capacity_input import Measured
from framesieve.bench.capacity_plan import HOPS, Load, Plan, Request, plan
from framesieve.cli.options import JsonOption, print_json
from framesieve.cli.terminal import errors_told

_KV_CACHE_TOKENS = 32768
_MEDIA_BUFFER_BYTES = 2**30
_NAME_WIDTH = 26


def capacity(
    result: Annotated[Path, typer.Argument(help="What framesieve bench --json printed.")],
    requests_per_s: Annotated[float, typer.Option(help="The load, in requests a second.")],
    utilisation: Annotated[
        float, typer.Option(help="Share of time and room that is planned to be used; the rest is for bursts.")
    ] = 0.7,
    kv_cache_tokens: Annotated[
        int, typer.Option(min=1, help="--kv-cache-tokens of one replica of generation.")
    ] = _KV_CACHE_TOKENS,
    media_buffer_bytes: Annotated[
        int, typer.Option(min=1, help="--media-buffer-bytes of one replica of generation.")
    ] = _MEDIA_BUFFER_BYTES,
    as_json: JsonOption = False,
) -> None:
    """Say how many of each service a load needs, from a bench of the same requests on the same machines.

    The bench must have seen the services' metrics: it does with --start, or with --metrics of all three. Of each
    service the table says how long a request keeps it busy, how much processor time that takes, how many requests one
    replica works on at once, and how many must be worked on at a time. On a machine that others keep busy the first
    figure is too large, and so are the replicas. docs/capacity.md has the formulas and their limits.

    Example: framesieve bench --start --clients 4 --json > bench.json

    Example: framesieve capacity bench.json --requests-per-s 5 --utilisation 0.6
    """
    if not 0 < requests_per_s < float("inf"):
        raise typer.BadParameter(f"--requests-per-s must be above 0 and finite, got {requests_per_s:g}")
    if not 0 < utilisation <= 1:
        raise typer.BadParameter(f"--utilisation must be above 0 and at most 1, got {utilisation:g}")
    with errors_told():
        measured = Measured.read(result)
    load = Load(requests_per_s, utilisation, kv_cache_tokens, media_buffer_bytes)
    request = measured.request
    needed = plan(request, load)
    if as_json:
        print_json(
            {
                "measured": {"command": measured.run.command, "began": measured.run.began},
                "load": dataclasses.asdict(load),
                "request": dataclasses.asdict(request),
                "replicas": needed.replicas,
                **dataclasses.asdict(needed),
            }
        )
        return
    by = f"measured:  {measured.all.answered} requests, {measured.run.began}, {measured.run.command}"
    typer.echo("\n".join([by, *_lines(request, load, needed)]))


def _lines(request: Request, load: Load, needed: Plan) -> Iterator[str]:
    yield f"load:      {load.requests_per_s:g} requests/s, {load.utilisation:.0%} of time and room used"
    yield ""
    yield _row("work", ("busy, s", "cpu, s", "at once", "needed", "replicas", "cores"))
    for service, cost in request.costs.items():
        need = needed.working[service]
        yield _row(
            f"  {service}",
            (
                f"{cost.work_s:.3f}",
                f"{cost.processor_s:.3f}",
                f"{cost.at_once}",
                f"{need.used:.2f}",
                f"{need.replicas}",
                f"{needed.cores[service]:.1f}",
            ),
        )
    yield ""
    yield _row("held by generation", ("× s/request", "held", "of one", "replicas"))
    for name, of_request, need, of_one, unit in (
        ("KV cache, tokens", request.kv_token_s, needed.kv_cache, load.kv_cache_tokens, 1.0),
        ("media buffer, MB", request.embeds_byte_s, needed.media_buffer, load.media_buffer_bytes, 1e6),
    ):
        told = [f"{value / unit:.{1 if unit > 1 else 0}f}" for value in (of_request, need.used, of_one)]
        yield _row(f"  {name}", (*told, f"{need.replicas}"))
    yield ""
    yield _row("network", ("MB/request", "MB/s"))
    for service, hop in HOPS.items():
        sizes = (request.costs[service].hop_bytes, needed.network_bytes_per_s[service])
        yield _row(f"  {hop}", [f"{size / 1e6:.3f}" for size in sizes])
    yield ""
    yield "replicas:  " + ", ".join(f"{service} {count}" for service, count in needed.replicas.items())


def _row(name: str, values: Sequence[str]) -> str:
    return f"{name:<{_NAME_WIDTH}}" + "".join(f"{value:>10}" for value in values)
