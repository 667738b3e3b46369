"""The benchmarks' formula for operations, against torch's own count of what transformers' model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2_5_VLForConditionalGeneration

from benchmarks.operations import prefill_operations
from common.checkpoint import Checkpoint
from demo.checkpoint import TINY, make_config, make_tokenizer, write_checkpoint
from services.generation.families import load_language_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> Any:
    config = make_config(TINY, make_tokenizer(TINY))
    return Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="eager")


def test_of_a_prefill(model: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    tokens, text = 48, model.config.text_config
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(input_ids=torch.ones(1, tokens, dtype=torch.int64), logits_to_keep=1)
    unseen = 2 * tokens**2 * text.hidden_size * text.num_hidden_layers  # later tokens, which it masks
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), TINY)
    ours = prefill_operations(load_language_model(Checkpoint(folder), torch.float32, CPU), tokens)
    assert ours == pytest.approx(counter.get_total_flops() - unseen, rel=1e-2)
