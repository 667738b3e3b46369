"""The vision tower: transformers' own answers from uint8 frames, alone or packed, and what it refuses to start with."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from services.encoder.families import load_tower
from services.encoder.tower import weights as weights_module
from services.encoder.tower.patches import PatchShape, patchify, read_normalisation
from services.encoder.tower.tower import Tower
from services.encoder.tower.weights import find_weights, read_weights
from tests.families import FAMILIES, FamilyUnderTest, load_reference

PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shape(family: str) -> FamilyUnderTest:
    return FAMILIES[family]


@pytest.fixture(scope="module")
def tower(family_checkpoint: Path) -> Tower:
    return load_tower(Checkpoint(family_checkpoint), "auto", CPU)


@pytest.fixture(scope="module")
def reference(family: str, family_checkpoint: Path) -> Any:
    return load_reference(family, family_checkpoint).model.visual


def random_frames(count: int, height_px: int, width_px: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, height_px, width_px, 3), dtype=torch.uint8, generator=random)


def pixel_values(frames: Tensor, processor: dict[str, Any], shape: FamilyUnderTest) -> Tensor:
    """What transformers' video processor makes of frames, patch by patch, in float64."""
    patch, merge = shape.patch_px, shape.merge
    mean, std = np.array(processor["image_mean"]), np.array(processor["image_std"])
    values = (frames.numpy().astype(np.float64) * processor.get("rescale_factor", 1 / 255) - mean) / std
    count, height, width, _ = values.shape
    rows: list[NDArray[np.float64]] = []
    for start in range(0, count, shape.temporal_patch):
        for row in range(height // patch // merge):
            for column in range(width // patch // merge):
                for inner_row in range(merge):
                    for inner_column in range(merge):
                        top, left = (row * merge + inner_row) * patch, (column * merge + inner_column) * patch
                        cut = values[start : start + shape.temporal_patch, top : top + patch, left : left + patch]
                        rows.append(cut.transpose(3, 0, 1, 2).ravel())
    return torch.from_numpy(np.stack(rows)).float()


def processor_of(folder: Path, name: str = "video_preprocessor_config.json") -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / name).read_text())
    return config


def levels_of(output: Any) -> Tensor:
    """The embedding, then every deepstack feature, of transformers' own answer."""
    return torch.stack([output.pooler_output, *getattr(output, "deepstack_features", [])])


def grid_of(frames: Tensor, shape: FamilyUnderTest) -> Tensor:
    count, height, width, _ = frames.shape
    return torch.tensor([[count // shape.temporal_patch, height // shape.patch_px, width // shape.patch_px]])


def encode_all(tower: Tower, frames: Tensor, shape: FamilyUnderTest) -> Tensor:
    return torch.cat(tower.encode(frames.split(shape.temporal_patch)), dim=1)


@pytest.mark.parametrize(("slices", "rows", "columns"), [(1, 2, 2), (3, 3, 4), (4, 1, 6), (2, 5, 3)])
@torch.no_grad()
def test_all_levels_are_those_of_transformers_tower_on_its_processors_patches(
    tower: Tower, reference: Any, family_checkpoint: Path, shape: FamilyUnderTest, slices: int, rows: int, columns: int
) -> None:
    video = random_frames(slices * shape.temporal_patch, rows * shape.token_px, columns * shape.token_px)
    pixels = pixel_values(video, processor_of(family_checkpoint), shape)
    expected = levels_of(reference(pixels, grid_thw=grid_of(video, shape)))
    ours = encode_all(tower, video, shape)
    assert ours.shape == (1 + shape.levels, slices * rows * columns, shape.hidden)
    assert tower.embed_levels == shape.levels
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_an_image_is_seen_as_transformers_image_processor_shows_it(
    tower: Tower, reference: Any, family_checkpoint: Path, shape: FamilyUnderTest
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = random_frames(1, 3 * shape.token_px, 4 * shape.token_px)
    processor = Qwen2VLImageProcessorPil.from_pretrained(family_checkpoint, do_resize=False)
    seen = processor(images=[image[0].numpy()], return_tensors="pt")
    expected = levels_of(reference(seen["pixel_values"], grid_thw=seen["image_grid_thw"]))
    torch.testing.assert_close(tower.encode([image])[0], expected, atol=1e-5, rtol=0)


def test_a_slice_short_of_frames_repeats_its_last(tower: Tower, shape: FamilyUnderTest) -> None:
    frame = random_frames(1, 2 * shape.token_px, 3 * shape.token_px)
    alone, twice = tower.encode([frame])[0], tower.encode([torch.cat([frame, frame])])[0]
    assert torch.equal(alone, twice)


def test_a_slice_is_encoded_alike_alone_and_among_others(tower: Tower, shape: FamilyUnderTest) -> None:
    sizes = [(2, 2), (3, 4), (3, 4), (6, 1), (2, 2), (4, 3)]
    slices = [
        random_frames(shape.temporal_patch, rows * shape.token_px, columns * shape.token_px, seed)
        for seed, (rows, columns) in enumerate(sizes)
    ]
    packed = tower.encode(slices)
    for alone, among in zip(slices, packed, strict=True):
        torch.testing.assert_close(among, tower.encode([alone])[0], atol=2e-6, rtol=0)


def test_patches_stand_in_the_order_of_merged_tokens(shape: FamilyUnderTest) -> None:
    frames = random_frames(shape.temporal_patch, 2 * shape.token_px, 3 * shape.token_px)
    plain = {"image_mean": [0, 0, 0], "image_std": [1, 1, 1], "rescale_factor": 1}
    patches = patchify(frames, PatchShape(shape.patch_px, shape.merge, shape.temporal_patch))
    assert torch.equal(patches.float(), pixel_values(frames, plain, shape))


@torch.no_grad()
def test_a_bfloat16_checkpoint_runs_in_bfloat16_as_near_the_truth_as_transformers(
    copy: Path, shape: FamilyUnderTest
) -> None:
    def shorten(weights: dict[str, Tensor]) -> None:
        weights.update({name: tensor.bfloat16() for name, tensor in weights.items()})

    rewrite_weights(copy, shorten)
    video = random_frames(4, 4 * shape.token_px, 4 * shape.token_px)
    pixels, grid = pixel_values(video, processor_of(copy), shape), grid_of(video, shape)
    exact, theirs = (
        levels_of(shape.model.from_pretrained(copy, dtype=dtype).model.visual(pixels, grid_thw=grid))
        for dtype in (torch.float32, torch.bfloat16)
    )
    tower = load_tower(Checkpoint(copy), "auto", CPU)
    ours = encode_all(tower, video, shape)
    assert tower.dtype == ours.dtype == torch.bfloat16
    our_errors, their_errors = ((each.float() - exact).abs().mean((1, 2)) for each in (ours, theirs))
    assert (our_errors < 1.2 * their_errors).all()
    assert load_tower(Checkpoint(copy), "float32", CPU).dtype == torch.float32


# --- what refuses to start --------------------------------------------------------------------------------------


@pytest.fixture
def copy(family_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(family_checkpoint, tmp_path / "copy"))


def rewrite_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def tower_key(weights: dict[str, Tensor], ending: str) -> str:
    return next(name for name in weights if "visual." in name and name.endswith(ending))


def test_weights_are_read_straight_to_the_device_and_into_their_type(
    family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def open_here(path: Path, framework: str, device: str) -> Any:
        asked.append(device)
        return safe_open(path, framework)

    stored = find_weights(Checkpoint(family_checkpoint), ("model.visual.", "visual."))
    monkeypatch.setattr(weights_module, "safe_open", open_here)
    weights = read_weights(stored, torch.bfloat16, torch.device("cuda:3"))
    assert set(asked) == {"cuda:3"}
    # What is folded before it is rounded is not rounded before.
    assert {name for name, tensor in weights.items() if tensor.dtype != torch.bfloat16} == {
        name for name in weights if name.startswith("patch_embed.proj.")
    }


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_quantised_tower_refuses_to_start(copy: Path, dtype: torch.dtype) -> None:
    weights = load_file(copy / "model.safetensors")
    name = next(each for each in sorted(weights) if "visual.blocks.0" in each)
    weights[name] = weights[name].to(dtype)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=f"vision tower is quantised, {re.escape(name)} to [FI]8"):
        load_tower(Checkpoint(copy), "auto", CPU)


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
        known = tower_key(weights, "blocks.0.attn.proj.bias")
        weights[known.replace("proj.bias", "adapter.bias")] = weights[known].clone()

    rewrite_weights(copy, add)
    with pytest.raises(StartupError, match=r"has unknown blocks\.0\.attn\.adapter\.bias$"):
        load_tower(Checkpoint(copy), "auto", CPU)


def test_a_weight_of_another_shape_refuses_to_start(copy: Path) -> None:
    widths: list[int] = []

    def shorten(weights: dict[str, Tensor]) -> None:
        name = tower_key(weights, "blocks.0.norm1.weight")
        widths.extend(weights[name].shape)
        weights[name] = weights[name][:-1].clone()

    rewrite_weights(copy, shorten)
    with pytest.raises(StartupError) as raised:
        load_tower(Checkpoint(copy), "auto", CPU)
    (width,) = widths
    assert f"blocks.0.norm1.weight has the shape [{width - 1}], the config says [{width}]" in str(raised.value)


def test_both_prefixes_that_checkpoints_have_are_read(copy: Path, tower: Tower, shape: FamilyUnderTest) -> None:
    def rename(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if "visual." in name]:
            other = name.removeprefix("model.") if name.startswith("model.") else f"model.{name}"
            weights[other] = weights.pop(name)

    rewrite_weights(copy, rename)
    renamed = load_tower(Checkpoint(copy), "auto", CPU)
    frames = random_frames(shape.temporal_patch, 2 * shape.token_px, 2 * shape.token_px)
    assert torch.equal(renamed.encode([frames])[0], tower.encode([frames])[0])


def test_one_file_for_all_processors_comes_before_a_file_each(copy: Path) -> None:
    """transformers 5 saves the one, published checkpoints have the others."""
    image, video = (processor_of(copy, name) for name in PROCESSOR_FILES)
    mean = {"image_mean": [0.1, 0.2, 0.3]}
    both = {"image_processor": image | mean, "video_processor": video | mean}
    (copy / "processor_config.json").write_text(json.dumps(both))
    assert read_normalisation(Checkpoint(copy)).mean == (0.1, 0.2, 0.3)
    for name in PROCESSOR_FILES:
        (copy / name).unlink()
    assert read_normalisation(Checkpoint(copy)).mean == (0.1, 0.2, 0.3)
    (copy / "processor_config.json").unlink()
    with pytest.raises(StartupError, match=r"neither preprocessor_config\.json nor processor_config\.json"):
        read_normalisation(Checkpoint(copy))


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("config.json", {"model_type": "llama"}, "is a 'llama', supported are"),
        ("config.json", {"vision_config": None}, "has no vision_config"),
        ("video_preprocessor_config.json", {"image_mean": [0.4, 0.5, 0.6]}, "normalised alike"),
        ("video_preprocessor_config.json", {"image_std": [0.5, 0.5, 0]}, "std above 0"),
    ],
)
def test_a_config_that_cannot_be_served_refuses_to_start(
    copy: Path, name: str, change: dict[str, Any], complaint: str
) -> None:
    (copy / name).write_text(json.dumps(processor_of(copy, name) | change))
    with pytest.raises(StartupError, match=complaint):
        load_tower(Checkpoint(copy), "auto", CPU)
