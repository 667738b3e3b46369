"""The vision tower: transformers' embeddings from uint8 frames, alone or packed, and checkpoints that it refuses."""

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
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from services.encoder.families import load_tower
from services.encoder.families.vision_model import PREFIXES
from services.encoder.tower import weights as weights_module
from services.encoder.tower.patches import read_normalisation
from services.encoder.tower.tower import Tower
from services.encoder.tower.weights import find_weights, read_weights
from tests.families import FAMILIES as ALL_FAMILIES
from tests.families import FamilyUnderTest, load_reference

PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json")
CPU = torch.device("cpu")


@pytest.fixture(scope="session", params=sorted(ALL_FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def shape(family: str) -> FamilyUnderTest:
    return ALL_FAMILIES[family]


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
    """Patches of frames as transformers' video processor makes them, computed one by one in float64."""
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
    """The embedding, then every deepstack feature, of transformers' output."""
    return torch.stack([output.pooler_output, *getattr(output, "deepstack_features", [])])


def grid_of(frames: Tensor, shape: FamilyUnderTest) -> Tensor:
    count, height, width, _ = frames.shape
    return torch.tensor([[count // shape.temporal_patch, height // shape.patch_px, width // shape.patch_px]])


def encode_all(tower: Tower, frames: Tensor, shape: FamilyUnderTest) -> Tensor:
    return torch.cat(tower.encode(frames.split(shape.temporal_patch)), dim=1)


@pytest.mark.parametrize(("slices", "rows", "columns"), [(3, 3, 4), (4, 1, 6), (2, 5, 3)])
@torch.no_grad()
def test_all_levels_equal_transformers_tower_on_its_processors_patches(
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
def test_an_image_is_encoded_as_transformers_image_processor_prepares_it(
    tower: Tower, reference: Any, family_checkpoint: Path, shape: FamilyUnderTest
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = random_frames(1, 3 * shape.token_px, 4 * shape.token_px)
    processor = Qwen2VLImageProcessorPil.from_pretrained(family_checkpoint, do_resize=False)
    seen = processor(images=[image[0].numpy()], return_tensors="pt")
    expected = levels_of(reference(seen["pixel_values"], grid_thw=seen["image_grid_thw"]))
    torch.testing.assert_close(tower.encode([image])[0], expected, atol=1e-5, rtol=0)


def test_a_slice_is_encoded_equally_alone_and_packed(tower: Tower, shape: FamilyUnderTest) -> None:
    sizes = [(2, 2), (3, 4), (3, 4), (6, 1), (2, 2), (4, 3)]
    slices = [
        random_frames(shape.temporal_patch, rows * shape.token_px, columns * shape.token_px, seed)
        for seed, (rows, columns) in enumerate(sizes)
    ]
    packed = tower.encode(slices)
    for alone, among in zip(slices, packed, strict=True):
        torch.testing.assert_close(among, tower.encode([alone])[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (12, 8), (2, 2)])  # whole windows, which have 4 by 4 tokens
def test_a_slice_costs_what_torch_counts(tower: Tower, shape: FamilyUnderTest, rows: int, columns: int) -> None:
    frames = torch.zeros(shape.temporal_patch, rows * shape.token_px, columns * shape.token_px, 3, dtype=torch.uint8)
    # As matrix products: fused attention on the CPU is not counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        tower.encode([frames])
    assert counted.get_total_flops() == 2 * tower.cost(rows * columns)


# --- loading ----------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(levels_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(levels_checkpoint, tmp_path / "copy"))


@torch.no_grad()
def test_bfloat16_is_as_accurate_as_transformers(copy: Path) -> None:
    def shorten(weights: dict[str, Tensor]) -> None:
        weights.update({name: tensor.bfloat16() for name, tensor in weights.items()})

    rewrite_weights(copy, shorten)
    shape = ALL_FAMILIES["qwen3_vl"]
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


def rewrite_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def test_weights_are_read_straight_to_the_device_and_converted(
    levels_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def open_here(path: Path, framework: str, device: str) -> Any:
        asked.append(device)
        return safe_open(path, framework)

    stored = find_weights(Checkpoint(levels_checkpoint), PREFIXES)
    monkeypatch.setattr(weights_module, "safe_open", open_here)
    weights = read_weights(stored, torch.bfloat16, torch.device("cuda:3"))
    assert set(asked) == {"cuda:3"}
    # Normalisation is folded into these before they are rounded.
    assert {name for name, tensor in weights.items() if tensor.dtype != torch.bfloat16} == {
        name for name in weights if name.startswith("patch_embed.proj.")
    }


def drop(ending: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda weights: [weights.pop(name) for name in [*weights] if "visual." in name and ending in name] and None


def add_unknown(weights: dict[str, Tensor]) -> None:
    weights["model.visual.blocks.0.attn.adapter.bias"] = torch.zeros(1)


def shorten_one(weights: dict[str, Tensor]) -> None:
    weights["model.visual.blocks.0.norm1.weight"] = weights["model.visual.blocks.0.norm1.weight"][:-1].clone()


def quantise(dtype: torch.dtype) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        weights["model.visual.blocks.0.attn.proj.weight"] = weights["model.visual.blocks.0.attn.proj.weight"].to(dtype)

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (drop("blocks.1.attn.qkv.bias"), r"lacks blocks\.1\.attn\.qkv\.bias$"),
        (drop(""), r"lacks blocks\.0\..* and \d+ more$"),
        (add_unknown, r"has unknown blocks\.0\.attn\.adapter\.bias$"),
        (shorten_one, r"blocks\.0\.norm1\.weight has the shape \[\d+\], the config says \[\d+\]"),
        (quantise(torch.float8_e4m3fn), r"is quantised, model\.visual\.blocks\.0\.attn\.proj\.weight to F8"),
        (quantise(torch.int8), r"is quantised, model\.visual\.blocks\.0\.attn\.proj\.weight to I8"),
    ],
)
def test_wrong_weights_are_refused(copy: Path, change: Callable[[dict[str, Tensor]], None], complaint: str) -> None:
    rewrite_weights(copy, change)
    with pytest.raises(StartupError, match=complaint):
        load_tower(Checkpoint(copy), "auto", CPU)


def test_weights_are_found_under_either_prefix(copy: Path) -> None:
    before = find_weights(Checkpoint(copy), PREFIXES)

    def rename(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.startswith("model.visual.")]:
            weights[name.removeprefix("model.")] = weights.pop(name)

    rewrite_weights(copy, rename)
    assert find_weights(Checkpoint(copy), PREFIXES).keys() == before.keys() != set()
    load_tower(Checkpoint(copy), "auto", CPU)


def test_one_file_for_all_processors_takes_precedence_over_a_file_each(copy: Path) -> None:
    """transformers 5 saves the former, published checkpoints have the latter."""
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
def test_wrong_configs_are_refused(copy: Path, name: str, change: dict[str, Any], complaint: str) -> None:
    (copy / name).write_text(json.dumps(processor_of(copy, name) | change))
    with pytest.raises(StartupError, match=complaint):
        load_tower(Checkpoint(copy), "auto", CPU)
