"""SmolVLM2's tower: transformers' embeddings of squares, packed, and in the order of the prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import SmolVLMForConditionalGeneration
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import FrameShape, Grid, Run
from gridsieve.families.smolvlm.tower import _cells
from gridsieve.services.encoder.tower.loading import load_tower
from tests.encoder.test_llava import plan_of_image
from tests.encoder.tower_recorder import assert_replays
from tests.families.smolvlm import MERGE, PATCH_PX, SIDE_PX, TOKENS
from tests.generation.checkpoints import changed

CPU = torch.device("cpu")


def frames_of(count: int) -> torch.Tensor:
    return torch.randint(
        0, 255, (count, SIDE_PX, SIDE_PX, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


@torch.no_grad()
def test_squares_have_the_embeddings_of_transformers(checkpoints: Callable[[str], Path]) -> None:
    folder, frames = checkpoints("smolvlm"), frames_of(3)
    model = SmolVLMForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    expected = model.get_image_features((frames.permute(0, 3, 1, 2)[None] / 255 - 0.5) / 0.5, return_dict=True)
    found = torch.cat(load_tower(Checkpoint(folder), "float32", CPU).encode(frames.split(1)), dim=1)[0]
    torch.testing.assert_close(found, torch.cat(list(expected.pooler_output)), atol=1e-5, rtol=0)


def test_graphs_replay_what_the_tower_computes(checkpoints: Callable[[str], Path]) -> None:
    assert_replays(checkpoints("smolvlm"), frames_of(3).split(1))


@pytest.mark.parametrize("side", [*range(1, 40), 64])
def test_patches_take_the_positions_of_transformers(side: int) -> None:
    """Whatever the rounding of these operations."""
    config = SmolVLMVisionConfig(hidden_size=1, num_attention_heads=1, image_size=side, patch_size=1, num_channels=1)
    embeddings: Any = SmolVLMVisionEmbeddings(config)
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(side * side, dtype=torch.float32)[:, None])
        found = embeddings(torch.zeros(1, 1, side, side), torch.ones(1, side, side, dtype=torch.bool))
    cells = _cells(side)
    assert found[0, :, 0].tolist() == (cells[:, None] * side + cells).flatten().tolist()


def test_the_whole_of_an_image_is_sent_first_and_stands_last(checkpoints: Callable[[str], Path]) -> None:
    tower = load_tower(Checkpoint(checkpoints("smolvlm")), "float32", CPU)
    plan = replace(
        plan_of_image(frames_of(4), 0, 0, 4 * TOKENS),
        grid=Grid(1, 4, TOKENS),
        runs=(Run(0, 4 * TOKENS),),
        frames=FrameShape(4, (SIDE_PX, SIDE_PX), tile_columns=3),
    )
    arrangement = tower.arrangement(plan)
    assert arrangement.of_item is not None
    of_pictures = torch.arange(4).repeat_interleave(TOKENS).reshape(1, -1, 1)
    assert arrangement.of_item(of_pictures)[0, ::TOKENS, 0].tolist() == [1, 2, 3, 0]
    with pytest.raises(ValueError, match="4 frames have 4 tokens each"):
        tower.arrangement(replace(plan, grid=Grid(1, 3, TOKENS), runs=(Run(0, 3 * TOKENS),)))


def test_a_scale_that_does_not_divide_the_patches_is_refused(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = changed(checkpoints("smolvlm"), tmp_path / "changed", lambda weights: None, scale_factor=4)
    assert SIDE_PX // PATCH_PX % MERGE == 0
    with pytest.raises(StartupError, match="scale_factor 4 does not divide the 6 patches of a side"):
        load_tower(Checkpoint(folder), "float32", CPU)
