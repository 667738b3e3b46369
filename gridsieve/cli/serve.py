"""The command `gridsieve serve`, which runs the three services and the gateway until a signal."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gridsieve.cli.launcher import GATEWAY, SERVICES, Endpoint, LocalStack
from gridsieve.cli.signals import DrainOnSignals
from gridsieve.cli.stack_flags import service_flags
from gridsieve.cli.terminal import reported_errors, stderr
from gridsieve.client.client import DEFAULT_ADDRESS
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.process import ExitStatus, at_once

_model = partial(typer.Option, rich_help_panel="Model and media")
_addresses = partial(typer.Option, rich_help_panel="Addresses")

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        envvar="GRIDSIEVE_SERVE_CONFIG",
        help="TOML file with a table of settings for each service; deploy/stack.toml is an example.",
    ),
]


def serve(
    context: typer.Context,
    model: Annotated[
        Path | None,
        _model(
            envvar="GRIDSIEVE_MODEL",
            help="Checkpoint folder in transformers' format, or a Hugging Face repository. Default: the embedded demo "
            "model.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        _model(
            help="Name of the model: its id in the API and its label in metrics. Repeat it for several names: requests "
            "may use all of them; answers and metrics have the first. Default: the name of the repository or folder."
        ),
    ] = None,
    media_root: Annotated[
        Path | None,
        _model(envvar="GRIDSIEVE_MEDIA_ROOT", help="Folder that requests may read files from. Default: none."),
    ] = None,
    deterministic: Annotated[
        bool,
        _model(
            help="The same question has the same answer to the last bit, whatever is asked at the same time: sets "
            "--deterministic of the encoder and of generation, which then take longer."
        ),
    ] = False,
    config: ConfigOption = None,
    listen: Annotated[
        str, _addresses(help="Address of generation, which clients call: host:port or unix:/path.")
    ] = DEFAULT_ADDRESS,
    preprocessing_listen: Annotated[str, _addresses(help="Address of preprocessing.")] = "127.0.0.1:50051",
    encoder_listen: Annotated[str, _addresses(help="Address of the encoder.")] = "127.0.0.1:50052",
    http_listen: Annotated[
        str, _addresses(help="Address of the gateway, which speaks HTTP. '': no gateway.")
    ] = "127.0.0.1:8000",
    metrics_port: Annotated[
        int,
        _addresses(
            min=0,
            max=2**16 - len(SERVICES),
            help="Port of preprocessing's /metrics; the encoder and generation use the next two ports. 0: no metrics.",
        ),
    ] = 9101,
) -> None:
    """Run the three services and their HTTP gateway on this machine until Ctrl-C.

    After the first Ctrl-C (or SIGTERM, or a closed terminal), each service finishes its running requests, within 30
    seconds. The second Ctrl-C ends everything at once. Under nohup, closing the terminal has no effect.

    Each flag of a service is also a flag here, with the service's name before it (--generation-dtype), and a line of
    the --config file. The services also read the environment variables GRIDSIEVE_…, except GRIDSIEVE_DRAIN_S.
    `gridsieve settings` lists the settings of the services.

    Exit status: 0 if all requests finished; 3 if some were cut off; 2 if a service could not start; 1 if a service
    failed; 130 (Ctrl-C), 143 (SIGTERM) or 129 (closed terminal) if stopped at once, or before all services were ready.

    Example: gridsieve serve --media-root ~/videos

    Example: gridsieve serve --model ~/Qwen2.5-VL-3B --generation-dtype bfloat16
    """
    addresses = (preprocessing_listen, encoder_listen, listen)
    ports = (metrics_port, metrics_port + 1, metrics_port + 2) if metrics_port else (0, 0, 0)
    endpoints = dict(zip(SERVICES, map(Endpoint, addresses, ports), strict=True))
    services = (*SERVICES, GATEWAY) if http_listen else SERVICES
    endpoints[GATEWAY] = Endpoint(http_listen, 0)
    with reported_errors(cannot_start=ExitStatus.CANNOT_START):
        flags = service_flags(config, context.args)
    for service in SERVICES:
        flags[service] += [f"--served-model-name={name}" for name in served_model_name or ()]
    if deterministic:
        for service in ("encoder", "generation"):
            flags[service].append("--deterministic")
    stack = LocalStack(
        model,
        services=services,
        media_root=media_root,
        endpoints=endpoints,
        flags=flags,
        show_logs=True,
        report=stderr.print,
    )
    signals = DrainOnSignals(stack)
    with reported_errors(cannot_start=ExitStatus.CANNOT_START):
        try:
            stack.start()
        except StartupError:
            if signals.first is None:
                raise
            raise typer.Exit(at_once(signals.first)) from None
    with reported_errors():
        try:
            first = f"{stack.url} (OpenAI's HTTP) and " if http_listen else ""
            stderr.print(
                f"[bold]gridsieve listens at {first}{listen}[/]; Ctrl-C stops it. In another terminal:", soft_wrap=True
            )
            server = "" if listen == DEFAULT_ADDRESS else f" --server {listen}"
            stderr.print(f'  gridsieve ask CLIP "What moves?" --pruning-rate 0.75{server}', soft_wrap=True)
            stack.watch()
        finally:
            stack.stop()
    raise typer.Exit(stack.exit_status)
