"""Two ranks, each with half of every layer and of the KV cache, or with its only KV head, compute what one process
computes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.process import ExitStatus
from gridsieve.services.generation.loading import check_ranks, load_language_model
from gridsieve.services.generation.loading.draft_head import load_draft_head
from gridsieve.services.generation.loading.mtp import load_mtp
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.layers import attention_layers
from gridsieve.services.generation.parallel.group import WorkerRanks
from gridsieve.services.generation.parallel.sharding import check_sizes, shard
from gridsieve.services.generation.startup.adapters import load_adapters
from tests import capturing_rank, parallel_rank
from tests.adapters import write_adapter
from tests.drafts import SPECFORGE, write_head, write_mtp
from tests.families import FAMILIES, text_and_head, write_qwen3_5, write_qwen3_vl_moe
from tests.generation.checkpoints import changed, tied, with_swapped_experts
from tests.generation.test_drafts import record
from tests.integration.forks import Forked
from tests.law import Question, answer, assert_law, several_questions
from tests.tiny import Models, TinyEngine, load_models

CPU = torch.device("cpu")
DEEP = (
    *("cosmos3_edge", "glm4v", "glm4v_moe", "llava", "llava_pixtral", "minicpmv_2_6", "minicpmv_4_5"),
    *("nemotron_h_omni", "qwen2_5_vl", "qwen3_5_moe", "qwen3_vl"),
)
# The others have two.
ONE_KV_HEAD = {"qwen3_5": partial(write_qwen3_5, text={"num_key_value_heads": 1})}
FAMILY_PARAMS = [
    *("llava_onevision", "qwen3_5", "qwen3_vl_moe"),
    *(pytest.param(name, marks=pytest.mark.deep) for name in DEEP),
]
TARGETS = {"everywhere": "all-linear", "behind-attention": ["o_proj"], "values": ["v_proj"]}
# PEFT takes no adapter of the projection after a Mamba2 scan.
MAMBA_TARGETS = TARGETS | {"everywhere": r".*\.(in_proj|[qkvo]_proj|up_proj|down_proj)"}


@pytest.fixture(scope="module", params=FAMILY_PARAMS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@dataclass(frozen=True)
class Shared:
    """whole: one process' model and transformers'; half: rank 0's part; text: PEFT's text models by adapter."""

    whole: Models
    half: Models
    text: Mapping[str, nn.Module]
    workers: WorkerRanks


@pytest.fixture(scope="module")
def shared(workers: WorkerRanks, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    whole = load_models(family, tmp_path_factory.mktemp(family), ONE_KV_HEAD.get(family))
    reference, _ = text_and_head(whole.reference)
    text = {
        name: write_adapter(
            reference, whole.folder / "adapters" / name, seed, r=3, lora_alpha=7, target_modules=targets
        )
        for seed, (name, targets) in enumerate((MAMBA_TARGETS if family == "nemotron_h_omni" else TARGETS).items())
    }
    load_adapters(parallel_rank.adapters_of(whole.folder), whole.engine)
    workers.ranks.broadcast(str(whole.folder).encode())
    half = half_of(whole.folder, workers)
    load_adapters(parallel_rank.adapters_of(whole.folder), half, workers.group)
    yield Shared(whole, replace(whole, engine=half), text, workers)
    workers.ranks.broadcast(b"")


def half_of(folder: Path, workers: WorkerRanks) -> LanguageModel:
    """Rank 0's part, which it reads without the other rank."""
    return load_language_model(Checkpoint(folder), torch.float32, CPU, workers.group)


def questions(family: str) -> list[Question]:
    """With adapters and without, some with two answers."""
    asked = zip(several_questions(FAMILIES[family]), (None, *TARGETS, None, None), strict=True)
    return [
        replace(each, new_tokens=4 + number, answers=1 + number % 2, adapter=adapter)
        for number, (each, adapter) in enumerate(asked)
    ]


@pytest.mark.parametrize(
    ("few_blocks", "chunk_tokens"),
    [(True, 16), pytest.param(False, 64, marks=pytest.mark.deep), pytest.param(False, 3, marks=pytest.mark.deep)],
)
def test_two_ranks_answer_as_one(shared: Shared, family: str, few_blocks: bool, chunk_tokens: int) -> None:
    """few_blocks: some requests are preempted. Without draft tokens, tokens stay on the device from step to step."""
    asking = questions(family)
    engine = TinyEngine(
        shared.half.engine,
        blocks=max(each.most_blocks for each in asking) + 1 if few_blocks else parallel_rank.MOST_BLOCKS,
        max_num_batched_tokens=chunk_tokens,
        max_draft_tokens=3 if chunk_tokens > 16 else 0,
        overlap=True,
        workers=shared.workers,
    )
    found = answer(engine, asking, arrivals=[0, 0, 1, 2, 5, 9], deliveries=[0, 3, 1, 4])
    assert_law(shared.half, engine, asking, found, adapted=shared.text)
    assert (engine.totals["preemptions"] > 0) == few_blocks


def test_rank_0_drafts_what_one_process_drafts(shared: Shared, family: str) -> None:
    """MTP reads the whole output layer, of which each rank has half."""
    if family == "nemotron_h_omni":
        pytest.skip("heads read positions, and this model has none")
    mtp = family.startswith("qwen3_5")
    folder, sizes = shared.whole.folder, shared.whole.engine
    folder = write_mtp(folder) if mtp else write_head(folder / "head", SPECFORGE, sizes.hidden_size, sizes.vocab_size)
    load = load_mtp if mtp else load_draft_head
    asking, drafts = several_questions(FAMILIES[family]), []
    for models, workers in ((shared.whole, None), (shared.half, shared.workers)):
        drafted = replace(models.engine, draft=load(Checkpoint(folder), models.engine))
        engine = TinyEngine(drafted, max_draft_tokens=3, workers=workers)
        drafts.append(record(engine))
        assert_law(replace(models, engine=drafted), engine, asking, answer(engine, asking))
    assert drafts[0] == drafts[1] != []


def test_a_rank_holds_half_of_every_layer_of_its_cache_and_of_its_adapters(shared: Shared, family: str) -> None:
    half, prefix = shared.half.engine, FAMILIES[family].text_prefix
    of_whole = ("k_proj", "v_proj") if family in ONE_KV_HEAD else ()
    assert (1 if of_whole else 2) * half.token_bytes == shared.whole.engine.token_bytes
    written = load_file(shared.whole.folder / "model.safetensors")
    for name, each in half.text.named_parameters():
        sharded = ("_proj" in name or ".mlp.fc" in name) and not name.endswith("o_proj.bias")
        sharded = sharded and not any(f".{of_head}." in name for of_head in of_whole)
        stored = half.stored * half.hidden_size if name == "embed_tokens.weight" else 0
        whole = stored + sum(written[each].numel() for each in names_in(written, prefix + name.replace(".layer.", ".")))
        assert each.numel() * (2 if sharded else 1) == whole, name
    assert len(half.lm_head.weight) == -(-len(written[FAMILIES[family].lm_head]) // 2)  # type: ignore[union-attr, arg-type]
    attention = attention_layers(half.text)[0]
    width = 2 * half.head_dim
    for layer, down, up in (
        (attention.k_proj, (3, half.hidden_size), (half.kv_heads * half.head_dim, 3)),
        (attention.o_proj, (3, width), (half.hidden_size, 3)),
    ):
        for addition in layer.additions.values():
            assert (addition.down.shape, addition.up.shape) == (down, up)
            # A view would keep the whole matrix in memory.
            assert addition.up.untyped_storage().nbytes() == 4 * addition.up.numel()
            assert addition.down.untyped_storage().nbytes() == 4 * addition.down.numel()


def names_in(written: Mapping[str, Tensor], name: str) -> list[str]:
    """The names of a weight in the file: of stacked experts those of each."""
    experts, _, matrix = name.rpartition(".")
    kinds = {"gate_up_proj": ("gate_proj", "up_proj")}.get(matrix, (matrix,))
    found = [each for each in written if each.startswith(f"{experts}.") and each.split(".")[-2] in kinds]
    return [name] if name in written else found


def test_experts_stored_with_swapped_axes_are_sharded_alike(workers: WorkerRanks, tmp_path: Path) -> None:
    written = write_qwen3_vl_moe(tmp_path / "written", 1)
    swapped = with_swapped_experts(written, tmp_path / "swapped")
    one, other = (half_of(folder, workers).text.state_dict() for folder in (written, swapped))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_tied_output_layer_is_rows_of_the_embeddings(
    tiny_checkpoint: Path, workers: WorkerRanks, tmp_path: Path
) -> None:
    half = half_of(tied(tiny_checkpoint, tmp_path / "tied"), workers)
    embeddings, own = half.embed_tokens.weight, half.lm_head.weight
    assert isinstance(own, torch.Tensor)
    assert torch.equal(own, embeddings[: -(-len(embeddings) // 2)])
    assert own.data_ptr() == embeddings.data_ptr()


def test_a_weight_of_another_shape_is_refused_even_if_the_ranks_part_would_fit(
    tiny_checkpoint: Path, workers: WorkerRanks, tmp_path: Path
) -> None:
    name = FAMILIES["qwen2_5_vl"].text_prefix + "layers.1.self_attn.q_proj.weight"
    small = {name: torch.zeros(63, 64)}
    broken = changed(tiny_checkpoint, tmp_path / "broken", lambda weights: weights.update(small))
    with pytest.raises(StartupError, match=re.escape(f"expects {name} [64, 64], got [63, 64]")):
        half_of(broken, workers)


def test_heads_that_ranks_cannot_divide_are_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(StartupError, match="3 must divide the model's 4 attention heads, and divide its 2 KV heads or"):
        check_ranks(Checkpoint(tiny_checkpoint), 3)
    check_ranks(Checkpoint(tiny_checkpoint), 4)


def test_ranks_next_to_each_other_have_the_same_kv_head() -> None:
    """So that a rank's query heads read it."""
    whole, plan = torch.arange(6.0), dict.fromkeys(("k_proj", "k_proj.weight", "k_proj.bias"), "colwise")
    for rank, head in enumerate((0, 0, 1, 1)):
        layers = nn.ModuleDict({"k_proj": nn.Linear(4, len(whole), device="meta")})
        group: Any = SimpleNamespace(rank=rank, ranks=4, mesh=None)
        shards = shard(layers, plan, group, kv_heads=2)
        assert shards["k_proj.bias"].of(whole).tolist() == whole.view(2, 3)[head].tolist()
        assert layers["k_proj"].weight.shape == (3, 4)


def test_experts_that_ranks_cannot_divide_are_refused() -> None:
    """Of 36 columns each rank would have 18, which are 72 bytes of float32 and not aligned."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(StartupError, match="--tensor-parallel 2 must divide the 36 columns"):
        check_sizes(SimpleNamespace(**sizes, moe_intermediate_size=36), 2)
    check_sizes(SimpleNamespace(**sizes, moe_intermediate_size=36), 2, whole_experts=True)
    check_sizes(SimpleNamespace(**sizes, moe_intermediate_size=48), 2)


def ended(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=environment)


@pytest.mark.deep
@pytest.mark.parametrize(("failing", "where"), [("0", "inside"), ("1", "after"), ("1", "inside")])
def test_a_rank_that_cannot_capture_what_the_others_can_ends_all_and_says_why(
    tiny_checkpoint: Path, tmp_path: Path, failing: str, where: str
) -> None:
    """inside: while the other rank waits for it in a forward."""
    status, output = capturing(tmp_path / "log", tiny_checkpoint, failing, where)
    assert status == ExitStatus.CANNOT_START
    assert f"capturing decode steps as graphs failed on rank {failing} alone" in output
    assert "lower --max-num-seqs or --gpu-memory-fraction" in output


@pytest.mark.deep
def test_ranks_that_all_fail_to_capture_decode_eagerly(tiny_checkpoint: Path, tmp_path: Path) -> None:
    status, output = capturing(tmp_path / "log", tiny_checkpoint, "01", "inside")
    assert "2 tokens, graphs: False" in output
    assert status == 0


def capturing(log: Path, checkpoint: Path, *arguments: str) -> tuple[int, str]:
    """The exit status of rank 0 and what it prints."""
    program = f"from {capturing_rank.MODULE} import main; main()"
    return Forked("rank", (str(checkpoint), *arguments), log, program).wait(100), log.read_text()


@pytest.mark.deep
def test_a_worker_that_cannot_start_ends_the_service_and_leaves_no_file(tmp_path: Path) -> None:
    program = """
import torch
from gridsieve.services.generation.parallel.group import WorkerRanks
WorkerRanks(2, ["--tensor-parallel", "none"], torch.device("cpu"))
"""
    process = ended(program, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert process.returncode == ExitStatus.CANNOT_START
    assert "rank 1 of 2 ended with status 2" in process.stdout
    assert "--tensor-parallel: Input should be a valid integer" in process.stdout
