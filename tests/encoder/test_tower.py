"""The vision tower: transformers' embeddings from uint8 frames, alone or packed, and checkpoints that it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.encoder.startup.build import compile_tower
from gridsieve.services.encoder.tower import attention
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.patches import read_normalisation
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.services.encoder.tower.vision_model import PATCH_EMBED, PREFIXES, align_mlps
from gridsieve.services.encoder.tower.weights import find_weights, read_weights
from tests.encoder.conftest import QWEN_PARAMS
from tests.encoder.test_llava import frames_of as sized_frames
from tests.families import FamilyUnderTest, load_reference, vision_of
from tests.generation.checkpoints import changed
from tests.vision import patches_of

CPU = torch.device("cpu")
Weights = dict[str, Tensor]


@pytest.fixture(scope="session", params=[*QWEN_PARAMS, "cosmos3_edge", pytest.param("glm4v", marks=pytest.mark.deep)])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def tower(family_checkpoint: Path) -> Tower:
    return load_tower(Checkpoint(family_checkpoint), "auto", CPU)


@pytest.fixture(scope="module")
def reference(family: str, family_checkpoint: Path) -> Any:
    return vision_of(load_reference(family, family_checkpoint))


def frames_of(slices: int, rows: int, columns: int, shape: FamilyUnderTest, seed: int = 0) -> Tensor:
    """Random frames of so many slices, rows and columns of tokens."""
    size = (slices * shape.temporal_patch, rows * shape.token_px, columns * shape.token_px, 3)
    # Without 255, with which `tower_recorder` marks unwritten inputs.
    return torch.randint(0, 255, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference_embeds(tower: Any, folder: Path, video: Tensor, shape: FamilyUnderTest) -> Tensor:
    """All levels of transformers' tower, on patches as its video processor makes them, computed in float64."""
    slices, px = len(video) // shape.temporal_patch, shape.patch_px
    # Of GLM's tower transformers tells each slice apart before it calls it.
    grid = torch.tensor([[1, video.shape[1] // px, video.shape[2] // px]] * slices)
    return levels_of(tower(patches_of(video.numpy(), folder, shape), grid_thw=grid))


def levels_of(output: Any) -> Tensor:
    """The embedding, then every deepstack feature, of transformers' output."""
    return torch.stack([output.pooler_output, *getattr(output, "deepstack_features", [])])


def encode_all(tower: Tower, frames: Tensor, shape: FamilyUnderTest) -> Tensor:
    return torch.cat(tower.encode(frames.split(shape.temporal_patch)), dim=1)


def test_all_levels_equal_transformers_tower_on_its_processors_patches(
    tower: Tower, reference: Any, family_checkpoint: Path, shape: FamilyUnderTest
) -> None:
    assert tower.embed_levels == shape.levels
    for slices, rows, columns in ((4, 1, 6), (2, 5, 3)):
        video = frames_of(slices, rows, columns, shape)
        expected = reference_embeds(reference, family_checkpoint, video, shape)
        torch.testing.assert_close(encode_all(tower, video, shape), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_an_image_is_encoded_as_transformers_image_processor_prepares_it(
    tower: Tower, reference: Any, family_checkpoint: Path, shape: FamilyUnderTest
) -> None:
    from transformers.models.cosmos3_edge.image_processing_pil_cosmos3_edge import Cosmos3EdgeImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = frames_of(1, 3, 4, shape)[:1]
    processor_class: Any = Cosmos3EdgeImageProcessorPil if shape.channels_last else Qwen2VLImageProcessorPil
    processor = processor_class.from_pretrained(family_checkpoint, do_resize=False)
    seen = processor(images=[image[0].numpy()], return_tensors="pt")
    expected = levels_of(reference(seen["pixel_values"], grid_thw=seen["image_grid_thw"]))
    torch.testing.assert_close(tower.encode([image])[0], expected, atol=1e-5, rtol=0)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["llava", "internvl", "llava_pixtral"])
def test_towers_of_frames_of_one_size_are_compiled(name: str, checkpoints: Callable[[str], Path]) -> None:
    tower = load_tower(Checkpoint(checkpoints(name)), "float32", CPU)
    frames = sized_frames(name)
    plain = [embeds.clone() for embeds in tower.encode(frames)]
    assert compile_tower(tower)
    torch.compiler.set_stance("fail_on_recompile")
    for ours, theirs in zip(tower.encode(frames), plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tower_that_cannot_be_compiled_runs_all_the_same(
    levels_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (str(tmp_path / "no-compiler"),))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    tower = load_tower(Checkpoint(levels_checkpoint), "float32", CPU)
    torch._dynamo.reset()
    assert not compile_tower(tower)
    assert tower.encode([torch.zeros(2, 64, 64, 3, dtype=torch.uint8)])


def test_a_slice_costs_what_torch_counts(
    family_checkpoint: Path, shape: FamilyUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As matrix products that torch counts: operators of ours and fused attention on the CPU are not counted.
    monkeypatch.setattr("gridsieve.services.compute.packed_linear.packed", lambda linear: linear)
    monkeypatch.setattr(attention, "attend_by_length", lambda *own: attention._attend_by_length(*own[:4]))
    tower = load_tower(Checkpoint(family_checkpoint), "float32", CPU)
    for rows, columns in ((12, 8), (1, 1)):  # whole windows, and part of one
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
            tower.encode([frames := frames_of(1, rows, columns, shape)])
        assert counted.get_total_flops() == 2 * tower.cost(frames.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_accurate_as_in_transformers(
    reference: Any, family_checkpoint: Path, shape: FamilyUnderTest, dtype: torch.dtype
) -> None:
    video = frames_of(2, 4, 4, shape)
    exact = reference_embeds(reference, family_checkpoint, video, shape)
    half = vision_of(shape.model.from_pretrained(family_checkpoint, dtype=dtype))
    tower = load_tower(Checkpoint(family_checkpoint), str(dtype).removeprefix("torch."), CPU)
    found = encode_all(tower, video, shape)
    assert tower.dtype == found.dtype == dtype
    ours, theirs = (
        (each.float() - exact).abs().mean((1, 2))
        for each in (found, reference_embeds(half, family_checkpoint, video, shape))
    )
    assert (ours < 1.2 * theirs).all()


# --- loading ----------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(levels_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(levels_checkpoint, tmp_path / "copy"))


@pytest.mark.parametrize(("multiplies", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_weights_stored_in_bfloat16_run_so_if_the_processor_can_and_are_found_under_either_prefix(
    levels_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multiplies: bool, dtype: torch.dtype
) -> None:
    def store(weights: Weights) -> None:
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name).bfloat16()

    monkeypatch.setattr("gridsieve.services.encoder.tower.weights.multiplies_bfloat16", lambda: multiplies)
    folder = changed(levels_checkpoint, tmp_path / "stored", store)
    assert load_tower(Checkpoint(folder), "auto", CPU).dtype == dtype
    assert load_tower(Checkpoint(folder), "float32", CPU).dtype == torch.float32


def test_the_patch_embedding_keeps_its_dtype_until_normalisation_is_folded_into_it(levels_checkpoint: Path) -> None:
    weights = read_weights(find_weights(Checkpoint(levels_checkpoint), PREFIXES), torch.bfloat16, CPU, PATCH_EMBED)
    unrounded = {name for name, each in weights.items() if each.dtype == torch.float32}
    assert unrounded == {"patch_embed.proj.weight", "patch_embed.proj.bias"}


def test_the_config_of_a_published_qwen3_5_is_read(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """It calls the tower `qwen3_5`, and lists no layers for deepstack; transformers saves another name and no list."""
    saved = checkpoints("qwen3_5")
    vision = json.loads((saved / "config.json").read_text())["vision_config"]
    vision |= {"model_type": "qwen3_5", "deepstack_visual_indexes": []}
    copy = changed(saved, tmp_path / "copy", vision_config=vision)
    frames = torch.arange(2 * 64 * 64 * 3, dtype=torch.uint8).view(2, 64, 64, 3)
    published, expected = (load_tower(Checkpoint(folder), "auto", CPU).encode([frames])[0] for folder in (copy, saved))
    assert torch.equal(published, expected)


BLOCK = "model.visual.blocks.0."


def write(**written: Callable[[Weights], Tensor]) -> Callable[[Weights], object]:
    """Writes weights of the first block, made of the others."""
    return lambda weights: weights.update({f"{BLOCK}{name}.weight": make(weights) for name, make in written.items()})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda weights: weights.pop("model.visual.blocks.1.attn.qkv.bias"), r"lacks blocks\.1\.attn\.qkv\.bias$"),
        (write(adapter=lambda _: torch.zeros(1)), r"has unknown blocks\.0\.adapter\.weight$"),
        (
            write(norm1=lambda _: torch.zeros(5)),
            r"blocks\.0\.norm1\.weight has the shape \[5\], the config says \[32\]",
        ),
        (
            write(norm1=lambda weights: weights[f"{BLOCK}norm1.weight"].to(torch.int8)),
            r"is quantised, model\.visual\.blocks\.0\.norm1\.weight to I8",
        ),
    ],
)
def test_wrong_weights_are_refused(
    levels_checkpoint: Path, tmp_path: Path, change: Callable[[Weights], object], complaint: str
) -> None:
    with pytest.raises(StartupError, match=complaint):
        load_tower(Checkpoint(changed(levels_checkpoint, tmp_path / "wrong", change)), "auto", CPU)


def test_one_file_for_all_processors_takes_precedence_over_a_file_each(copy: Path) -> None:
    """transformers 5 saves the former, published checkpoints have the latter."""
    files = {kind: copy / f"{kind}preprocessor_config.json" for kind in ("", "video_")}
    mean = {"image_mean": [0.1, 0.2, 0.3]}
    image, video = (json.loads(file.read_text()) | mean for file in files.values())
    (copy / "processor_config.json").write_text(json.dumps({"image_processor": image, "video_processor": video}))
    assert read_normalisation(Checkpoint(copy)).mean == (0.1, 0.2, 0.3)
    for file in files.values():
        file.unlink()
    assert read_normalisation(Checkpoint(copy)).mean == (0.1, 0.2, 0.3)
    (copy / "processor_config.json").unlink()
    with pytest.raises(StartupError, match=r"neither preprocessor_config\.json nor processor_config\.json"):
        read_normalisation(Checkpoint(copy))


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("config.json", {"model_type": "llama"}, "has the model_type 'llama'; supported:"),
        ("config.json", {"vision_config": None}, "has no vision_config"),
        ("video_preprocessor_config.json", {"image_mean": [0.4, 0.5, 0.6]}, "normalised alike"),
        ("video_preprocessor_config.json", {"image_std": [0.5, 0.5, 0]}, "image_std must be above 0"),
    ],
)
def test_wrong_configs_are_refused(copy: Path, name: str, change: dict[str, Any], complaint: str) -> None:
    config = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps(config | change))
    with pytest.raises(StartupError, match=complaint):
        load_tower(Checkpoint(copy), "auto", CPU)


@pytest.mark.parametrize("bias", [False, True])
def test_aligned_mlps_compute_what_they_did(bias: bool) -> None:
    """3420, of the published towers of Qwen2.5-VL."""
    mlp = Qwen2_5_VLMLP(Qwen2_5_VLVisionConfig(hidden_size=32, intermediate_size=3420), bias=bias)
    rows = torch.randn(7, 32)
    expected = mlp(rows)
    align_mlps(nn.Sequential(mlp))
    assert mlp.gate_proj.weight.shape == (3456, 32)
    assert mlp.down_proj.weight.shape == (32, 3456)
    torch.testing.assert_close(mlp(rows), expected)
