"""Linear layers in 4 bits compute what their dequantised weights compute, in every layout, or are refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo.checkpoint import TINY, write_checkpoint
from gridsieve.common.adapter_folder import AdapterFolder
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.compute.int4_linear import (
    CpuLayout,
    CudaLayout,
    Int4Linear,
    Int4Matrix,
    Int4Weight,
    PlainLayout,
    check_layout,
    layout_of,
)
from gridsieve.services.compute.packed_linear import JoinedLinear
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.parallel.group import WorkerRanks
from gridsieve.services.generation.settings import GenerationSettings
from gridsieve.services.generation.startup.adapters import load_adapters
from gridsieve.services.generation.startup.build import build
from tests import parallel_rank
from tests.adapters import write_adapter
from tests.families import FAMILIES
from tests.families.qwen import EXPERTS_3_5
from tests.generation.checkpoints import Twins, changed, load
from tests.generation.int4 import LAYOUTS, PREFIX, SHAPE, in_int4, int4_twins, packed_for_cuda
from tests.law import Question, answer, assert_law
from tests.oracle import Text
from tests.tiny import TinyEngine, random_item

CPU = torch.device("cpu")
# Of log-probabilities in bfloat16 from the dequantised model in float32.
BFLOAT16 = 0.1


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_checkpoint(tmp_path_factory.mktemp("int4") / "written", SHAPE, 1)


@pytest.fixture(scope="module", params=LAYOUTS)
def twins(request: pytest.FixtureRequest, written: Path, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return int4_twins(request.param, written, tmp_path_factory.mktemp("twins"))


@pytest.fixture(scope="module")
def awq(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return int4_twins("awq", written, tmp_path_factory.mktemp("awq"))


def questions(twins: Twins) -> list[Question]:
    video = random_item(twins.models.family, (3, 2, 2), Fraction(1), rate=0.5)
    asking = Question((Text(tuple(range(20, 33))),), 6)
    return [asking, replace(asking, adapter="lora"), Question((Text((20, 21)), video, Text((22,))), 4)]


@pytest.mark.parametrize("count", [0, 1, 4, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 128])
def test_a_product_is_that_of_the_formula(group: int, dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(1)
    values = torch.randint(0, 16, (192, 256), dtype=torch.uint8)
    zeros, scales = torch.randint(0, 16, (192, 256 // group)), torch.rand(192, 256 // group)
    of_column = torch.arange(256) // group
    dense = (values - zeros[:, of_column]) * scales[:, of_column]
    weight = Int4Weight(Int4Matrix(values, scales, -zeros * scales), dtype)
    assert isinstance(weight.layout, PlainLayout) == (dtype != torch.bfloat16 or not has_products())
    rows = torch.randn(2, count, 256).to(dtype)
    exact = rows.double() @ dense.double().T
    most = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(weight.multiply(rows).double(), exact, atol=most * 500, rtol=0)


def has_products() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512"))


def test_a_layout_that_is_not_this_processors_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_products():
        pytest.skip("torch has no fast products in int4 on this processor")
    other = 64 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 32
    with pytest.raises(AssertionError, match="a product of 1 rows differs by"):
        check_layout(CpuLayout(other), CPU)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if other == 64 else "AVX2")
    assert isinstance(layout_of.__wrapped__(torch.bfloat16, CPU), PlainLayout)


def test_the_layout_of_cuda_is_read_as_its_products_read_it() -> None:
    torch.manual_seed(1)
    values = torch.randint(0, 16, (16, 256), dtype=torch.uint8)
    scales = torch.stack((torch.ones(2, 16), torch.full((2, 16), 8.0)), -1)
    assert torch.equal(CudaLayout().dense(packed_for_cuda(values), scales, torch.empty(values.numel())), values.float())


def test_the_law_holds_in_every_published_layout_with_and_without_adapters(twins: Twins, tmp_path: Path) -> None:
    models = twins.models
    config = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"]}
    adapted = write_adapter(models.reference.model.language_model, tmp_path / "lora", **config)
    for dtype, bounds in ((torch.float32, ()), (torch.bfloat16, (BFLOAT16, 2 * BFLOAT16))):
        model = load(twins.quantised, dtype)
        layers = [each for each in model.text.modules() if isinstance(each, Int4Linear | JoinedLinear)]
        assert len(layers) == 7 * SHAPE.layers
        load_adapters([AdapterFolder("lora", tmp_path / "lora")], model)
        engine = TinyEngine(model, max_num_batched_tokens=7)
        asked = answer(engine, questions(twins))
        assert_law(models, engine, questions(twins), asked, *bounds, adapted={"lora": adapted})


@pytest.mark.parametrize("family", ["minicpmv_4_5", "qwen3_5"])
def test_the_law_holds_for_other_families(family: str, tmp_path: Path) -> None:
    """With weights under another prefix and a flat config; with recurrent states."""
    written = FAMILIES[family].write(tmp_path / "written", 1)
    twins = int4_twins("compressed-tensors with zeros", written, tmp_path, family)
    engine = TinyEngine(load(twins.quantised), max_num_batched_tokens=7)
    asked = [Question((Text(tuple(range(20, 33))),), 6)]
    assert_law(twins.models, engine, asked, answer(engine, asked))


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own code
def test_a_compiled_model_obeys_the_law(awq: Twins) -> None:
    engine = TinyEngine(load(awq.quantised, torch.bfloat16), max_num_batched_tokens=11)
    assert engine.runner.compile()
    asked = [each for each in questions(awq) if not each.adapter]
    assert_law(awq.models, engine, asked, answer(engine, asked), BFLOAT16, 2 * BFLOAT16)


def half_of(folder: Path, workers: WorkerRanks) -> LanguageModel:
    return load_language_model(Checkpoint(folder), torch.float32, CPU, workers.group)


def test_two_ranks_have_half_of_each_layer_and_answer_as_one(awq: Twins, workers: WorkerRanks, tmp_path: Path) -> None:
    """A rank's 192 inputs of down_proj are no multiple of 128: its groups are divided."""
    folder = changed(awq.quantised, tmp_path / "awq")
    config = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"]}
    adapted = write_adapter(awq.models.reference.model.language_model, folder / "adapters" / "lora", **config)
    workers.ranks.broadcast(str(folder).encode())
    half = half_of(folder, workers)
    load_adapters(parallel_rank.adapters_of(folder), half, workers.group)
    shapes = {name: each.int4.shape for name, each in half.text.named_modules() if isinstance(each, Int4Linear)}
    assert shapes["layers.0.self_attn.o_proj"] == (SHAPE.hidden, SHAPE.hidden // 2)
    assert shapes["layers.0.mlp.up_proj"] == (SHAPE.intermediate // 2, SHAPE.hidden)
    assert len(shapes) == 7 * SHAPE.layers
    engine = TinyEngine(half, blocks=parallel_rank.MOST_BLOCKS, workers=workers, max_num_batched_tokens=16)
    asked = answer(engine, questions(awq))
    assert_law(replace(awq.models, engine=half), engine, questions(awq), asked, adapted={"lora": adapted})
    workers.ranks.broadcast(b"")


def test_act_order_is_not_divided_among_ranks(written: Path, workers: WorkerRanks, tmp_path: Path) -> None:
    twins = int4_twins("gptq in act-order", written, tmp_path)
    with pytest.raises(StartupError, match=r"layers\.0\.\S+ cannot be packed in 4 bits: its inputs .* \(act-order\)"):
        half_of(twins.quantised, workers)


def test_a_checkpoint_is_rounded_to_the_nearest_of_16_values(written: Path, tmp_path: Path) -> None:
    weights = load_file(written / "model.safetensors")
    rounded = {
        name: nearest(each) for name, each in weights.items() if name.startswith(PREFIX) and "_proj.weight" in name
    }
    assert len(rounded) == 7 * SHAPE.layers
    plain = changed(written, tmp_path / "plain", lambda held: held.update(rounded))
    reference = load(plain)
    model = load_language_model(Checkpoint(written), torch.float32, CPU, quantization="int4")
    ids = torch.randint(10, 300, (1, 20))
    engines = [TinyEngine(each) for each in (model, reference)]
    asked = [answer(each, [Question((Text(tuple(ids[0].tolist())),), 4)]) for each in engines]
    assert asked[0][0].answer == asked[1][0].answer
    found, expected = (torch.stack(each.runner.logits["0"]) for each in engines)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert torch.equal(model.embed_tokens.weight, reference.embed_tokens.weight)


def nearest(weight: Tensor) -> Tensor:
    """The nearest of the 16 values between the least and the largest of each 128 columns."""
    groups = weight.unflatten(1, (-1, 128))
    least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = (most - least) / 15
    return (((groups - least) / step).round() * step + least).flatten(1)


def test_gates_are_not_rounded(tmp_path: Path) -> None:
    """Those of recurrent layers, a number for each head, and that of the shared expert."""
    write: Any = FAMILIES["qwen3_5_moe"].write
    written = write(tmp_path / "written", 1, text={**EXPERTS_3_5, "hidden_size": 128})
    weights, rows = load_file(written / "model.safetensors"), torch.randn(3, 128)
    text = load_language_model(Checkpoint(written), torch.float32, CPU, quantization="int4").text
    exact = dict[str, bool]()
    for name in ("linear_attn.in_proj_qkv", "linear_attn.in_proj_a", "linear_attn.in_proj_b", "mlp.shared_expert_gate"):
        weight = weights[f"{FAMILIES['qwen3_5_moe'].text_prefix}layers.0.{name}.weight"]
        exact[name.split("_")[-1]] = torch.allclose(
            text.get_submodule(f"layers.0.{name}")(rows), rows @ weight.T, atol=1e-5
        )
    assert exact == {"qkv": False, "a": True, "b": True, "gate": True}


MEASURE = """
import sys, torch
from pathlib import Path
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.generation.loading import load_language_model
def peak():
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak()
model = load_language_model(Checkpoint(Path(sys.argv[1])), torch.bfloat16, torch.device("cpu"), quantization="int4")
print(peak() - before)
"""


def test_loading_holds_packed_layers_and_one_file(tmp_path: Path) -> None:
    shape = replace(SHAPE, hidden=1024, heads=32, kv_heads=16, intermediate=3072, layers=6)
    folder = write_checkpoint(tmp_path / "model", shape, 1, torch.bfloat16)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    of_file = [
        {name: each for name, each in weights.items() if f"layers.{number}." in name} for number in range(shape.layers)
    ]
    of_file.append({name: each for name, each in weights.items() if "layers." not in name})
    for number, held in enumerate(of_file):
        save_file(held, folder / f"{number}-of-{len(of_file)}.safetensors", metadata={"format": "pt"})
    index = {name: f"{number}-of-{len(of_file)}.safetensors" for number, held in enumerate(of_file) for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    largest = max(sum(each.nbytes for each in held.values()) for held in of_file)
    whole = sum(each.nbytes for each in weights.values())
    found = subprocess.run([sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, check=True)
    peak = int(found.stdout.splitlines()[-1])
    beside = 64 * 2**20  # of libraries, of the layer that is packed, and of huge pages, which vary by 25 MB
    assert peak < 0.3 * whole + largest + beside < whole, (peak, whole, largest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lacking", r"missing weights \['model\S+layers\.1\.mlp\.up_proj\.scales'\]"),
        ("bias", r"unknown weights \['model\S+layers\.1\.mlp\.up_proj\.bias'\]"),
        ("expert", r"layers\.1\.mlp\.experts\.0\.up_proj\.qweight: only linear layers may be stored in 4 bits"),
        ("group", r"up_proj cannot be packed in 4 bits: its groups of 16 inputs are no multiple of 32"),
        ("shape", r"up_proj cannot be packed in 4 bits: config.json expects \[384, 256\], got \[384, 128\]"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(awq: Twins, tmp_path: Path, change: str, message: str) -> None:
    layer = f"{PREFIX}layers.1.mlp.up_proj"

    def spoil(held: dict[str, Tensor]) -> None:
        if change == "lacking":
            del held[f"{layer}.scales"]
        elif change == "bias":
            held[f"{layer}.bias"] = torch.ones(384)
        elif change == "expert":
            held[f"{PREFIX}layers.1.mlp.experts.0.up_proj.qweight"] = held[f"{layer}.qweight"].clone()
        elif change == "group":
            for part in ("scales", "qzeros"):
                held[f"{layer}.{part}"] = held[f"{layer}.{part}"].repeat_interleave(8, 0)
        else:
            held[f"{layer}.qweight"] = held[f"{layer}.qweight"][:128].clone()

    with pytest.raises(StartupError, match=message):
        load(changed(awq.quantised, tmp_path / "spoilt", spoil))


def test_a_bias_of_zeros_that_a_layer_lacks_and_a_stored_output_layer_are_read(written: Path, tmp_path: Path) -> None:
    twins = int4_twins("gptq", written, tmp_path)
    draw = torch.Generator().manual_seed(9)
    tensors, dense = in_int4(load_file(written / "model.safetensors")["lm_head.weight"], LAYOUTS["gptq"], draw)
    more = {f"lm_head.{part}": each for part, each in tensors.items()}
    more[f"{PREFIX}layers.1.mlp.up_proj.bias"] = torch.zeros(384)

    def store(held: dict[str, Tensor]) -> None:
        del held["lm_head.weight"]
        held.update(more)

    model = load(changed(twins.quantised, tmp_path / "stored", store))
    rows = torch.randn(3, SHAPE.hidden)
    torch.testing.assert_close(model.lm_head(rows), rows @ dense.T, atol=1e-4, rtol=1e-5)


def test_the_flag_rounds_layers_and_computes_in_bfloat16(written: Path) -> None:
    flags = ("--device", "cpu", "--kv-cache-tokens", "512", "--compile", "off", "--quantization", "int4")
    model = build(GenerationSettings.load(["--model", str(written), *flags]), Checkpoint(written)).runner.model
    assert model.dtype == torch.bfloat16
    assert {type(each) for name, each in model.text.named_modules() if name.endswith("o_proj")} == {Int4Linear}


def test_int4_is_refused_where_nothing_can_be_rounded(awq: Twins, tmp_path: Path) -> None:
    small = write_checkpoint(tmp_path / "small", TINY, 1)
    with pytest.raises(StartupError, match="--quantization int4: no linear layer has a multiple of 128 inputs"):
        load_language_model(Checkpoint(small), torch.float32, CPU, quantization="int4")
    other = changed(awq.plain, tmp_path / "other", quantization_config={"quant_method": "fp8"})
    with pytest.raises(StartupError, match="--quantization int4: the checkpoint is quantised already"):
        load_language_model(Checkpoint(other), torch.float32, CPU, quantization="int4")
