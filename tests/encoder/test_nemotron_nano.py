"""The tower of Nemotron Nano 12B v2 VL against transformers' classes for the Omni, with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.encoder.tower.graphs import with_graphs
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.patches import KeptFrames
from tests.encoder.test_nemotron import CPU, TOKEN_PX, frames_of, of_kept, of_pictures
from tests.encoder.tower_recorder import Recorder, load_packed
from tests.families import nemotron_nano


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemotron_nano")
    nemotron_nano.write(folder, 1)
    return folder


@pytest.mark.parametrize("replayed", [False, True])
def test_frames_and_chosen_tokens_become_the_tokens_of_transformers(folder: Path, replayed: bool) -> None:
    model, recorder = nemotron_nano.read(folder), Recorder()
    if replayed:
        tower = with_graphs(load_packed(folder), 160, recorder)
        recorder.replayed.clear()
    else:
        tower = load_tower(Checkpoint(folder), "float32", CPU)
    frames, kept = list(frames_of(3, 2, 2).split(1)), (0, 3)
    squares = [frames[2][:, :TOKEN_PX, :TOKEN_PX], frames[2][:, TOKEN_PX:, TOKEN_PX:]]
    found = tower.encode([*frames, KeptFrames(torch.cat(squares, dim=1), (2, 2), kept)])
    # To the Omni, a frame is a tubelet of which only the first frame counts.
    expected = [*of_pictures(model, frames), of_kept(model, frames[2].repeat(2, 1, 1, 1), kept)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[0], theirs, atol=1e-5, rtol=0)
    assert bool(recorder.replayed) == replayed


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ps_version": "v1"}, "ps_version 'v1' is not supported, only 'v2'"),
        ({"args": {"model": "vit_tiny"}}, r"vision_config\.args\.model 'vit_tiny' is not supported, only vit_small"),
        ({"args": {"register_multiple": 8}}, r"cls_register_token has the shape \[10, 32\], the config says \[8, 32\]"),
        ({"norm_mean": None}, "config.json lacks norm_mean"),
    ],
    ids=str,
)
def test_configs_of_other_towers_are_refused(folder: Path, tmp_path: Path, change: dict[str, Any], named: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    args = config["vision_config"]["args"] | change.get("args", {})
    config |= {name: value for name, value in change.items() if name != "args"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": {"args": args}}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(StartupError, match=named):
        load_tower(Checkpoint(tmp_path), "float32", CPU)
