"""CLIP, SigLIP and Pixtral towers with every selection of features, against transformers' `get_image_features`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    InternVLForConditionalGeneration,
    LlavaForConditionalGeneration,
    LlavaNextVideoForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
    Mistral3ForConditionalGeneration,
    VideoLlama3ForConditionalGeneration,
)

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import PeerContract, StartupError
from gridsieve.common.contract.plan import FileFacts, FrameShape, Grid, MediaPlan, Modality, Run
from gridsieve.common.contract.tensors import DType, TensorBuffer
from gridsieve.families.llava.anyres import AnyRes
from gridsieve.services.encoder.items.batcher import Batcher
from gridsieve.services.encoder.items.cache import EmbedsCache
from gridsieve.services.encoder.items.cache_entry import CacheEntry
from gridsieve.services.encoder.items.decoded_slices import FrameSlice
from gridsieve.services.encoder.items.pending_entry import PendingEntry
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.parallel.tower import packing_of
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.services.encoder.upstream.plan_check import PlanCheck
from tests.encoder.tower_recorder import assert_replays
from tests.families import FAMILIES, INTERNVL_PX, LLAVA, LLAVA_PROCESSORS, NEXT_VIDEO_PX, ONEVISION_PX
from tests.generation.checkpoints import changed
from tests.vision import patches_of

CPU = torch.device("cpu")
# Outputs of a tower of three layers: 0 is its embedding.
LAYERS: list[Any] = [-2, 3, [-1, 2, 0]]
PIXTRAL = ("llava_pixtral", "mistral3")
SIDES_PX = {
    **{kind: settings["vision_config"]["image_size"] for kind, settings in LLAVA.items()},
    "internvl": INTERNVL_PX,
    "llava_next_video": NEXT_VIDEO_PX,
}
TIMEOUT_S = 20
SELECTIONS = [
    *(("llava", layers) for layers in LAYERS),
    *((kind, LAYERS[0 if kind == "mistral3" else 2]) for kind in LLAVA if kind != "llava"),
]


def frames_of(kind: str) -> list[Tensor]:
    """Two frames of the sizes that the tower takes: all of one size, but of any in patches of Pixtral's."""
    sizes = [(32, 48), (96, 16), (32, 48)] if kind in PIXTRAL else [(SIDES_PX[kind],) * 2] * 3
    random = torch.Generator().manual_seed(0)
    return [torch.randint(0, 255, (1, *size, 3), dtype=torch.uint8, generator=random) for size in sizes]


def normalised(frames: Tensor) -> Tensor:
    """Frames of LLaVA-OneVision as its processor makes them, (F, 3, H, W)."""
    mean, std = torch.tensor([0.48, 0.46, 0.41]), torch.tensor([0.27, 0.26, 0.28])
    return ((frames / 255 - mean) / std).permute(0, 3, 1, 2)


def plan_of_image(frames: Tensor, height: int, width: int, tokens: int) -> MediaPlan:
    return MediaPlan(
        modality=Modality.IMAGE,
        grid=Grid(1, 1, tokens),
        runs=(Run(0, tokens),),
        frames=FrameShape(len(frames), (frames.shape[1], frames.shape[2])),
        seconds_per_grid=None,
        timestamps_s=(),
        content_hash=bytes(32),
        file=FileFacts(source_px=(height, width)),
    )


def plan_of_video(frames: Tensor, grid: Grid) -> MediaPlan:
    return replace(
        plan_of_image(frames, 0, 0, grid.tokens), modality=Modality.VIDEO, grid=grid, seconds_per_grid=Fraction(1)
    )


@torch.no_grad()
def reference(folder: Path, kind: str, frames: Sequence[Tensor]) -> list[Tensor]:
    """Each frame's features by transformers, of normalised float32 pixels."""
    model_class = Mistral3ForConditionalGeneration if kind == "mistral3" else LlavaForConditionalGeneration
    model = model_class.from_pretrained(folder, attn_implementation="eager").model.eval()
    settings = LLAVA_PROCESSORS[kind]
    mean, std = (torch.tensor(settings[name]) for name in ("image_mean", "image_std"))
    found = []
    for each in frames:
        pixels = ((each / 255 - mean) / std).permute(0, 3, 1, 2)
        sizes = {"image_sizes": torch.tensor([pixels.shape[2:]])} if kind in PIXTRAL else {}
        found += model.get_image_features(pixels, return_dict=True, **sizes).pooler_output
    return found


def selecting(folder: Path, to: Path, kind: str, layers: Any, strategy: str) -> Path:
    """A copy whose projector takes the outputs of these layers."""
    count = len(layers) if isinstance(layers, list) else 1

    def widen(weights: dict[str, Tensor]) -> None:
        name = "multi_modal_projector.linear_1.weight"
        random = torch.Generator().manual_seed(1)
        hidden = LLAVA[kind]["vision_config"]["hidden_size"]
        weights[name] = 0.1 * torch.randn(len(weights[name]), count * hidden, generator=random)

    fields = {"vision_feature_layer": layers, "vision_feature_select_strategy": strategy}
    if kind == "mistral3":
        del fields["vision_feature_select_strategy"]
    return changed(folder, to, widen, **fields)


@pytest.mark.parametrize(("kind", "layers"), SELECTIONS, ids=str)
def test_each_selection_of_layers_equals_transformers(
    checkpoints: Callable[[str], Path], tmp_path: Path, kind: str, layers: Any
) -> None:
    strategies = ["full"] if kind in PIXTRAL else ["full", "default"]  # Pixtral's refuses the other
    for strategy in strategies:
        folder = selecting(checkpoints(kind), tmp_path / strategy, kind, layers, strategy)
        frames = frames_of(kind)
        found = load_tower(Checkpoint(folder), "float32", CPU).encode(frames)
        for ours, theirs in zip(found, reference(folder, kind, frames), strict=True):
            torch.testing.assert_close(ours[0], theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", SIDES_PX)
def test_graphs_replay_what_the_tower_computes(checkpoints: Callable[[str], Path], kind: str) -> None:
    assert_replays(checkpoints(kind), frames_of(kind))


# Of each family with tiles: side of a frame in pixels and tokens, of a pooled one, and how many tiles of tokens remain.
TILED = {
    "llava_onevision": (LlavaOnevisionForConditionalGeneration, ONEVISION_PX, 3, 2, 2),
    "llava_next_video": (LlavaNextVideoForConditionalGeneration, NEXT_VIDEO_PX, 4, 2, None),
}


@torch.no_grad()
@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize(("height", "width"), [(90, 300), (380, 400), (200, 100)])
def test_tiles_of_an_image_become_one_picture_as_in_transformers(
    checkpoints: Callable[[str], Path], name: str, height: int, width: int
) -> None:
    folder, (model_class, side_px, side, _, max_tiles) = checkpoints(name), TILED[name]
    tower = load_tower(Checkpoint(folder), "float32", CPU)
    tiles = AnyRes.of(Checkpoint(folder).config, max_tiles).tiles(height, width)
    count = 1 + tiles.rows * tiles.columns
    random = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 255, (count, side_px, side_px, 3), dtype=torch.uint8, generator=random)
    plan = plan_of_image(frames, height, width, side**2 + math.prod(tiles.shrunk))
    (ours,) = encoded(tower, plan, frames)
    model = model_class.from_pretrained(folder, attn_implementation="eager").model.eval()
    sizes = torch.tensor([(height, width)])
    (theirs,) = model.get_image_features(normalised(frames)[None], sizes, return_dict=True).pooler_output
    newline = (theirs == model.image_newline).all(dim=1)
    assert newline.sum() == tiles.shrunk[0]
    torch.testing.assert_close(ours, theirs[~newline], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", TILED)
async def test_a_cached_picture_of_tiles_is_put_together_once(checkpoints: Callable[[str], Path], name: str) -> None:
    (_, side_px, side, _, max_tiles), folder = TILED[name], checkpoints(name)
    tower, forwards = load_tower(Checkpoint(folder), "float32", CPU), list[int]()
    tiles = AnyRes.of(Checkpoint(folder).config, max_tiles).tiles(380, 400)
    count, tokens = 1 + tiles.rows * tiles.columns, side**2 + math.prod(tiles.shrunk)
    frames = torch.randint(0, 255, (count, side_px, side_px, 3), dtype=torch.uint8)
    plan = plan_of_image(frames, 380, 400, tokens)

    def encode(slices: Sequence[Tensor], adapter: bytes) -> list[Tensor]:
        forwards.append(len(slices))
        return tower.encode(slices, adapter)

    batcher = Batcher(encode, packing_of(tower, 2 * side**2))
    batcher.start()
    cache = EmbedsCache(tower, batcher, ByteSemaphore(2**20), 2**20)
    pending = cache.join(plan)
    assert isinstance(pending, PendingEntry)
    await pending.reserve()
    assert cache.encoding_bytes.held_bytes == 4 * tower.embed_dim * (tokens + count * side**2)
    for index, frame in enumerate(frames.split(1)):
        buffer = TensorBuffer(DType.UINT8, frame.shape)
        buffer.copy_piece(DType.UINT8, frame.shape, 0, frame.numpy().tobytes())
        await pending.add_slice(FrameSlice(index, buffer, repaired_frames=0, decoded_ns=0, resized_ns=0))
    while pending.entry is None:
        await asyncio.wait_for(pending.wait_for_change(), TIMEOUT_S)
    cache.leave(pending)
    assert cache.encoding_bytes.held_bytes == 0
    assert cache.held_bytes == tokens * (4 * tower.embed_dim + 20)  # five scores a token at most
    again = cache.join(replace(plan, runs=(Run(9, tokens),)))
    assert isinstance(again, CacheEntry)
    torch.testing.assert_close(again.embeds, encoded(tower, plan, frames), atol=2e-6, rtol=0)
    assert sum(forwards) == count
    batcher.close()


@torch.no_grad()
@pytest.mark.parametrize("name", TILED)
def test_frames_of_a_video_are_pooled_as_in_transformers(checkpoints: Callable[[str], Path], name: str) -> None:
    folder, (model_class, side_px, _, pooled, _) = checkpoints(name), TILED[name]
    tower = load_tower(Checkpoint(folder), "float32", CPU)
    random = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 255, (3, side_px, side_px, 3), dtype=torch.uint8, generator=random)
    (ours,) = encoded(tower, plan_of_video(frames, Grid(3, pooled, pooled)), frames)
    model = model_class.from_pretrained(folder, attn_implementation="eager").model.eval()
    (theirs,) = model.get_video_features(normalised(frames)[None], return_dict=True).pooler_output
    torch.testing.assert_close(ours, theirs[: len(ours)], atol=1e-5, rtol=0)
    behind = [model.image_newline] if name == "llava_onevision" else []
    assert all(map(torch.equal, theirs[len(ours) :], behind))
    assert len(theirs) - len(ours) == len(behind)


@torch.no_grad()
@pytest.mark.parametrize(("name", "layer"), [("internvl", -2), ("internvl_qwen3", -1)])
def test_internvl_shuffles_patches_to_tokens_as_in_transformers(
    checkpoints: Callable[[str], Path], tmp_path: Path, name: str, layer: int
) -> None:
    """Of 3.5 the published video processor has another size and mean, which are not used."""
    folder = changed(checkpoints(name), tmp_path / "other", vision_feature_layer=layer)
    tower = load_tower(Checkpoint(folder), "float32", CPU)
    random = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 255, (5, INTERNVL_PX, INTERNVL_PX, 3), dtype=torch.uint8, generator=random)
    model = InternVLForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").model.eval()
    theirs = model.get_image_features(normalised(frames), return_dict=True).pooler_output.flatten(0, 1)
    for plan in (plan_of_image(frames, 0, 0, 5 * 4), plan_of_video(frames, Grid(5, 2, 2))):
        torch.testing.assert_close(encoded(tower, plan, frames)[0], theirs, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="5 frames have 4 tokens each"):
        tower.arrangement(plan_of_image(frames, 0, 0, 5 * 4 + 1))


@torch.no_grad()
def test_video_llama_3_makes_a_token_of_each_patch_of_an_image_and_of_four_of_a_video(
    checkpoints: Callable[[str], Path],
) -> None:
    folder, shape = checkpoints("video_llama_3"), FAMILIES["video_llama_3"]
    tower = load_tower(Checkpoint(folder), "float32", CPU)
    random = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 255, (3, 56, 84, 3), dtype=torch.uint8, generator=random)
    model = VideoLlama3ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").model.eval()
    video = replace(plan_of_video(frames, Grid(3, 2, 3)), runs=(Run(0, 18),))
    picture = replace(plan_of_image(frames[:1], 56, 84, 24), grid=Grid(1, 4, 6))
    for plan, shown, merge in ((video, frames, 2), (picture, frames[:1], 1)):
        patches = patches_of(shown.numpy(), folder, replace(shape, merge=merge))
        sides, merges = torch.tensor([[len(shown), 4, 6]]), torch.tensor([merge])
        (theirs,) = model.get_image_features(patches, sides, merges, return_dict=True).pooler_output
        torch.testing.assert_close(encoded(tower, plan, shown)[0], theirs, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"sides of .* are no multiples of 28"):
        tower.arrangement(replace(video, frames=FrameShape(3, (42, 84))))


def encoded(tower: Tower, plan: MediaPlan, frames: Tensor) -> Tensor:
    """The embeddings of an item, (1, tokens, D), of the slices that the tower encodes."""
    arrangement = tower.arrangement(plan)
    slices = tower.encode(list(frames.split(1)))
    assert len(slices) == plan.slices
    stored = torch.cat([arrangement.of_slice(rows) if arrangement.of_slice else rows for rows in slices], dim=1)
    assert stored.shape[1] == plan.slices * arrangement.slice_tokens
    return arrangement.of_item(stored) if arrangement.of_item else stored


@pytest.mark.parametrize(
    "plan",
    [
        plan_of_image(torch.empty(2, ONEVISION_PX, ONEVISION_PX, 3), 30, 31, 9 + 8),
        plan_of_image(torch.empty(3, ONEVISION_PX, ONEVISION_PX, 3), 30, 31, 18),
        plan_of_image(torch.empty(1, 56, 56, 3), 30, 31, 9),
        plan_of_video(torch.empty(3, ONEVISION_PX, ONEVISION_PX, 3), Grid(3, 3, 3)),
        plan_of_video(torch.empty(3, ONEVISION_PX, ONEVISION_PX, 3), Grid(2, 2, 2)),
    ],
)
def test_a_plan_with_other_frames_or_another_grid_breaks_the_contract(
    checkpoints: Callable[[str], Path], plan: MediaPlan
) -> None:
    tower = load_tower(Checkpoint(checkpoints("llava_onevision")), "float32", CPU)
    check = PlanCheck(tower.patches, 0, bytes(32), tower.arrange)
    with pytest.raises(PeerContract, match="do not make its grid"):
        check.check_frames(plan)


def test_frames_larger_than_the_table_of_positions_break_the_contract(checkpoints: Callable[[str], Path]) -> None:
    """On a card, an index outside a table ends the process."""
    tower = load_tower(Checkpoint(checkpoints("llava")), "float32", CPU)
    plan = plan_of_video(torch.empty(3, 70, 56, 3), Grid(3, 5, 4))
    with pytest.raises(PeerContract, match="frames of 70×56 pixels do not make the grid"):
        PlanCheck(tower.patches, 0, bytes(32), tower.arrange).check_frames(plan)


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("llava", {"vision_feature_layer": [-5, 1]}, "vision_feature_layer .* lacks"),
        ("llava", {"vision_config": {"model_type": "dinov2"}}, "'dinov2' is not supported, only clip_vision_model"),
        ("llava", {"vision_feature_select_strategy": "class"}, "'vision_feature_select_strategy' .* got class"),
        ("llava", {"vision_config": {"tie_last_hidden_states": True}}, "vision_config.tie_last_hidden_states"),
        ("mistral3", {"vision_feature_layer": [-1, 1]}, r"vision_feature_layer \[-1, 1\] is not supported"),
        ("internvl", {"text_config": {"model_type": "internlm2"}}, "text_config.model_type must be .* got 'internlm2'"),
        ("internvl", {"vision_feature_layer": [-1]}, r"vision_feature_layer \[-1\] is not supported"),
        ("internvl", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy 'full' is not"),
        ("internvl", {"vision_config": {"image_size": [56, 70]}}, r"vision_config.image_size \[56, 70\] is not"),
        ("internvl", {"vision_config": {"patch_size": [14, 7]}}, r"vision_config.patch_size \[14, 7\] is not"),
    ],
)
def test_a_tower_that_cannot_be_made_is_refused(
    checkpoints: Callable[[str], Path], tmp_path: Path, kind: str, fields: dict[str, Any], why: str
) -> None:
    folder = changed(checkpoints(kind), tmp_path / "other", **fields)
    with pytest.raises(StartupError, match=why):
        load_tower(Checkpoint(folder), "float32", CPU)


def test_weights_that_are_missing_are_named(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    name = "vision_tower.encoder.layers.0.mlp.fc1.weight"
    folder = changed(checkpoints("llava"), tmp_path / "other", lambda weights: weights.pop(name))
    with pytest.raises(StartupError, match=f"lacks {name}"):
        load_tower(Checkpoint(folder), "float32", CPU)
