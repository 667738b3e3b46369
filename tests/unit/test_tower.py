"""The vision tower: transformers' own answers from uint8 frames, alone or packed, and what it refuses to start with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoint import Checkpoint
from common.errors import StartupError
from demo.checkpoint import TINY, write_checkpoint
from services.encoder.families import load_tower
from services.encoder.patches import PatchShape, patchify
from services.encoder.tower import Tower

CPU = torch.device("cpu")
PATCH, MERGE, TEMPORAL = TINY.patch_px, TINY.merge, TINY.temporal_patch


@pytest.fixture(scope="module")
def tower(tiny_checkpoint: Path) -> Tower:
    return load_tower(Checkpoint(tiny_checkpoint), "auto", CPU)


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> Any:
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_checkpoint, dtype=torch.float32).model.visual


def random_frames(count: int, height_px: int, width_px: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, height_px, width_px, 3), dtype=torch.uint8, generator=random)


def pixel_values(frames: Tensor, processor: dict[str, Any]) -> Tensor:
    """What transformers' video processor makes of frames, patch by patch, in float64."""
    mean, std = np.array(processor["image_mean"]), np.array(processor["image_std"])
    values = (frames.numpy().astype(np.float64) * processor["rescale_factor"] - mean) / std
    count, height, width, _ = values.shape
    rows: list[NDArray[np.float64]] = []
    for start in range(0, count, TEMPORAL):
        for row in range(height // PATCH // MERGE):
            for column in range(width // PATCH // MERGE):
                for inner_row in range(MERGE):
                    for inner_column in range(MERGE):
                        top, left = (row * MERGE + inner_row) * PATCH, (column * MERGE + inner_column) * PATCH
                        patch = values[start : start + TEMPORAL, top : top + PATCH, left : left + PATCH]
                        rows.append(patch.transpose(3, 0, 1, 2).ravel())
    return torch.from_numpy(np.stack(rows)).float()


def processor_of(folder: Path, name: str = "video_preprocessor_config.json") -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / name).read_text())
    return config


def slices_of(frames: Tensor) -> list[Tensor]:
    return list(frames.split(TEMPORAL))


@pytest.mark.parametrize(("frames", "height", "width"), [(2, 56, 56), (6, 84, 112), (8, 28, 168), (4, 140, 84)])
@torch.no_grad()
def test_embeddings_are_those_of_transformers_tower_on_its_processors_patches(
    tower: Tower, reference: Any, tiny_checkpoint: Path, frames: int, height: int, width: int
) -> None:
    video = random_frames(frames, height, width)
    grid = torch.tensor([[frames // TEMPORAL, height // PATCH, width // PATCH]])
    expected = reference(pixel_values(video, processor_of(tiny_checkpoint)), grid_thw=grid).pooler_output
    ours = torch.cat(tower.encode(slices_of(video)), dim=1)
    assert ours.shape == (1, *expected.shape)
    torch.testing.assert_close(ours[0], expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_an_image_is_seen_as_transformers_image_processor_shows_it(
    tower: Tower, reference: Any, tiny_checkpoint: Path
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = random_frames(1, 84, 112)
    processor = Qwen2VLImageProcessorPil.from_pretrained(tiny_checkpoint, do_resize=False)
    seen = processor(images=[image[0].numpy()], return_tensors="pt")
    expected = reference(seen["pixel_values"], grid_thw=seen["image_grid_thw"]).pooler_output
    torch.testing.assert_close(tower.encode([image])[0][0], expected, atol=1e-5, rtol=0)


def test_a_slice_short_of_frames_repeats_its_last(tower: Tower) -> None:
    frame = random_frames(1, 56, 84)
    alone, twice = tower.encode([frame])[0], tower.encode([torch.cat([frame, frame])])[0]
    assert torch.equal(alone, twice)


def test_a_slice_is_encoded_alike_alone_and_among_others(tower: Tower) -> None:
    sizes = [(56, 56), (84, 112), (84, 112), (168, 28), (56, 56), (112, 84)]
    slices = [random_frames(TEMPORAL, height, width, seed) for seed, (height, width) in enumerate(sizes)]
    packed = tower.encode(slices)
    for alone, among in zip(slices, packed, strict=True):
        torch.testing.assert_close(among, tower.encode([alone])[0], atol=2e-6, rtol=0)


def test_patches_stand_in_the_order_of_merged_tokens() -> None:
    frames = random_frames(TEMPORAL, 56, 84)
    plain = {"image_mean": [0, 0, 0], "image_std": [1, 1, 1], "rescale_factor": 1}
    assert torch.equal(patchify(frames, PatchShape(PATCH, MERGE, TEMPORAL)).float(), pixel_values(frames, plain))


@torch.no_grad()
def test_a_bfloat16_checkpoint_runs_in_bfloat16_as_near_the_truth_as_transformers(tmp_path: Path) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    folder = write_checkpoint(tmp_path, TINY, seed=2, dtype=torch.bfloat16)
    video, grid = random_frames(4, 112, 112), torch.tensor([[2, 8, 8]])
    pixels = pixel_values(video, processor_of(folder))
    exact, theirs = (
        Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=dtype).model.visual(pixels, grid_thw=grid)
        for dtype in (torch.float32, torch.bfloat16)
    )
    tower = load_tower(Checkpoint(folder), "auto", CPU)
    ours = torch.cat(tower.encode(slices_of(video)), dim=1)[0]
    assert tower.dtype == ours.dtype == torch.bfloat16
    our_error, their_error = (
        (each.float() - exact.pooler_output).abs().mean() for each in (ours, theirs.pooler_output)
    )
    assert our_error < 1.2 * their_error
    assert load_tower(Checkpoint(folder), "float32", CPU).dtype == torch.float32


# --- what refuses to start --------------------------------------------------------------------------------------


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


def rewrite_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def tower_key(weights: dict[str, Tensor], ending: str) -> str:
    return next(name for name in weights if "visual." in name and name.endswith(ending))


def test_a_missing_weight_refuses_to_start(copy: Path) -> None:
    def drop(weights: dict[str, Tensor]) -> None:
        del weights[tower_key(weights, "blocks.1.attn.qkv.bias")]

    rewrite_weights(copy, drop)
    with pytest.raises(StartupError, match=r"lacks blocks\.1\.attn\.qkv\.bias$"):
        load_tower(Checkpoint(copy), "auto", CPU)


def test_a_checkpoint_without_a_tower_refuses_to_start(copy: Path) -> None:
    def drop(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if "visual." in name]:
            del weights[name]

    rewrite_weights(copy, drop)
    with pytest.raises(StartupError, match=r"lacks blocks\.0\..* and \d+ more$"):
        load_tower(Checkpoint(copy), "auto", CPU)


def test_an_unknown_weight_refuses_to_start(copy: Path) -> None:
    def add(weights: dict[str, Tensor]) -> None:
        known = tower_key(weights, "merger.mlp.2.bias")
        weights[known.replace("mlp.2.bias", "adapter.bias")] = weights[known].clone()

    rewrite_weights(copy, add)
    with pytest.raises(StartupError, match=r"has unknown merger\.adapter\.bias$"):
        load_tower(Checkpoint(copy), "auto", CPU)


def test_a_weight_of_another_shape_refuses_to_start(copy: Path) -> None:
    def shorten(weights: dict[str, Tensor]) -> None:
        name = tower_key(weights, "merger.ln_q.weight")
        weights[name] = weights[name][:-1].clone()

    rewrite_weights(copy, shorten)
    with pytest.raises(StartupError, match=rf"merger\.ln_q\.weight has the shape \[{TINY.tower_hidden - 1}\]"):
        load_tower(Checkpoint(copy), "auto", CPU)


def test_the_prefix_of_the_published_checkpoints_is_read_as_well(copy: Path, tower: Tower) -> None:
    def rename(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            if name.startswith("model.visual."):
                weights[name.removeprefix("model.")] = weights.pop(name)

    with_prefix = load_tower(Checkpoint(copy), "auto", CPU)
    rewrite_weights(copy, rename)
    without = load_tower(Checkpoint(copy), "auto", CPU)
    frames = random_frames(TEMPORAL, 56, 56)
    assert torch.equal(without.encode([frames])[0], with_prefix.encode([frames])[0])


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("config.json", {"model_type": "llama"}, "'llama' is not supported"),
        ("config.json", {"vision_config": None}, "has no vision_config"),
        ("video_preprocessor_config.json", {"image_mean": [0.5, 0.5, 0.5]}, "normalised alike"),
        ("video_preprocessor_config.json", {"image_std": [0.5, 0.5, 0]}, "std above 0"),
    ],
)
def test_a_config_that_cannot_be_served_refuses_to_start(
    copy: Path, name: str, change: dict[str, Any], complaint: str
) -> None:
    (copy / name).write_text(json.dumps(processor_of(copy, name) | change))
    with pytest.raises(StartupError, match=complaint):
        load_tower(Checkpoint(copy), "auto", CPU)
