"""Two ranks, each with half of every layer and of the KV cache, compute what one process computes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from common.process import ExitStatus
from services.generation.families import check_ranks, load_language_model
from services.generation.model.language_model import LanguageModel
from services.generation.parallel.group import WorkerRanks, from_bytes, to_bytes
from services.generation.parallel.sharding import check_sizes
from services.generation.request.batch import AdaptedRows, Context, Packed
from services.generation.startup.adapter_files import load_adapters
from tests import parallel_rank
from tests.adapters import write_adapter
from tests.encoder.meeting import ended_by_a_signal
from tests.families import FAMILIES, write_qwen3_vl_moe
from tests.law import LOGPROB_TOLERANCE, Question, answer, assert_law
from tests.oracle import Text
from tests.tiny import Models, TinyEngine, load_models, random_item

CPU = torch.device("cpu")
TARGETS = {"everywhere": "all-linear", "behind-attention": ["o_proj"], "values": ["v_proj"]}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl_moe", pytest.param("qwen3_vl", marks=pytest.mark.deep)])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerRanks]:
    """One worker process for all tests of this file."""
    torch.set_num_threads(1)
    workers = WorkerRanks(2, (), CPU, parallel_rank.MODULE)
    yield workers
    workers.close()


@dataclass(frozen=True)
class Shared:
    """whole: one process' model and transformers'; half: rank 0's part; text: PEFT's text models by adapter."""

    whole: Models
    half: Models
    text: Mapping[str, nn.Module]
    workers: WorkerRanks


@pytest.fixture(scope="module")
def shared(workers: WorkerRanks, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    whole = load_models(family, tmp_path_factory.mktemp(family))
    reference = whole.reference.model.language_model
    text = {
        name: write_adapter(
            reference, whole.folder / "adapters" / name, seed, r=3, lora_alpha=7, target_modules=targets
        )
        for seed, (name, targets) in enumerate(TARGETS.items())
    }
    load_adapters(parallel_rank.adapters_of(whole.folder), whole.engine)
    workers.ranks.tell(str(whole.folder).encode())
    half = half_of(whole.folder, workers)
    load_adapters(parallel_rank.adapters_of(whole.folder), half, workers.group)
    yield Shared(whole, replace(whole, engine=half), text, workers)
    workers.ranks.tell(b"")


def half_of(folder: Path, workers: WorkerRanks) -> LanguageModel:
    """Rank 0's part, which it reads without the other rank."""
    return load_language_model(Checkpoint(folder), torch.float32, CPU, workers.group)


def questions(family: str) -> list[Question]:
    """Prompts of several lengths, pruned videos and images, some with equal prefixes, with adapters and without."""
    asked = []
    for number, adapter in enumerate((None, *TARGETS, None, None)):
        video = random_item(FAMILIES[family], (4, 2, 3), Fraction(2, 3), seed=number // 2, rate=0.75)
        image = random_item(FAMILIES[family], (1, 3, 2), None, seed=number)
        text = Text(tuple(range(10, 15 + 3 * number)))
        parts = (text, video, Text((7, 8)), image, Text((9, 10 + number))) if number % 3 else (text,)
        asked.append(Question(parts, new_tokens=8 + number, answers=1 + number % 2, adapter=adapter))
    return asked


@pytest.mark.parametrize(
    ("few_blocks", "chunk_tokens"),
    [(True, 16), pytest.param(False, 64, marks=pytest.mark.deep), pytest.param(False, 3, marks=pytest.mark.deep)],
)
def test_two_ranks_answer_as_one(shared: Shared, family: str, few_blocks: bool, chunk_tokens: int) -> None:
    """few_blocks: some requests are preempted."""
    asking, arrivals, deliveries = questions(family), [0, 0, 1, 2, 5, 9], [0, 3, 1, 4]
    blocks = max(each.most_blocks for each in asking) + 1 if few_blocks else parallel_rank.MOST_BLOCKS
    sizes = {"blocks": blocks, "max_num_batched_tokens": chunk_tokens, "max_draft_tokens": 3 if chunk_tokens > 3 else 0}
    one = TinyEngine(shared.whole.engine, **sizes)
    two = TinyEngine(shared.half.engine, workers=shared.workers, **sizes)
    expected, found = answer(one, asking, arrivals, deliveries), answer(two, asking, arrivals, deliveries)
    assert [each.answer for each in found] == [each.answer for each in expected]
    assert [other.answer for each in found for other in each.others] == [
        other.answer for each in expected for other in each.others
    ]
    for name, rows in one.runner.logits.items():
        difference = torch.stack(rows).log_softmax(-1) - torch.stack(two.runner.logits[name]).log_softmax(-1)
        assert difference.abs().max() < LOGPROB_TOLERANCE
    assert_law(shared.half, two, asking, found, adapted=shared.text)
    assert two.runner.steps == one.runner.steps
    assert (two.engine.stats().totals.preemptions > 0) == few_blocks


def test_a_rank_holds_half_of_every_layer_of_its_cache_and_of_its_adapters(shared: Shared, family: str) -> None:
    whole, half = shared.whole.engine, shared.half.engine
    assert (half.heads, half.kv_heads) == (whole.heads // 2, whole.kv_heads // 2)
    runner = TinyEngine(half, workers=shared.workers).runner
    assert {layer.shape[0] for layer in runner._cache.keys} == {whole.kv_heads // 2}  # type: ignore[attr-defined]
    prefix = FAMILIES[family].text_prefix
    written = load_file(shared.whole.folder / "model.safetensors")
    own = {name.replace(".layer.", "."): each for name, each in half.text.named_parameters()}
    halved = {name for name, each in own.items() if each.numel() * 2 == written[prefix + name].numel()}
    sharded = {
        name.removeprefix(prefix)
        for name in written
        if f"{prefix}layers.1." in name and "_proj" in name and not name.endswith("o_proj.bias")
    }
    assert {name for name in halved if name.startswith("layers.1.")} == sharded
    # Rank 0 has the first heads, and the columns that belong to them.
    width = 2 * half.head_dim
    for name, taken in (("q_proj", np.s_[:width]), ("o_proj", np.s_[:, :width])):
        full = f"layers.1.self_attn.{name}.weight"
        assert torch.equal(own[full], written[prefix + full][taken])
    assert half.lm_head.weight.shape[0] == -(-len(written["lm_head.weight"]) // 2)  # type: ignore[union-attr, arg-type, index]
    attention: Any = half.text.layers[1].self_attn  # type: ignore[union-attr, index]
    for layer, down, up in (
        (attention.q_proj, (3, half.hidden_size), (width, 3)),
        (attention.o_proj, (3, width), (half.hidden_size, 3)),
    ):
        for addition in layer.additions.values():
            assert (addition.down.shape, addition.up.shape) == (down, up)
            for side in (addition.down, addition.up):
                assert side.untyped_storage().nbytes() == side.numel() * side.itemsize


def test_experts_stored_with_swapped_axes_are_sharded_alike(workers: WorkerRanks, tmp_path: Path) -> None:
    written = write_qwen3_vl_moe(tmp_path / "written", 1)
    swapped = shutil.copytree(written, tmp_path / "swapped")
    weights = load_file(written / "model.safetensors")
    experts = {name: each.mT.contiguous() for name, each in weights.items() if ".experts." in name}
    assert all(each.shape[1] != each.shape[2] for each in experts.values())
    save_file(weights | experts, swapped / "model.safetensors", metadata={"format": "pt"})
    one, other = (half_of(folder, workers).text.state_dict() for folder in (written, swapped))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_tied_output_layer_is_rows_of_the_embeddings(
    tiny_checkpoint: Path, workers: WorkerRanks, tmp_path: Path
) -> None:
    tied = shutil.copytree(tiny_checkpoint, tmp_path / "tied")
    weights = load_file(tied / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tied / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tied / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (tied / "config.json").write_text(json.dumps(config))
    half = half_of(tied, workers)
    embeddings, own = half.embed_tokens.weight, half.lm_head.weight
    assert isinstance(own, torch.Tensor)
    assert torch.equal(own, embeddings[: -(-len(embeddings) // 2)])
    assert own.data_ptr() == embeddings.data_ptr()


def test_a_weight_of_another_shape_is_refused_even_if_the_ranks_part_would_fit(
    tiny_checkpoint: Path, workers: WorkerRanks, tmp_path: Path
) -> None:
    broken = shutil.copytree(tiny_checkpoint, tmp_path / "broken")
    name = FAMILIES["qwen2_5_vl"].text_prefix + "layers.1.self_attn.q_proj.weight"
    weights = load_file(broken / "model.safetensors") | {name: torch.zeros(63, 64)}
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=re.escape(f"expects {name} [64, 64], got [63, 64]")):
        half_of(broken, workers)


def test_a_worker_lost_before_the_service_watches_ends_the_process(
    workers: WorkerRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []

    def end(status: int) -> None:
        ended.append(status)
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(workers, "lost", None)
    with pytest.raises(SystemExit):
        workers._note("rank 1 of 2 ended with status 2")
    assert ended == [ExitStatus.CANNOT_START]
    lost: list[bool] = []
    monkeypatch.setattr(workers, "_on_lost", lambda: lost.append(True))
    workers._note("rank 1 of 2 ended with status 2")
    assert (len(ended), lost) == (1, [True])


def test_ranks_wait_for_each_other_less_than_torchs_default(workers: WorkerRanks) -> None:
    joined: Any = dist.group.WORLD
    assert joined._get_backend(CPU).options._timeout < dist.default_pg_timeout


@pytest.mark.parametrize("ranks", [3, 4])
def test_heads_that_ranks_cannot_divide_are_refused(tiny_checkpoint: Path, ranks: int) -> None:
    with pytest.raises(StartupError, match=f"{ranks} must divide the model's 4 attention heads and 2 KV heads"):
        check_ranks(Checkpoint(tiny_checkpoint), ranks)
    check_ranks(Checkpoint(tiny_checkpoint), 2)


# Of 36 columns each rank would have 18, which are 72 bytes of float32.
@pytest.mark.parametrize("columns", [50, 51, 36])
def test_experts_that_ranks_cannot_divide_are_refused(columns: int) -> None:
    sizes = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=columns)
    message = f"--tensor-parallel 2 must divide the {columns} columns of the model's experts into multiples of 8"
    with pytest.raises(StartupError, match=message):
        check_sizes(sizes, 2)
    check_sizes(SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=48), 2)


NUMBERS = st.integers(0, 2**40)
ARRAYS = st.lists(NUMBERS, max_size=5).map(lambda each: np.array(each, np.int64))


@st.composite
def packed(draw: st.DrawFn) -> Packed:
    tokens = draw(st.integers(1, 9))
    row = st.lists(NUMBERS, min_size=tokens, max_size=tokens)
    contexts = st.builds(Context, NUMBERS, NUMBERS, st.lists(NUMBERS, max_size=4))
    adapted = st.builds(AdaptedRows, st.binary(min_size=32, max_size=32), NUMBERS, NUMBERS)
    return Packed(
        contexts=tuple(draw(st.lists(contexts, min_size=1, max_size=4))),
        num_decodes=draw(NUMBERS),
        ids=np.array(draw(row)),
        positions=np.array([draw(row), draw(row), draw(row)]),
        slots=np.array(draw(row)),
        media_rows=draw(ARRAYS),
        last_rows=draw(ARRAYS),
        adapted=tuple(draw(st.lists(adapted, max_size=3))),
    )


@settings(max_examples=30)
@given(packed())
def test_a_step_arrives_as_it_was_sent(sent: Packed) -> None:
    found = from_bytes(to_bytes(sent))
    assert (found.contexts, found.num_decodes, found.adapted) == (sent.contexts, sent.num_decodes, sent.adapted)
    for name in ("ids", "positions", "slots", "media_rows", "last_rows"):
        array = getattr(found, name)
        assert np.array_equal(array, getattr(sent, name))
        assert (array.shape, array.dtype, array.flags.writeable) == (getattr(sent, name).shape, np.int64, True)


def ended(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=environment)


@pytest.mark.deep
def test_a_worker_that_cannot_start_ends_the_service_and_leaves_no_file(tmp_path: Path) -> None:
    program = """
import torch
from services.generation.parallel.group import WorkerRanks
WorkerRanks(2, ["--tensor-parallel", "none"], torch.device("cpu"))
"""
    process = ended(program, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert process.returncode == ExitStatus.CANNOT_START
    assert "rank 1 of 2 ended with status 2" in process.stdout
    assert "--tensor-parallel: Input should be a valid integer" in process.stdout


@pytest.mark.deep
def test_ranks_that_do_not_join_in_time_refuse_to_start(tmp_path: Path) -> None:
    program = f"""
from datetime import timedelta
from pathlib import Path
import torch
from common.contract.errors import StartupError
from services.generation.parallel import group
group._TIMEOUT = timedelta(seconds=0.2)
try:
    group.Group(0, 2, Path({str(tmp_path / "meeting")!r}), torch.device("cpu"))
except StartupError as error:
    print(error)
"""
    assert "--tensor-parallel 2: the ranks cannot reach each other: " in ended(program, tmp_path).stdout


@pytest.mark.deep
def test_a_signal_ends_a_service_whose_ranks_have_not_joined_yet(tmp_path: Path) -> None:
    arguments = f"0, 2, Path({str(tmp_path / 'meeting')!r}), torch.device('cpu')"
    assert ended_by_a_signal(f"from services.generation.parallel.group import Group\nGroup({arguments})", tmp_path) == 7


@pytest.mark.deep
def test_a_closed_group_can_be_collected_after_its_descriptors_were_reused(tmp_path: Path) -> None:
    """torch's FileStore writes to its file once more when it is collected."""
    program = """
import gc, socket, torch
from services.generation.parallel.group import WorkerRanks
workers = WorkerRanks(2, (), torch.device("cpu"), "tests.parallel_rank")
workers.close()
opened = [socket.socketpair() for _ in range(20)]
del workers
gc.collect()
"""
    process = ended(program, tmp_path)
    assert process.returncode == 0, process.stderr
