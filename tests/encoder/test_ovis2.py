"""Ovis2's tower: transformers' embeddings of pictures, packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Ovis2ForConditionalGeneration

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.encoder.tower.loading import load_tower
from tests.encoder.tower_recorder import assert_replays
from tests.families.family import NORMALISED
from tests.families.ovis2 import SIDE_PX
from tests.generation.checkpoints import changed

CPU = torch.device("cpu")


def pictures() -> torch.Tensor:
    return torch.randint(
        0, 255, (3, SIDE_PX, SIDE_PX, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


@torch.no_grad()
def test_pictures_have_the_embeddings_of_transformers(checkpoints: Callable[[str], Path]) -> None:
    folder = checkpoints("ovis2")
    mean, std = (torch.tensor(NORMALISED[name])[:, None, None] for name in ("image_mean", "image_std"))
    model: Any = Ovis2ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    expected = model.get_image_features((pictures().permute(0, 3, 1, 2) / 255 - mean) / std, return_dict=True)
    found = torch.cat(load_tower(Checkpoint(folder), "float32", CPU).encode(pictures().split(1)))
    torch.testing.assert_close(found, expected.pooler_output, atol=1e-5, rtol=0)
    assert float(found.std(dim=1).mean()) > 1e-3, "weights that are alike prove nothing"


def test_graphs_replay_what_the_tower_computes(checkpoints: Callable[[str], Path]) -> None:
    assert_replays(checkpoints("ovis2"), pictures().split(1))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hidden_stride": 3}, "hidden_stride 3 does not divide the 4 patches of a side"),
        ({"tokenize_function": "gumbel_argmax"}, "tokenize_function 'gumbel_argmax' is not supported"),
    ],
)
def test_unsupported_settings_refuse_to_start(
    checkpoints: Callable[[str], Path], tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    folder = checkpoints("ovis2")
    vision = {**Checkpoint(folder).config["vision_config"], **settings}
    other = changed(folder, tmp_path / "changed", lambda weights: None, vision_config=vision)
    with pytest.raises(StartupError, match=named):
        load_tower(Checkpoint(other), "float32", CPU)
