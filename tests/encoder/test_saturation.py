"""Float16 towers saturate instead of overflowing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Grid
from gridsieve.services.encoder.startup.build import compile_tower
from gridsieve.services.encoder.tower import vision_model
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.sound import Sound
from gridsieve.services.encoder.tower.tower import Slice, Tower
from tests.encoder.test_kept_frames import kept_frames
from tests.encoder.test_llava import encoded as arranged
from tests.encoder.test_llava import plan_of_video
from tests.encoder.test_tower import encode_all, frames_of, reference_embeds
from tests.families import FAMILIES, FamilyUnderTest, load_reference, minicpm
from tests.generation.checkpoints import changed
from tests.vision import kept_embeds, patches_of

MOST = 65504.0
CPU = torch.device("cpu")
Changes = dict[str, Callable[[Tensor], Tensor]]
# Those whose layers, embeddings or projectors are not those of another one. The first three are MiniCPM-V's.
TOWERS = [
    "minicpmv_2_5",
    "minicpmv_4_5",
    "minicpmv4_6",
    "cosmos3_edge",
    "internvl",
    "llava",
    "llava_next_video",
    "llava_siglip",
    "mistral3",
    "nemotron_h_omni",
    "ovis2",
    "qwen2_5_omni",
    "qwen3_omni_moe",
    "smolvlm",
    "video_llama_3",
]
# Those whose videos are pooled behind the tower and then projected, and the grid of one frame.
PROJECTED = {"llava_next_video": Grid(1, 2, 2), "video_llama_3": Grid(1, 2, 3)}


class Saturating(TorchDispatchMode):
    """Clamps the sums of two tensors, and the products of matrices, to float16's range."""

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        found, aten = function(*given, **(named or {})), torch.ops.aten
        products = (aten.addmm.default, aten.mm.default, aten.convolution.default)
        is_sum = function is aten.add.Tensor and isinstance(given[1], Tensor) and found.is_floating_point()
        return found.clamp(-MOST, MOST) if is_sum or function in products else found


def with_weights(folder: Path, to: Path, changes: Changes, part: str = "visual.") -> Path:
    """A copy with changes to the tensors of a part of the model, by the ends of their names."""

    def change(weights: dict[str, Tensor]) -> None:
        for ending, make in changes.items():
            (name,) = (each for each in weights if part in each and each.endswith(ending))
            weights[name] = make(weights[name])

    return changed(folder, to / "copy", change)


def add(*thirds: float) -> Callable[[Tensor], Tensor]:
    """Adds a value to each third of the channels."""
    return lambda bias: bias + torch.tensor(thirds).repeat_interleave(-(-bias.shape[-1] // 3))[: bias.shape[-1]]


def encoded(folder: Path, shape: FamilyUnderTest) -> Tensor:
    return encode_all(load_tower(Checkpoint(folder), "float16", CPU), frames_of(2, 4, 3, shape), shape)


def overflows_in_transformers(folder: Path, shape: FamilyUnderTest) -> bool:
    half = shape.model.from_pretrained(folder, dtype=torch.float16).model.visual
    return not bool(reference_embeds(half, folder, frames_of(2, 4, 3, shape), shape).isfinite().all())


def check_saturates(folder: Path, family: str, shape: FamilyUnderTest) -> None:
    """Compares with transformers' tower in float32 that saturates: whole slices, and one of which some tokens were
    chosen."""
    reference = load_reference(family, folder).model.visual
    with Saturating():
        expected = reference_embeds(reference, folder, frames_of(2, 4, 3, shape), shape)
    torch.testing.assert_close(encoded(folder, shape).float(), expected, atol=2e-2, rtol=1e-2)
    frames, kept = frames_of(1, 4, 3, shape), [1, 2, 6, 11]
    with Saturating():
        expected = kept_embeds(reference, patches_of(frames.numpy(), folder, shape), (4, 3), kept, shape)
    tower = load_tower(Checkpoint(folder), "float16", CPU)
    (found,) = tower.encode([kept_frames(frames, kept, shape.token_px)])
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=1e-2)


def test_residual_sums_saturate(family_checkpoint: Path, tmp_path: Path, family: str, shape: FamilyUnderTest) -> None:
    """A third of the channels exceeds the range after a block and within the next, and returns into it."""
    sign = 1 if shape.slices_stand_alone else -1
    last = "linear_fc2" if shape.slices_stand_alone else "down_proj"
    changes = {
        "blocks.0.attn.proj.bias": add(sign * 60000, sign * 20000, 0),
        f"blocks.0.mlp.{last}.bias": add(sign * 60000, 0, 0),
        "blocks.1.attn.proj.bias": add(sign * 60000, 0, 0),
        f"blocks.1.mlp.{last}.bias": add(sign * -40000, 0, 0),
    }
    copy = with_weights(family_checkpoint, tmp_path, changes)
    assert overflows_in_transformers(copy, shape)
    check_saturates(copy, family, shape)


@pytest.mark.parametrize(
    "changes",
    [
        {  # sums with position embeddings
            "visual.patch_embed.proj.bias": add(40000, 20000, 0),
            "visual.pos_embed.weight": add(40000, 0, 0),
            "blocks.0.mlp.linear_fc2.bias": add(-40000, 0, 0),
        },
        {  # patch embeddings, before position embeddings bring some values back into the range
            "visual.patch_embed.proj.weight": lambda weight: weight * (100000 / weight[0].norm()),
            "visual.pos_embed.weight": add(-40000, 40000, 0),
        },
    ],
)
def test_the_input_of_the_first_block_saturates(levels_checkpoint: Path, tmp_path: Path, changes: Changes) -> None:
    check_saturates(with_weights(levels_checkpoint, tmp_path, changes), "qwen3_vl", FAMILIES["qwen3_vl"])


@pytest.mark.parametrize(
    ("ending", "change"),
    [
        ("mlp.{first}.weight", lambda weight: weight * 1e5),
        ("attn.qkv.weight", lambda weight: weight * 1e5),
        ("attn.qkv.bias", lambda bias: bias + 60000),  # rotating pairs of such values makes one of them larger
        ("norm1.weight", lambda weight: weight * 1e5),
        ("attn.proj.weight", lambda weight: weight * 1e9),  # beyond float16 itself
    ],
)
def test_overflows_within_a_layer_stay_finite(
    family_checkpoint: Path,
    tmp_path: Path,
    shape: FamilyUnderTest,
    ending: str,
    change: Callable[[Tensor], Tensor],
) -> None:
    first = "linear_fc1" if shape.slices_stand_alone else "gate_proj"
    copy = with_weights(family_checkpoint, tmp_path, {f"blocks.1.{ending.format(first=first)}": change})
    assert overflows_in_transformers(copy, shape)
    assert encoded(copy, shape).isfinite().all()


def test_attention_values_use_the_whole_range_of_float16(
    family_checkpoint: Path, tmp_path: Path, family: str, shape: FamilyUnderTest
) -> None:
    """The bias of a third of the channels shows that values near its end are kept."""
    changes = {"blocks.0.attn.proj.bias": add(20000, 0, 0), "blocks.0.attn.qkv.bias": add(0, 0, 60000)}
    check_saturates(with_weights(family_checkpoint, tmp_path, changes), family, shape)


# --- every tower ----------------------------------------------------------------------------------------------------


def slices_of(tower: Tower, name: str) -> list[Slice]:
    """Two frames of different sizes, if the tower takes any, and some of whose tokens are chosen, if it takes some."""
    shape, random = FAMILIES[name], torch.Generator().manual_seed(0)
    sizes = [[side * shape.token_px for side in shape.sized(*each)] for each in ((2, 3), (4, 2))]
    frames = [
        torch.randint(0, 255, (shape.temporal_patch, *size, 3), dtype=torch.uint8, generator=random) for size in sizes
    ]
    chosen = [kept_frames(frames[0], [1, 3], shape.token_px)] if "pixel_change" in tower.pruning_methods else []
    return [*frames, *chosen]


def sounds_of(tower: Tower) -> list[Slice]:
    random = torch.Generator().manual_seed(0)
    mels = tower.sound.mels if tower.sound else 0
    return [Sound(torch.randn(mels, frames, generator=random)) for frames in (120, 17) if mels]


@torch.inference_mode()
def embeddings(tower: Tower, name: str) -> Tensor:
    """Of frames and sounds, (tokens, D); of one frame as a video where a projector follows the tower."""
    slices = slices_of(tower, name)
    if name in PROJECTED:
        frames = slices[0]
        assert isinstance(frames, Tensor)
        return arranged(tower, plan_of_video(frames, PROJECTED[name]), frames)[0].float()
    found = tower.encode(slices)
    if sounds := sounds_of(tower):
        found += tower.encode(sounds)
    return torch.cat([each.flatten(0, 1) for each in found]).float()


@pytest.mark.parametrize("name", TOWERS)
def test_float16_is_as_near_to_float32_as_it_is_precise(checkpoints: Callable[[str], Path], name: str) -> None:
    exact, found = (
        embeddings(load_tower(Checkpoint(checkpoints(name)), dtype, CPU), name) for dtype in ("float32", "float16")
    )
    assert float((found - exact).norm() / exact.norm()) < 2e-3  # in bfloat16 more than twice as much


def with_large_weights(folder: Path, to: Path, seed: int) -> Path:
    """A copy of which every third tensor is up to 10⁷ times as large."""
    random = torch.Generator().manual_seed(seed)

    def scale(weights: dict[str, Tensor]) -> None:
        for each in weights.values():
            if torch.rand((), generator=random) < 1 / 3:
                each *= 10 ** torch.randint(1, 8, (), generator=random)

    return changed(folder, to / str(seed), scale)


@pytest.mark.parametrize("name", TOWERS)
def test_weights_of_any_size_give_finite_embeddings(
    checkpoints: Callable[[str], Path], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = (0, 1, 2, 3, 101, 104)  # the last two: weights of InternVL that are added up are ±infinity in float16
    folders = [with_large_weights(checkpoints(name), tmp_path, seed) for seed in seeds]
    found = [embeddings(load_tower(Checkpoint(each), "float16", CPU), name) for each in folders]
    assert all(each.isfinite().all() for each in found)
    monkeypatch.setattr(vision_model, "saturate", lambda model: None)
    without = [embeddings(load_tower(Checkpoint(each), "float16", CPU), name) for each in folders]
    assert not all(each.isfinite().all() for each in without)


@pytest.mark.parametrize("version", minicpm.QUERIES)
def test_minicpmv_saturates_in_its_layers_and_in_its_resampler(tmp_path: Path, version: str) -> None:
    """As its oracle in float32 that saturates: residual sums exceed the range and return into it, and all values of the
    resampler are near its end."""
    oracle = minicpm.write(tmp_path / "written", 1, version)
    changes = {
        "vpm.encoder.layers.0.self_attn.out_proj.bias": add(60000, 20000, 0),
        "vpm.encoder.layers.0.mlp.fc2.bias": add(60000, 0, 0),
        "vpm.encoder.layers.1.self_attn.out_proj.bias": add(60000, 0, 0),
        "vpm.encoder.layers.1.mlp.fc2.bias": add(-40000, 0, 0),
        "resampler.attn.in_proj_bias": add(0, 0, 60000),
    }
    folder = with_weights(tmp_path / "written", tmp_path, changes, part="")
    oracle.load_state_dict(load_file(folder / "model.safetensors"))
    random = torch.Generator().manual_seed(0)
    pictures = [
        torch.randint(0, 255, (1, *size, 3), dtype=torch.uint8, generator=random) for size in ((56, 70), (28, 112))
    ]
    found = load_tower(Checkpoint(folder), "float16", CPU).encode(pictures)
    for ours, pixels in zip(found, pictures, strict=True):
        with torch.no_grad(), Saturating():
            theirs = oracle.picture(pixels[0])
        torch.testing.assert_close(ours[0].float(), theirs, atol=2e-2, rtol=1e-2)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own code
@pytest.mark.parametrize("name", ["minicpmv_2_5", "mistral3"])
def test_compiled_layers_saturate_and_compute_what_the_others_do(
    checkpoints: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    for folder in (checkpoints(name), with_large_weights(checkpoints(name), tmp_path, 0)):
        tower = load_tower(Checkpoint(folder), "float16", CPU)
        plain = embeddings(tower, name)
        assert compile_tower(tower)
        torch.compiler.set_stance("fail_on_recompile")
        found = embeddings(tower, name)
        assert found.isfinite().all()
        if folder == checkpoints(name):
            torch.testing.assert_close(found, plain, atol=2e-2, rtol=1e-2)
