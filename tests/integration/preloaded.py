"""What the services import of other packages, in the order and with the preparation of those that compute."""

from __future__ import annotations

import gc
from importlib import import_module

from gridsieve.services.compute.prepare import prepare

prepare()

COMPUTE = ("clip", "internvl", "llava", "mistral3", "pixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "siglip")
for _name in (
    *(f"transformers.models.{each}.modeling_{each}" for each in COMPUTE),
    *("grpc.aio", "grpc_reflection.v1alpha.reflection", "llguidance", "prometheus_client", "pydantic_settings"),
    *("structlog", "tokenizers", "torch._dynamo"),
    *("av", "httpx", "jinja2"),  # preprocessing
    *("python_multipart", "sse_starlette", "starlette.middleware.cors", "starlette.routing"),  # the gateway
    *("uvicorn.protocols.http.httptools_impl", "uvicorn.protocols.websockets.websockets_sansio_impl"),
):
    import_module(_name)
gc.freeze()  # otherwise each collection of a service looks at all of these
