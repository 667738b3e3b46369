"""Mixtures whose experts are stored quantised, as they are published: they compute what the dequantised weights
compute, in memory of about the size of the files, or are refused by name."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gridsieve.common.adapter_folder import AdapterFolder
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.loading import fp8
from gridsieve.services.generation.parallel.group import WorkerRanks
from gridsieve.services.generation.startup.adapters import load_adapters
from tests.adapters import write_adapter
from tests.families import FAMILIES, load_reference, nemotron
from tests.families.qwen import EXPERTS_3_5, INTERLEAVED
from tests.generation import int4
from tests.generation.checkpoints import FP8_MOST, Twins, changed, fp8_config, in_fp8, load
from tests.law import Question, answer, assert_law
from tests.oracle import Text
from tests.parallel_rank import assert_law_on_two_ranks
from tests.tiny import Models, TinyEngine, random_item

# Experts are most of the weights. 40 divides neither 96 nor 128: blocks lie across gate and up.
TEXT: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 16, "num_experts_per_tok": 3}
BLOCK, GROUP = 40, 32
SINGLE = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")

Weights: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """store: of the name and the value of a weight, what the file has and what it stands for. stacked: the experts are,
    not one by one."""

    config: dict[str, Any]
    store: Callable[[str, Tensor], tuple[Weights, Tensor]]
    stacked: bool = False


def by_blocks(name: str, weight: Tensor) -> tuple[Weights, Tensor]:
    return in_fp8(name, weight, BLOCK)


def by_rows(name: str, weight: Tensor) -> tuple[Weights, Tensor]:
    """With scales in bfloat16, as llm-compressor writes them."""
    scale = (weight.abs().amax(-1, keepdim=True) / FP8_MOST).bfloat16()
    rounded = (weight / scale).to(torch.float8_e4m3fn)
    return {name: rounded, f"{name}_scale": scale}, rounded.float() * scale.float()


def by_matrices(name: str, weight: Tensor) -> tuple[Weights, Tensor]:
    """With scales of one axis, as llm-compressor writes them."""
    scale = weight.abs().max().reshape(1) / FP8_MOST
    rounded = (weight / scale).to(torch.float8_e4m3fn)
    return {name: rounded, f"{name}_scale": scale}, rounded.float() * scale


def in_4_bits(kind: str) -> Layout:
    stored = replace(int4.LAYOUTS[kind], group=GROUP)

    def store(name: str, weight: Tensor) -> tuple[Weights, Tensor]:
        tensors, dense = int4.in_int4(weight, stored, torch.Generator().manual_seed(3))
        return {name.removesuffix("weight") + part: each for part, each in tensors.items()}, dense

    return Layout(stored.config, store)


def fp8_dynamic(num_bits: int = 8, strategy: str = "channel") -> dict[str, Any]:
    numbers = {"num_bits": num_bits, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": strategy, "dynamic": False},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*visual.*", "re:.*mlp.gate$"],
    }


LAYOUTS = {
    "fp8 by blocks": Layout(fp8_config(BLOCK), by_blocks),
    "fp8 by blocks, stacked": Layout(fp8_config(BLOCK), by_blocks, stacked=True),
    "fp8 by rows": Layout(fp8_dynamic(), by_rows),
    "fp8 by matrices": Layout(fp8_dynamic(strategy="tensor"), by_matrices),
    **{f"4 bits, {kind}": in_4_bits(kind) for kind in ("awq", "gptq", "compressed-tensors")},
}
FAMILIES_IN_FILES: dict[str, Callable[[Path], Path]] = {
    "qwen3_vl_moe": lambda folder: _write("qwen3_vl_moe", folder, TEXT),
    "qwen3_5_moe": lambda folder: _write(
        "qwen3_5_moe", folder, {**EXPERTS_3_5, **TEXT, "shared_expert_intermediate_size": 2 * GROUP}
    ),
}


def _write(family: str, folder: Path, text: dict[str, Any]) -> Path:
    write: Any = FAMILIES[family].write
    return write(folder, 1, text=text)  # type: ignore[no-any-return]


def one_by_one(weights: Weights) -> Weights:
    """With stacked experts, [E, 2 · I, D] and [E, D, I], as single matrices."""
    found = dict[str, Tensor]()
    for name, weight in weights.items():
        if not (stacked := STACKED.fullmatch(name)):
            found[name] = weight
            continue
        kinds = ("gate_proj", "up_proj") if stacked[2] == "gate_up_proj" else ("down_proj",)
        for number, matrix in enumerate(weight):
            for kind, each in zip(kinds, matrix.chunk(len(kinds)), strict=True):
                found[f"{stacked[1]}.{number}.{kind}.weight"] = each.contiguous()
    return found


def stacked(weights: Weights) -> Weights:
    """With single matrices stacked."""
    found = {name: each for name, each in weights.items() if not SINGLE.fullmatch(name)}
    for experts in {single[1] for name in weights if (single := SINGLE.fullmatch(name))}:
        for name, kinds in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            found[f"{experts}.{name}"] = torch.stack(
                [
                    torch.cat([weights[f"{experts}.{number}.{kind}.weight"] for kind in kinds])
                    for number in range(len({name for name in weights if name.startswith(f"{experts}.")}) // 3)
                ]
            )
    return found


def swapped(weights: Weights) -> Weights:
    """With the last two axes of stacked experts and their scales swapped, as published files of Qwen3-VL have them."""
    return {
        name: each.mT.contiguous() if re.search(r"\.experts\.[a-z]", name) else each for name, each in weights.items()
    }


def write_twins(family: str, layout: Layout, written: Path, folder: Path) -> Twins:
    prefix, weights = FAMILIES[family].text_prefix, one_by_one(load_file(written / "model.safetensors"))
    assert any(map(SINGLE.fullmatch, weights))
    if layout.stacked:
        weights = stacked(weights)
    plain, quantised = dict(weights), dict(weights)
    for name, weight in weights.items():
        if name.startswith(prefix) and name.removesuffix(".weight").endswith("_proj"):
            del quantised[name]
            tensors, plain[name] = layout.store(name, weight)
            quantised |= tensors
    if family == "qwen3_vl_moe":
        plain, quantised = swapped(stacked(plain) if not layout.stacked else plain), swapped(quantised)

    def become(to: Weights) -> Any:
        return lambda held: (held.clear(), held.update(to))

    changed(written, folder / "plain", become(plain))
    changed(written, folder / "quantised", become(quantised), quantization_config=layout.config)
    engine, reference = load(folder / "plain"), load_reference(family, folder / "plain")
    models = Models(folder / "plain", replace(FAMILIES[family], hidden=engine.hidden_size), engine, reference)
    return Twins(folder / "quantised", folder / "plain", models, quantised)


@pytest.fixture(scope="module", params=FAMILIES_IN_FILES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    torch.set_num_threads(1)
    return request.param, FAMILIES_IN_FILES[request.param](tmp_path_factory.mktemp("experts") / "written")


def tensor_bytes() -> int:
    """Of all tensors of the process, on the CPU."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.device.type == "cpu"]
    strided = [each.untyped_storage() for each in tensors if each.layout == torch.strided]
    others = [each.numel() * each.itemsize for each in tensors if each.layout != torch.strided]
    sizes = {each.data_ptr(): each.nbytes() for each in strided}
    return int(sum(others) + sum(sizes.values()))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_published_mixture_computes_its_dequantised_weights_in_the_memory_of_its_files(
    written: tuple[str, Path], kind: str, tmp_path: Path
) -> None:
    family, folder = written
    twins = write_twins(family, LAYOUTS[kind], folder, tmp_path)
    engine = TinyEngine(load(twins.quantised), max_num_batched_tokens=7)
    video = random_item(twins.models.family, (3, 2, 2), Fraction(1), rate=0.5)
    asked = [Question((Text(tuple(range(20, 33))),), 6), Question((Text((20, 21)), video, Text((22,))), 4)]
    assert_law(twins.models, engine, asked, answer(engine, asked))
    del engine
    before = tensor_bytes()
    model = load(twins.quantised, torch.bfloat16)
    held = tensor_bytes() - before
    assert model.dtype == torch.bfloat16
    prefixes = (FAMILIES[family].text_prefix, "lm_head.")
    stored = sum(
        each.numel() * (2 if each.dtype == torch.float32 else each.itemsize)
        for name, each in twins.weights.items()
        if name.startswith(prefixes)
    )
    assert held < 1.2 * stored, (held, stored)


def test_experts_without_gates_stay_in_4_bits(tmp_path: Path) -> None:
    family = "nemotron_h_omni"
    nemotron.write(tmp_path / "written", 1, text={"moe_intermediate_size": 2 * GROUP})
    twins = write_twins(family, LAYOUTS["4 bits, compressed-tensors"], tmp_path / "written", tmp_path)
    engine = TinyEngine(load(twins.quantised), max_num_batched_tokens=7)
    asked = [Question((Text(tuple(range(20, 33))),), 6)]
    assert_law(twins.models, engine, asked, answer(engine, asked))


def test_experts_are_multiplied_by_the_cards_product_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dequantised product in its place."""
    multiplied = list[torch.Size]()

    def product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        multiplied.append(weight.shape)
        return rows @ (weight.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)).T

    monkeypatch.setattr(fp8, "find_product", lambda sizes, like: product)
    rope = {**INTERLEAVED, "mrope_section": [8, 4, 4]}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 32, "rope_parameters": rope}
    sizes = {**TEXT, **heads, "hidden_size": 384, "moe_intermediate_size": 128, "num_experts": 4}
    layout = Layout(fp8_config(128), partial(in_fp8, block=128))
    twins = write_twins("qwen3_vl_moe", layout, _write("qwen3_vl_moe", tmp_path / "written", sizes), tmp_path)
    engine = TinyEngine(load(twins.quantised), max_num_batched_tokens=7)
    asked = [Question((Text(tuple(range(20, 33))),), 6)]
    assert_law(twins.models, engine, asked, answer(engine, asked))
    assert {(128, 384), (384, 128)} <= set(multiplied)


def test_other_layouts_are_refused_by_the_name_of_an_expert(written: tuple[str, Path], tmp_path: Path) -> None:
    """transformers would load some of them, and answer otherwise."""
    family, folder = written
    twins = write_twins(family, LAYOUTS["fp8 by rows"], folder, tmp_path)
    other = changed(twins.quantised, tmp_path / "other", quantization_config=fp8_dynamic(num_bits=6))
    with pytest.raises(StartupError, match=r"experts\.0\.down_proj\.weight_scale: experts in this layout are not sup"):
        load(other)


def test_two_ranks_have_half_of_the_experts_each_and_no_adapters_of_them(
    written: tuple[str, Path], workers: WorkerRanks, tmp_path: Path
) -> None:
    """Experts in fp8: `test_quantised`."""
    family, folder = written
    twins = write_twins(family, LAYOUTS["4 bits, gptq"], folder, tmp_path)
    asked = [Question((Text(tuple(range(20, 33))),), 6)]
    model = assert_law_on_two_ranks(twins.models, twins.quantised, workers, asked)
    held = {name.split(".experts.")[1].split(".")[0] for name, _ in model.text.named_modules() if ".experts." in name}
    assert held == set(map(str, range(TEXT["num_experts"] // 2)))
    lora = tmp_path / "lora"
    write_adapter(twins.models.reference.model.language_model, lora, r=2, target_modules=["q_proj"])
    weights = load_file(lora / "adapter_model.safetensors")
    of_expert = {name.replace("self_attn.q_proj", "mlp.experts.0.up_proj"): each for name, each in weights.items()}
    save_file(of_expert, lora / "adapter_model.safetensors")
    with pytest.raises(StartupError, match=r"experts\.0\.up_proj; only linear layers .* not experts"):
        load_adapters([AdapterFolder("lora", lora)], model)
