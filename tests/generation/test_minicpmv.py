"""MiniCPM-V 4.0: longrope of contexts that its short frequencies were trained for, and no pruning by default."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.retention import NONE, ItemPruning
from gridsieve.families import family_of
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.settings import check_pruning
from tests.families import minicpm
from tests.law import Question, answer, assert_law
from tests.oracle import Text
from tests.tiny import TinyEngine, load_models, random_item

CPU = torch.device("cpu")


def test_answers_have_the_log_probabilities_of_transformers(tmp_path: Path) -> None:
    models = load_models("minicpmv_4_0", tmp_path)
    video = random_item(models.family, (3, 2, 4), Fraction(1))
    questions = [
        Question((Text((20, 21, 22)), video, Text((30, 31))), 8),
        Question((Text(tuple(range(20, 150))),), 8),
    ]
    engine = TinyEngine(models.engine)
    assert_law(models, engine, questions, answer(engine, questions))


def test_frequencies_are_the_short_ones_whatever_is_beside_a_token(tmp_path: Path) -> None:
    minicpm.write(tmp_path, 1, "4.0")
    text = load_language_model(Checkpoint(tmp_path), torch.float32, CPU).text
    dim = minicpm.TEXT["hidden_size"] // minicpm.TEXT["num_attention_heads"]
    short = torch.tensor(minicpm.LONGROPE["short_factor"])
    frequencies = 1 / (short * minicpm.TEXT["rope_theta"] ** (torch.arange(0, dim, 2) / dim))
    positions = torch.tensor([[3, 700, 40_000]])
    angles = (positions[..., None] * frequencies).repeat(1, 1, 2)
    cos, sin = text.rotary_emb(torch.zeros(1), positions)
    torch.testing.assert_close(cos, angles.cos(), atol=1e-2, rtol=0)
    torch.testing.assert_close(sin, angles.sin(), atol=1e-2, rtol=0)


def test_contexts_that_need_the_long_frequencies_are_refused(tmp_path: Path) -> None:
    minicpm.write(tmp_path, 1, "4.0", changes={"max_position_embeddings": 32787})
    with pytest.raises(StartupError, match=r"max_position_embeddings 32787 must be at most 32786, its rope_parameters"):
        load_language_model(Checkpoint(tmp_path), torch.float32, CPU)


def test_a_default_method_that_the_model_does_not_take_is_refused(tmp_path: Path) -> None:
    minicpm.write(tmp_path, 1, "4.0")
    for pruning in (ItemPruning(0.0), ItemPruning(0.5, NONE)):
        check_pruning(family_of(Checkpoint(tmp_path)), pruning)
    with pytest.raises(StartupError, match=r"--pruning-method evs .* one of none for this model: a resampler's tokens"):
        check_pruning(family_of(Checkpoint(tmp_path)), ItemPruning(0.5))
