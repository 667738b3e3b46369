"""The kernels that images and the bundle for cards hold are those of the heads of published checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from deploy import flash_infer_kernels


def _published(model_type: str) -> int:
    config = AutoConfig.for_model(model_type).get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@pytest.mark.parametrize("cards", ["8.0 8.9", "9.0a"])
def test_attention_is_compiled_for_the_heads_of_qwens_checkpoints(
    cards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for FlashInfer's `aot` and `jit`, which need a compiler of CUDA."""

    def spec(*name: object) -> Iterator[Any]:
        yield SimpleNamespace(name="-".join(map(str, name)))

    def build(specs: list[Any], skip_prebuilt: bool) -> None:
        for each in specs:
            library = tmp_path / "jit" / each.name / f"{each.name}.so"
            library.parent.mkdir(parents=True)
            library.touch()

    aot = SimpleNamespace(
        gen_rope_module=lambda: next(spec("rope")),
        gen_act_and_mul_module=lambda kind: next(spec(kind)),
        gen_fa2=lambda rows, keys, size, *_: spec("fa2", rows, keys, size),
        gen_fa3=lambda rows, keys, _, size, *__: spec("fa3", rows, keys, size),
    )
    folders = SimpleNamespace(FLASHINFER_AOT_DIR=tmp_path / "aot", FLASHINFER_JIT_DIR=tmp_path / "jit")
    monkeypatch.setitem(sys.modules, "flashinfer.aot", aot)
    monkeypatch.setitem(sys.modules, "flashinfer.jit", SimpleNamespace(env=folders, build_jit_specs=build))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", cards)
    flash_infer_kernels.main()
    compiled = {path.stem for path in (tmp_path / "aot").rglob("*.so")}
    for size in map(_published, ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v")):
        for keys in (torch.bfloat16, torch.float8_e4m3fn):
            assert f"fa2-torch.bfloat16-{keys}-{size}" in compiled
        assert (f"fa3-torch.bfloat16-torch.bfloat16-{size}" in compiled) == (cards == "9.0a")
