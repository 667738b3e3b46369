"""The command `framesieve capacity`: sizes a deployment from the result of `framesieve bench --json`.

`framesieve.bench.capacity_plan` has the formulas; this module reads the measurement and prints the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from pydantic import BaseModel, Field, ValidationError

from framesieve.bench.capacity_plan import HOPS, Cost, Load, Plan, Request, plan
from framesieve.cli.options import JsonOption, print_json
from framesieve.cli.terminal import reported_errors
from framesieve.common.contract.errors import InvalidRequest

_KV_CACHE_TOKENS = 32768
_MEDIA_BUFFER_BYTES = 2**30
_LOAD = "Load"
_REPLICA = "Each replica of generation"
_NAME_WIDTH = 26
_WORKERS_STAGES = ("decode", "resize")


_Amount: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Run(BaseModel):
    command: str
    began: str


class _Service(BaseModel):
    service: str
    busy_s: dict[str, _Amount]
    processor_s: _Amount
    received_bytes: _Amount
    sent_bytes: _Amount
    workers: int = Field(ge=0)


class _Phase(BaseModel):
    answered: int = Field(ge=1)
    held_s: _Amount
    kv_token_s: _Amount
    services: list[_Service]


class Measured(BaseModel):
    """The part of a bench result that the cost of a request is computed from; other fields are ignored.

    by_pruning: one, since the mean of several rates is no request's cost.
    """

    run: _Run
    by_pruning: list[_Phase] = Field(min_length=1, max_length=1)

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Raises InvalidRequest naming a missing or invalid field, OSError for a file that cannot be read."""
        try:
            measured = cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(map(str, first["loc"]))
            raise InvalidRequest(f"{path}: {at + ': ' if at else ''}{first['msg']}") from error
        missing = HOPS.keys() - {each.service for each in measured.load.services}
        if missing:
            names = ", ".join(sorted(missing))
            raise InvalidRequest(
                f"{path}: no metrics of {names}: run bench with --start, or with --metrics of all three services"
            )
        return measured

    @property
    def load(self) -> _Phase:
        return self.by_pruning[0]

    @property
    def request(self) -> Request:
        """The mean cost of an answered request. The cost of failed requests is shared among the answered ones."""
        by_name = {each.service: each for each in self.load.services}
        return Request(
            {service: self._cost(by_name[service]) for service in HOPS},
            kv_token_s=self.load.kv_token_s,
            embeds_byte_s=by_name["encoder"].sent_bytes / self.load.answered * self.load.held_s,
        )

    def _cost(self, service: _Service) -> Cost:
        answered = self.load.answered
        busy_s = {stage: seconds / answered for stage, seconds in service.busy_s.items()}
        # processor_s excludes worker processes. Their busy time is all computing, so it is their processor time.
        workers_s = sum(busy_s.get(stage, 0.0) for stage in _WORKERS_STAGES)
        return Cost(
            busy_s,
            at_once=service.workers or 1,
            processor_s=service.processor_s / answered + workers_s,
            hop_bytes=(service.received_bytes + service.sent_bytes) / answered,
        )


def capacity(
    result: Annotated[Path, typer.Argument(help="The output of framesieve bench --json.")],
    requests_per_s: Annotated[
        float, typer.Option(help="The load to plan for, in requests per second.", rich_help_panel=_LOAD)
    ],
    utilisation: Annotated[
        float,
        typer.Option(
            help="Fraction of time and memory that the plan may use; the rest absorbs bursts.", rich_help_panel=_LOAD
        ),
    ] = 0.7,
    kv_cache_tokens: Annotated[
        int, typer.Option(min=1, help="Its setting --kv-cache-tokens.", rich_help_panel=_REPLICA)
    ] = _KV_CACHE_TOKENS,
    media_buffer_bytes: Annotated[
        int, typer.Option(min=1, help="Its setting --media-buffer-bytes.", rich_help_panel=_REPLICA)
    ] = _MEDIA_BUFFER_BYTES,
    as_json: JsonOption = False,
) -> None:
    """Compute how many replicas of each service a load needs, from a bench of the same requests on the same machines.

    The bench must have read the services' metrics: run it with --start, or with --metrics for all three services.

    The first table shows for each service: the seconds that one request keeps it busy, the processor time of one
    request, how many requests one replica works on at once, and how many must be worked on at once under this load.

    Other processes on the machine lengthen the busy times, so the plan has too many replicas. docs/capacity.md has the
    formulas and their limits.

    Example: framesieve bench --start --clients 4 --json > bench.json

    Example: framesieve capacity bench.json --requests-per-s 5 --utilisation 0.6
    """
    if not 0 < requests_per_s < float("inf"):
        raise typer.BadParameter(f"--requests-per-s must be above 0 and finite, got {requests_per_s:g}")
    if not 0 < utilisation <= 1:
        raise typer.BadParameter(f"--utilisation must be above 0 and at most 1, got {utilisation:g}")
    with reported_errors(as_json=as_json):
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
    by = f"measured:  {measured.load.answered} requests, {measured.run.began}, {measured.run.command}"
    typer.echo("\n".join([by, *_lines(request, load, needed)]))


def _lines(request: Request, load: Load, needed: Plan) -> Iterator[str]:
    yield f"load:      {load.requests_per_s:g} requests/s, at most {load.utilisation:.0%} of time and memory used"
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
    yield _row("held by generation", ("× s/request", "held", "capacity", "replicas"))
    for name, of_request, need, of_one, unit in (
        ("KV cache, tokens", request.kv_token_s, needed.kv_cache, load.kv_cache_tokens, 1.0),
        ("media buffer, MB", request.embeds_byte_s, needed.media_buffer, load.media_buffer_bytes, 1e6),
    ):
        cells = [f"{value / unit:.{1 if unit > 1 else 0}f}" for value in (of_request, need.used, of_one)]
        yield _row(f"  {name}", (*cells, f"{need.replicas}"))
    yield ""
    yield _row("network", ("MB/request", "MB/s"))
    for service, hop in HOPS.items():
        sizes = (request.costs[service].hop_bytes, needed.network_bytes_per_s[service])
        yield _row(f"  {hop}", [f"{size / 1e6:.3f}" for size in sizes])
    yield ""
    yield "replicas:  " + ", ".join(f"{service} {count}" for service, count in needed.replicas.items())


def _row(name: str, values: Sequence[str]) -> str:
    return f"{name:<{_NAME_WIDTH}}" + "".join(f"{value:>10}" for value in values)
