"""Experts of a mixture on devices where torch's grouped product would wait: the same numbers, without a wait."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gridsieve.services.generation.loading import text_model
from gridsieve.services.generation.model import experts
from gridsieve.services.generation.model.experts import EXPERTS, MAX_ROWS, rows_without_wait, waits
from tests.generation.paged_kernels import use_paged
from tests.generation.recorder import Recorder
from tests.law import Question, answer, assert_law
from tests.oracle import Text
from tests.tiny import TinyEngine, load_models, random_item


@pytest.mark.parametrize("family", ["nemotron_h_omni", "qwen3_vl_moe"])
def test_the_law_holds_and_decode_steps_are_captured_where_torch_would_wait(family: str, tmp_path: Path) -> None:
    """Chunks of more rows than all experts compute, chunks of fewer, and replayed decode steps. Nemotron's experts have
    no gates."""
    with patch.object(text_model, "waits", return_value=True):
        models = load_models(family, tmp_path)
    config = cast(Any, models.engine.text.config)
    assert config._experts_implementation == EXPERTS
    assert rows_without_wait(models.engine.text, 1000) == MAX_ROWS
    engine, capture = TinyEngine(models.engine, max_num_batched_tokens=9), Recorder()
    video = random_item(models.family, (4, 2, 3), Fraction(1), rate=0.5)
    questions = [Question((Text((20 + number, 21)), video, Text((30,) * number)), 7 + number) for number in range(4)]
    with patch.object(experts, "MAX_ROWS", 4):
        assert use_paged(engine).runner.capture_decoding(4, 256, capture)
        assert_law(models, engine, questions, answer(engine, questions, arrivals=[0, 1, 3, 8]))
    assert capture.replayed


@pytest.mark.parametrize(
    ("kind", "dtype", "capability", "expected"),
    [
        ("cpu", torch.float32, (0, 0), False),
        ("cuda", torch.bfloat16, (9, 0), False),
        ("cuda", torch.bfloat16, (10, 0), False),
        ("cuda", torch.bfloat16, (8, 0), True),
        ("cuda", torch.bfloat16, (12, 0), True),
        ("cuda", torch.float16, (9, 0), True),
    ],
)
def test_torchs_grouped_product_is_used_where_it_does_not_wait(
    kind: str, dtype: torch.dtype, capability: tuple[int, int], expected: bool
) -> None:
    weight = SimpleNamespace(device=torch.device(kind), dtype=dtype)
    with patch.object(torch.cuda, "get_device_capability", return_value=capability):
        assert waits(cast(Tensor, weight)) == expected
