"""Two ranks, each with half of every layer and of the cache, answer what one process answers that has the whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from common.process import ExitStatus
from services.generation.families import check_ranks, load_language_model
from services.generation.model.language_model import LanguageModel
from services.generation.parallel.leading import Leading
from services.generation.parallel.sharding import check_sizes
from tests import parallel_rank
from tests.encoder.meeting import ended_by_a_signal
from tests.families import FAMILIES, write_qwen3_vl_moe
from tests.law import LOGPROB_TOLERANCE, Question, answer, assert_law
from tests.oracle import Text
from tests.tiny import Models, TinyEngine, load_models, random_item

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def leading() -> Iterator[Leading]:
    """One other rank for all tests of this file: a process takes its time to start."""
    torch.set_num_threads(1)
    leading = Leading(2, (), CPU, parallel_rank.MODULE)
    yield leading
    leading.close()


@dataclass(frozen=True)
class Shared:
    """whole: one process's model, and transformers' own; half: rank 0's part of the same."""

    whole: Models
    half: Models
    leading: Leading

    def engine(self, **sizes: int) -> TinyEngine:
        return TinyEngine(self.half.engine, workers=self.leading, **sizes)


@pytest.fixture(scope="module")
def shared(leading: Leading, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    whole = load_models(family, tmp_path_factory.mktemp("checkpoint"))
    leading.ranks.tell(str(whole.folder).encode())
    half = load_language_model(Checkpoint(whole.folder), torch.float32, CPU, leading.group)
    yield Shared(whole, replace(whole, engine=half), leading)
    leading.ranks.tell(b"")


def questions(family: str) -> list[Question]:
    """Prompts of many lengths, pruned videos and pictures in them, some alike at their beginning."""
    asked = []
    for number in range(6):
        film = random_item(FAMILIES[family], (4, 2, 3), Fraction(2, 3), seed=number // 2, rate=0.75)
        picture = random_item(FAMILIES[family], (1, 3, 2), None, seed=number)
        text = Text(tuple(range(10, 15 + 3 * number)))
        parts = (text, film, Text((7, 8)), picture, Text((9, 10 + number))) if number % 3 else (text,)
        asked.append(Question(parts, new_tokens=8 + number, answers=1 + number % 2))
    return asked


# Of so few blocks there are not enough for all requests that run: some are computed a second time.
@pytest.mark.parametrize(("few", "chunk_tokens"), [(False, 64), (False, 3), (True, 16)])
def test_two_ranks_answer_what_one_does(shared: Shared, family: str, few: bool, chunk_tokens: int) -> None:
    asking, arrivals, deliveries = questions(family), [0, 0, 1, 2, 5, 9], [0, 3, 1, 4]
    blocks = max(each.most_blocks for each in asking) + 1 if few else parallel_rank.MOST_BLOCKS
    drafts = 3 if chunk_tokens == 64 else 0
    sizes = {"blocks": blocks, "max_num_batched_tokens": chunk_tokens, "max_draft_tokens": drafts}
    one, two = TinyEngine(shared.whole.engine, **sizes), shared.engine(**sizes)
    expected = answer(one, asking, arrivals, deliveries)
    found = answer(two, asking, arrivals, deliveries)
    assert [each.answer for each in found] == [each.answer for each in expected]
    assert [each.answer for first in found for each in first.others] == [
        each.answer for first in expected for each in first.others
    ]
    for name, rows in one.runner.logits.items():
        difference = torch.stack(rows).log_softmax(-1) - torch.stack(two.runner.logits[name]).log_softmax(-1)
        assert difference.abs().max() < LOGPROB_TOLERANCE
    assert_law(shared.half, two, asking, found)
    assert two.runner.steps == one.runner.steps
    assert (two.engine.stats().totals.preemptions > 0) == few


def test_a_rank_holds_its_own_heads_and_no_more_of_any_layer(shared: Shared, family: str) -> None:
    whole, half = shared.whole.engine, shared.half.engine
    assert (half.heads, half.kv_heads) == (whole.heads // 2, whole.kv_heads // 2)
    runner = shared.engine().runner
    assert {layer.shape[0] for layer in runner._cache.keys} == {whole.kv_heads // 2}  # type: ignore[attr-defined]
    prefix = FAMILIES[family].text_prefix
    written = load_file(shared.whole.folder / "model.safetensors")
    names = [name for name, own in half.text.named_parameters() if own.numel() * 2 == written[prefix + name].numel()]
    in_layer = [name.removeprefix(prefix + "layers.1.") for name in written if f"{prefix}layers.1." in name]
    shared_out = {name for name in in_layer if "_proj" in name and not name.endswith("o_proj.bias")}
    assert {name.removeprefix("layers.1.") for name in names if name.startswith("layers.1.")} == shared_out
    # Rank 0's are the first: of its heads, and of the columns that belong to them.
    for name, taken in (("q_proj", np.s_[: 2 * half.head_dim]), ("o_proj", np.s_[:, : 2 * half.head_dim])):
        full = f"layers.1.self_attn.{name}.weight"
        assert torch.equal(dict(half.text.named_parameters())[full], written[prefix + full][taken])
    assert half.lm_head.weight.shape[0] == -(-len(written["lm_head.weight"]) // 2)  # type: ignore[union-attr, arg-type, index]


def test_experts_with_their_axes_swapped_as_published_are_shared_out_alike(leading: Leading, tmp_path: Path) -> None:
    written = write_qwen3_vl_moe(tmp_path / "written", 1)
    swapped = shutil.copytree(written, tmp_path / "swapped")
    weights = load_file(written / "model.safetensors")
    experts = {name: each.mT.contiguous() for name, each in weights.items() if ".experts." in name}
    assert all(each.shape[1] != each.shape[2] for each in experts.values())
    save_file(weights | experts, swapped / "model.safetensors", metadata={"format": "pt"})
    one, other = (half_of(folder, leading).text.state_dict() for folder in (written, swapped))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_output_layer_that_is_tied_is_the_embeddings_own_rows(
    family: str, family_checkpoint: Path, leading: Leading, tmp_path: Path
) -> None:
    tied = shutil.copytree(family_checkpoint, tmp_path / "tied")
    weights = load_file(tied / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tied / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tied / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (tied / "config.json").write_text(json.dumps(config))
    half = half_of(tied, leading)
    embeddings, own = half.embed_tokens.weight, half.lm_head.weight
    assert isinstance(own, torch.Tensor)
    assert torch.equal(own, embeddings[: -(-len(embeddings) // 2)])
    assert own.data_ptr() == embeddings.data_ptr()


def test_a_weight_of_another_shape_refuses_to_start_on_a_rank_too(
    family: str, family_checkpoint: Path, leading: Leading, tmp_path: Path
) -> None:
    """Also where its part would have the right one."""
    broken = shutil.copytree(family_checkpoint, tmp_path / "broken")
    name = FAMILIES[family].text_prefix + "layers.1.self_attn.q_proj.weight"
    weights = load_file(broken / "model.safetensors") | {name: torch.zeros(63, 64)}
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=re.escape(f"wants {name} [64, 64], it is [63, 64]")):
        half_of(broken, leading)


def half_of(folder: Path, leading: Leading) -> LanguageModel:
    """Rank 0's. Nothing is said to the other rank: a part is read without it."""
    return load_language_model(Checkpoint(folder), torch.float32, CPU, leading.group)


def test_a_rank_that_stands_still_is_not_waited_for_for_ever(leading: Leading) -> None:
    joined: Any = dist.group.WORLD
    assert joined._get_backend(CPU).options._timeout < dist.default_pg_timeout


def test_ranks_that_do_not_come_refuse_to_start(tmp_path: Path) -> None:
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
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert "--tensor-parallel 2: the ranks cannot reach each other: " in ended.stdout


def test_a_signal_ends_a_service_whose_ranks_have_yet_to_meet(tmp_path: Path) -> None:
    arguments = f"0, 2, Path({str(tmp_path / 'meeting')!r}), torch.device('cpu')"
    assert ended_by_a_signal(f"from services.generation.parallel.group import Group\nGroup({arguments})", tmp_path) == 7


def test_what_met_may_be_forgotten_after_its_end_whatever_was_opened_meanwhile() -> None:
    """torch's store writes to the file once more, which by then was another's."""
    program = """
import gc, socket, torch
from services.generation.parallel.leading import Leading
leading = Leading(2, (), torch.device("cpu"), "tests.parallel_rank")
leading.close()
opened = [socket.socketpair() for _ in range(20)]
del leading
gc.collect()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr


def test_a_rank_that_cannot_start_ends_the_service_that_waits_for_it_and_leaves_nothing(tmp_path: Path) -> None:
    program = """
import torch
from services.generation.parallel.leading import Leading
Leading(2, ["--tensor-parallel", "none"], torch.device("cpu"))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert list(tmp_path.iterdir()) == []
    assert ended.returncode == ExitStatus.CANNOT_START
    assert "rank 1 of 2 ended with status 2" in ended.stdout
    assert "--tensor-parallel: Input should be a valid integer" in ended.stdout


# Of 36 columns either rank would have 18, which are 72 bytes of float32.
@pytest.mark.parametrize("columns", [50, 51, 36])
def test_experts_that_cannot_be_shared_out_refuse_to_start(columns: int) -> None:
    sizes = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=columns)
    told = f"--tensor-parallel 2 must divide the {columns} columns of the model's experts into multiples of 8"
    with pytest.raises(StartupError, match=told):
        check_sizes(sizes, 2)
    check_sizes(SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=48), 2)


@pytest.mark.parametrize("ranks", [3, 4])
def test_heads_that_cannot_be_shared_out_refuse_to_start(family_checkpoint: Path, ranks: int) -> None:
    with pytest.raises(StartupError, match=f"{ranks} must divide the model's 4 attention heads and 2 KV heads"):
        check_ranks(Checkpoint(family_checkpoint), ranks)
    check_ranks(Checkpoint(family_checkpoint), 2)
