"""Two ranks, each with its part of every adapter, answer as PEFT computes them over transformers' whole text model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn

from common.checkpoint import Checkpoint
from services.generation.families import load_language_model
from services.generation.model.adapters import AdaptedLinear
from services.generation.parallel.leading import Leading
from services.generation.startup.adapter_files import load_adapters
from tests import parallel_rank
from tests.adapters import write_adapter
from tests.law import Question, answer, assert_law
from tests.oracle import Text
from tests.tiny import Models, TinyEngine, load_models, random_item

CPU = torch.device("cpu")
TARGETS = {"everywhere": "all-linear", "behind-attention": ["o_proj"], "values": ["v_proj"]}


@pytest.fixture(scope="module")
def leading() -> Iterator[Leading]:
    torch.set_num_threads(1)
    leading = Leading(2, (), CPU, parallel_rank.MODULE)
    yield leading
    leading.close()


@dataclass(frozen=True)
class Halves:
    """models: whose engine is rank 0's part; text: of the whole, with one adapter each, as PEFT computes it."""

    models: Models
    text: Mapping[str, nn.Module]
    leading: Leading


@pytest.fixture(scope="module")
def halves(leading: Leading, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Halves]:
    whole = load_models(family, tmp_path_factory.mktemp(family))
    reference = whole.reference.model.language_model
    text = {
        name: write_adapter(
            reference, whole.folder / "adapters" / name, seed, r=3, lora_alpha=7, target_modules=targets
        )
        for seed, (name, targets) in enumerate(TARGETS.items())
    }
    leading.ranks.tell(str(whole.folder).encode())
    half = load_language_model(Checkpoint(whole.folder), torch.float32, CPU, leading.group)
    load_adapters(parallel_rank.adapters_of(whole.folder), half, leading.group)
    yield Halves(replace(whole, engine=half), text, leading)
    leading.ranks.tell(b"")


@pytest.mark.parametrize("chunk_tokens", [64, 3])
def test_two_ranks_answer_as_peft_does(halves: Halves, chunk_tokens: int) -> None:
    asking = []
    for number, name in enumerate((*TARGETS, None, *TARGETS)):
        film = random_item(halves.models.family, (3, 2, 3), Fraction(1), seed=number, rate=0.5)
        parts = (Text((20, 21, 22)), film, Text(tuple(range(30, 32 + number))))
        asking.append(Question(parts, 5 + number, adapter=name))
    engine = TinyEngine(halves.models.engine, max_num_batched_tokens=chunk_tokens, workers=halves.leading)
    asked = answer(engine, asking, [0, 0, 1, 2, 3, 5, 8])
    assert_law(halves.models, engine, asking, asked, adapted=halves.text)


def test_a_rank_holds_no_more_of_an_adapter_than_of_the_layer(halves: Halves) -> None:
    layer, width, heads = halves.models.engine.text.layers[1], halves.models.engine.hidden_size, 2  # of four
    shapes = {}
    for name in ("q_proj", "o_proj"):
        adapted = getattr(layer.self_attn, name)  # type: ignore[union-attr]
        assert isinstance(adapted, AdaptedLinear)
        (shapes[name],) = {(addition.down.shape, addition.up.shape) for addition in adapted.additions.values()}
        for addition in adapted.additions.values():
            for side in (addition.down, addition.up):
                assert side.untyped_storage().nbytes() == side.numel() * side.itemsize
    own = heads * halves.models.engine.head_dim
    assert shapes == {"q_proj": ((3, width), (own, 3)), "o_proj": ((3, own), (width, 3))}


def test_ranks_that_have_read_different_adapters_refuse_to_start(tmp_path: Path) -> None:
    models = load_models("qwen2_5_vl", tmp_path / "model")
    reference = models.reference.model.language_model
    for seed, folder in enumerate((models.folder / "adapters" / "mine", tmp_path / "mine")):
        write_adapter(reference, folder, seed, r=3, target_modules=["q_proj"])
    program = f"""
from pathlib import Path
import torch
from common.checkpoint import Checkpoint
from services.generation.startup.adapter_files import load_adapters
from services.generation.settings import AdapterFolder
from services.generation.families import load_language_model
from services.generation.parallel.leading import Leading
leading = Leading(2, (), torch.device("cpu"), "tests.parallel_rank")
leading.ranks.tell({str(models.folder).encode()!r})
half = load_language_model(Checkpoint(Path({str(models.folder)!r})), torch.float32, torch.device("cpu"), leading.group)
load_adapters([AdapterFolder.parse("mine={tmp_path / "mine"}")], half, leading.group)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode
    assert "--adapters: the ranks have read different files" in ended.stderr
