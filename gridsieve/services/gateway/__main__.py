"""Serves the HTTP gateway: `python -m gridsieve.services.gateway --generation ADDR --listen 127.0.0.1:8000`."""

from __future__ import annotations

import asyncio
import os
import tempfile
from importlib.metadata import version

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import disable_created_metrics

from gridsieve.client.client import GridsieveClient
from gridsieve.client.credentials import Access
from gridsieve.common.channels import open_channel
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.process import ExitStatus
from gridsieve.common.security.quotas import ClientQuotas
from gridsieve.common.security.tokens import Tokens
from gridsieve.common.serving.guards import check_listen, upstream_credentials
from gridsieve.common.serving.health import READY
from gridsieve.common.serving.server import run
from gridsieve.common.telemetry.callers import begin_callers
from gridsieve.common.telemetry.logs import configure_logging
from gridsieve.common.telemetry.metrics import BUILD_INFO, begin_method
from gridsieve.common.telemetry.otlp import export_spans
from gridsieve.search.folder_search import FILE, opener
from gridsieve.services.gateway.app import routes, with_cors
from gridsieve.services.gateway.batches.endpoint import Batches
from gridsieve.services.gateway.files import Files, Limits
from gridsieve.services.gateway.http.origins import Origins
from gridsieve.services.gateway.http.request_guard import METHODS, RequestGuard
from gridsieve.services.gateway.http.server import serve
from gridsieve.services.gateway.http.tickets import Tickets
from gridsieve.services.gateway.kept import Kept
from gridsieve.services.gateway.models import Models
from gridsieve.services.gateway.moments import Moments
from gridsieve.services.gateway.questions import Questions
from gridsieve.services.gateway.realtime.endpoint import Realtime
from gridsieve.services.gateway.realtime.live import Generation
from gridsieve.services.gateway.realtime.watch import Watch
from gridsieve.services.gateway.settings import GatewaySettings
from gridsieve.services.gateway.vectors.endpoint import Vectors

_HEALTH_S = 1.0


async def main() -> ExitStatus:
    settings = GatewaySettings.load()
    configure_logging("gateway", settings.log_format, settings.log_level)
    check_listen(settings)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the series, and no query reads them
    BUILD_INFO.labels("gateway", version("gridsieve")).set(1)
    for method in METHODS.values():
        begin_method(method)
    if settings.upload_root is not None and not os.access(settings.upload_root, os.W_OK):
        raise StartupError(f"--upload-root {settings.upload_root} is no folder that can be written to")
    if settings.moments is not None:
        if not settings.moments.is_dir():
            raise StartupError(f"--moments {settings.moments} is no folder")
        opener(settings.moments_store, settings.moments / FILE)
    close_spans = export_spans("gateway")
    credentials = upstream_credentials(settings)
    tokens = Tokens.read(settings.auth_tokens_file) if settings.auth_tokens_file else None
    begin_callers(tokens.names if tokens else ())
    quotas = ClientQuotas(settings.max_requests_per_client, settings.max_bytes_per_client, settings.max_requests)
    access: Access = {
        "tls_ca": settings.upstream_tls_ca,
        "tls_cert": settings.tls_cert if settings.upstream_tls_ca else None,
        "tls_key": settings.tls_key if settings.upstream_tls_ca else None,
        "token": credentials.token,
        "allow_plaintext_token": settings.allow_plaintext_token,
    }
    async with (
        GridsieveClient(settings.generation, **access) as client,
        GridsieveClient(settings.moments_embedder, **access) as embedder,
        open_channel(settings.generation, credentials) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)

        async def is_well() -> bool:
            if guard.drain.begun:
                return False
            try:
                answer = await health.Check(health_pb2.HealthCheckRequest(service=READY), timeout=_HEALTH_S)
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        models = Models(client)
        limits = Limits(settings.upload_max_bytes, settings.upload_disk_bytes, settings.upload_expires_s)
        files = Files(settings.upload_root, limits)
        if settings.upload_root is not None:
            tempfile.tempdir = str(settings.upload_root)  # files arrive on the disk that keeps them, not in /tmp
        expiring = asyncio.create_task(files.expire())
        questions = Questions(client, models, files, settings.max_inline_bytes)
        kept = Kept(client, settings.encoder, access, files, questions.body_limit)
        origins = tuple(filter(None, map(str.strip, settings.cors_origins.split(","))))
        live = Generation(channel, credentials.metadata)
        realtime, watch = Realtime(live, models), Watch(live, models, questions.body_limit)
        vectors = Vectors(client, models, files, questions.body_limit)
        body_bytes = questions.body_limit.size_bytes
        batches = Batches(files, body_bytes, settings.upload_max_bytes, settings.upload_expires_s)
        tickets = Tickets()
        moments = Moments(settings.moments, embedder, settings.moments_store, tickets)
        app = routes(questions, models, files, kept, realtime, watch, vectors, batches, moments, is_well, tokens)
        guard = RequestGuard(app, Origins(origins, settings.listen), quotas, tokens, tickets, credentials.token is None)
        status = await serve(with_cors(guard, origins), guard.drain, settings)
        expiring.cancel()
    close_spans()
    return status


if __name__ == "__main__":
    run(main)
