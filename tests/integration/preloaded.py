"""What the encoder and generation import of other packages, in the order and with the preparation of theirs."""

from __future__ import annotations

from importlib import import_module

from gridsieve.services.compute.prepare import prepare

prepare()

for _name in ("clip", "internvl", "llava", "mistral3", "pixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "siglip"):
    import_module(f"transformers.models.{_name}.modeling_{_name}")
for _name in ("grpc.aio", "llguidance", "pydantic_settings", "structlog", "tokenizers", "torch._dynamo"):
    import_module(_name)
