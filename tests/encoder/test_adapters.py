"""Adapters of the tower: embeddings are those of PEFT's model, and no request gets those of another's adapter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gridsieve.common.adapter_folder import AdapterFolder
from gridsieve.common.contract.errors import InvalidRequest, StartupError
from gridsieve.common.contract.plan import Grid
from gridsieve.services.encoder.startup.adapters import with_adapters
from gridsieve.services.encoder.startup.build import compile_tower
from gridsieve.services.encoder.tower.graphs import with_graphs
from gridsieve.services.encoder.tower.tower import ModelForward, Tower
from gridsieve.services.encoder.tower.vision_model import align_mlps
from gridsieve.v1.encoder_pb2 import EncodeRequest
from tests.adapters import write_adapter
from tests.encoder.encoder_peers import GRID, Media, frames_of, video
from tests.encoder.encoder_service import SELECT_ALL, embeds_in, first_request, metric, running, tower_of
from tests.encoder.test_llava import frames_of as frames_of_projected
from tests.encoder.test_llava import normalised
from tests.encoder.test_tower import reference_embeds
from tests.encoder.tower_recorder import Recorder, load_packed
from tests.families import FAMILIES, LLAVA_PROCESSORS, load_reference, vision_of

CONFIG: Mapping[str, Any] = {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": "all-linear"}
IN_TOWER = r"(?!.*patch_embed).*visual.*\.(qkv|proj|gate_proj|up_proj|down_proj|linear_fc\d|mlp\.\d)"
DEEP = [pytest.param(name, marks=pytest.mark.deep) for name in ("qwen2_vl", "qwen3_5", "glm4v")]
MINE = "mine"


def adapted(tower: Tower, folder: Path) -> tuple[Tower, bytes]:
    """The tower with an adapter, and its digest."""
    tower = with_adapters(tower, [AdapterFolder(MINE, folder)])
    return tower, tower.adapters[MINE]


def assert_close(ours: Tensor, theirs: Tensor, plain: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    assert float((theirs - plain).abs().max()) > 0.01, "the adapter changes nothing, so the test would prove nothing"


# --- what adapters compute ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", *DEEP])
def test_every_linear_layer_and_no_other_adds_what_peft_adds(
    checkpoints: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """One over the whole model, with a rank of their own for some layers."""
    folder, shape = checkpoints(name), FAMILIES[name]
    reference, ranks = load_reference(name, folder), {r"visual\.merger.*": 5, "blocks.1.attn.qkv": 2}
    with_peft = write_adapter(reference, tmp_path, rank_pattern=ranks, **CONFIG)
    tower, digest = adapted(tower_of(folder), tmp_path)
    patches = tower.patches
    slices = [torch.from_numpy(frames_of(number, video(number, Grid(1, *side)), patches)) for number, side in SIDES]
    for frames, ours, plain in zip(slices, tower.encode(slices, digest), tower.encode(slices), strict=True):
        assert_close(ours, reference_embeds(vision_of(with_peft), folder, frames, shape), plain)
        torch.testing.assert_close(plain, reference_embeds(vision_of(reference), folder, frames, shape), **EXACT)


SIDES = ((1, (2, 3)), (2, (4, 2)), (3, (2, 3)))
EXACT: Mapping[str, Any] = {"atol": 1e-5, "rtol": 0}


@torch.no_grad()
@pytest.mark.parametrize(
    "kind", ["llava", pytest.param("llava_siglip", marks=pytest.mark.deep), "internvl", "mistral3"]
)
def test_towers_with_a_projector_add_what_peft_adds_as_far_as_their_layers_are_read(
    checkpoints: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    folder, frames = checkpoints(kind), frames_of_projected(kind)
    reference = load_reference(kind, folder)
    with_peft = write_adapter(reference, tmp_path, **CONFIG)
    tower, digest = adapted(tower_of(folder), tmp_path)
    for each, ours, plain in zip(frames, tower.encode(frames, digest), tower.encode(frames), strict=True):
        assert_close(ours[0], features_of(with_peft, kind, each), plain[0])


def features_of(model: Any, kind: str, frames: Tensor) -> Tensor:
    pixels = normalised(frames)
    if settings := LLAVA_PROCESSORS.get(kind):
        mean, std = (torch.tensor(settings[name]) for name in ("image_mean", "image_std"))
        pixels = ((frames / 255 - mean) / std).permute(0, 3, 1, 2)
    sizes = {"image_sizes": torch.tensor([pixels.shape[2:]])} if kind == "mistral3" else {}
    features: Tensor = model.model.get_image_features(pixels, return_dict=True, **sizes).pooler_output[0]
    return features


@torch.no_grad()
def test_layers_are_found_by_the_names_of_published_checkpoints(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """Theirs have CLIP's one level deeper, and no `model.` before them."""
    folder, frames = checkpoints("llava"), frames_of_projected("llava")
    whole, published = load_reference("llava", folder), nn.Module()
    published.vision_tower, published.multi_modal_projector = nn.Module(), whole.model.multi_modal_projector
    published.vision_tower.vision_model = whole.model.vision_tower
    targets = r"vision_tower\.vision_model\..*\.(q_proj|fc1)|multi_modal_projector.*1"
    with_peft, whole = write_adapter(published, tmp_path, target_modules=targets), copy.deepcopy(whole)
    whole.model.vision_tower = with_peft.vision_tower.vision_model
    whole.model.multi_modal_projector = with_peft.multi_modal_projector
    tower, digest = adapted(tower_of(folder), tmp_path)
    assert_close(tower.encode(frames, digest)[0][0], features_of(whole, "llava", frames[0]), tower.encode(frames)[0][0])


def test_layers_that_were_widened_for_cuda_take_an_adapter(
    checkpoints: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints("qwen2_5_vl")
    write_adapter(load_reference("qwen2_5_vl", folder), tmp_path, **CONFIG)
    tower, digest = adapted(tower_of(folder), tmp_path)
    monkeypatch.setattr("gridsieve.services.encoder.tower.vision_model.pack_linears", align_mlps)
    wide, _ = adapted(tower_of(folder), tmp_path)
    frames = torch.from_numpy(frames_of(0, video(0), tower.patches)[:2])
    torch.testing.assert_close(wide.encode([frames], digest), tower.encode([frames], digest), **EXACT)


def test_an_adapter_of_a_float16_tower_saturates(levels_checkpoint: Path, tmp_path: Path) -> None:
    """Its own sums, and those with its layers', exceed the range if its weights are near the end of it."""

    def encoded(dtype: str) -> Tensor:
        tower, digest = adapted(tower_of(levels_checkpoint, dtype), tmp_path)
        return tower.encode([torch.from_numpy(frames_of(0, video(0), tower.patches)[:2])], digest)[0].float()

    write_adapter(load_reference("qwen3_vl", levels_checkpoint), tmp_path, target_modules=IN_TOWER)
    expected, found = encoded("float32"), encoded("float16")
    assert float((found - expected).norm() / expected.norm()) < 2e-3
    weights = load_file(tmp_path / "adapter_model.safetensors")
    large = {name: each * (60000 / each.abs().max()) for name, each in weights.items()}
    save_file(large, tmp_path / "adapter_model.safetensors")
    assert encoded("float16").isfinite().all()


def with_two(tower: Tower, folder: Path, whole: nn.Module) -> tuple[Tower, dict[bytes, Any]]:
    """The tower with adapters of other ranks and other layers, and PEFT's towers by digest."""
    small = {"r": 2, "target_modules": r".*visual\.blocks\.1\.(attn\.qkv|mlp\.linear_fc2)"}
    configs: dict[str, dict[str, Any]] = {"mine": {"target_modules": IN_TOWER}, "small": small}
    peft = {name: vision_of(write_adapter(whole, folder / name, **config)) for name, config in configs.items()}
    tower = with_adapters(tower, [AdapterFolder(name, folder / name) for name in configs])
    return tower, {tower.adapters[name]: each for name, each in peft.items()} | {b"": vision_of(whole)}


def test_forwards_with_any_adapter_are_replayed_as_graphs(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """In turns, and without one. One set of graphs is for all adapters, and one for none."""
    folder, recorder = checkpoints("qwen3_vl"), Recorder()
    tower, peft = with_two(load_packed(folder), tmp_path, load_reference("qwen3_vl", folder))
    graphed = with_graphs(tower, 160, recorder)
    assert recorder.captured == [4 * tokens for tokens in (160, 128, 64)] * 2
    frames = torch.from_numpy(frames_of(0, video(0), tower.patches)[:2] % 255)  # 255 marks unwritten inputs
    for digest in (*peft, *reversed(peft)):
        recorder.replayed.clear()
        (found,) = graphed.encode([frames], digest)
        expected = reference_embeds(peft[digest], folder, frames, FAMILIES["qwen3_vl"])
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
        assert recorder.replayed
    one, other, _ = (graphed.encode([frames], digest)[0] for digest in peft)
    assert float((one - other).abs().max()) > 0.01


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_with_any_adapter_are_compiled_once(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoints("qwen3_vl")
    tower, peft = with_two(tower_of(folder), tmp_path, load_reference("qwen3_vl", folder))
    frames = [torch.from_numpy(frames_of(0, video(0), tower.patches)[:2])]
    expected = [tower.encode(frames, each)[0].clone() for each in peft]
    assert compile_tower(tower)
    for forward in (tower.forward, next(iter(tower.adapted.values())).forward):
        assert isinstance(forward, ModelForward)
        assert all(each._compiled_call_impl for each in forward.layers)
    torch.compiler.set_stance("fail_on_recompile")
    found = [tower.encode(frames, each)[0] for each in peft]
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


# --- requests -------------------------------------------------------------------------------------------------------


def asking(*media: Media, adapter: str | None = None, digest: bytes = b"") -> EncodeRequest:
    request = first_request(media)
    request.adapter_digest = digest
    if adapter is not None:
        request.adapter = adapter
    return request


@pytest.fixture
def two(levels_checkpoint: Path, tmp_path: Path) -> tuple[Tower, bytes]:
    """The tower with an adapter that changes it, and one that changes the text alone."""
    reference = load_reference("qwen3_vl", levels_checkpoint)
    write_adapter(reference, tmp_path / MINE, target_modules=IN_TOWER)
    write_adapter(reference, tmp_path / "text", target_modules=r".*language_model.*\.q_proj")
    folders = [AdapterFolder(name, tmp_path / name) for name in (MINE, "text")]
    tower = with_adapters(tower_of(levels_checkpoint), folders)
    return tower, tower.adapters[MINE]


async def test_requests_with_and_without_an_adapter_share_pixels_and_no_embeddings(
    two: tuple[Tower, bytes], tmp_path: Path
) -> None:
    tower, digest = two
    clip, begins = video(7), video(7, Grid(2, GRID.h, GRID.w))  # one begins as the other
    pixels = torch.from_numpy(frames_of(0, clip, tower.patches)).split(tower.patches.temporal_patch)
    assert torch.equal(torch.cat(pixels[:2]), torch.from_numpy(frames_of(0, begins, tower.patches)))
    expected = {name: torch.cat(tower.encode(pixels, each), dim=1) for name, each in ((None, b""), (MINE, digest))}
    encodings = {}
    async with running(tmp_path, tower) as stack:
        hits = metric("cache_lookups_total", outcome="hit")
        for media in (clip, clip, begins):
            calls = {name: stack.stub.Encode(iter([asking(media, adapter=name), SELECT_ALL])) for name in expected}
            for name, call in calls.items():
                responses = [each async for each in call]
                found = torch.from_numpy(embeds_in(responses)[0].embeds.copy())
                torch.testing.assert_close(found, expected[name][:, : media.grid.tokens], **EXACT)
                first = next(each.embeds for each in responses if each.HasField("embeds"))
                encodings[name, media] = encodings.get((name, media), first.encoding)
                assert encodings[name, media] == first.encoding  # the second time from the cache
        assert metric("cache_lookups_total", outcome="hit") == hits + 2
        assert len(set(encodings.values())) == 4
        # An adapter of the text alone encodes as none does.
        await stack.encode(asking(clip, adapter="text"), SELECT_ALL)
        assert metric("cache_lookups_total", outcome="hit") == hits + 3


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"adapter": "other"}, "must be one of mine, text, got 'other'"),
        (
            {"adapter": MINE, "digest": bytes(32)},
            "'mine' was loaded by the encoder from other files than by its",
        ),
    ],
)
async def test_an_adapter_that_the_encoder_has_not_loaded_is_refused(
    two: tuple[Tower, bytes], tmp_path: Path, named: Mapping[str, Any], message: str
) -> None:
    tower, digest = two
    async with running(tmp_path, tower) as stack:
        with pytest.raises(InvalidRequest, match=message) as refused:
            await stack.encode(asking(video(1), **named), SELECT_ALL)
        assert refused.value.field == "adapter"
        assert not stack.preprocessing.prompts
        await stack.encode(asking(video(1), adapter=MINE, digest=digest), SELECT_ALL)


# --- what is refused at startup -------------------------------------------------------------------------------------


def test_layers_of_the_tower_that_are_not_linear_are_refused(levels_checkpoint: Path, tmp_path: Path) -> None:
    write_adapter(load_reference("qwen3_vl", levels_checkpoint), tmp_path, target_modules=["proj"])
    with pytest.raises(StartupError, match=r"mine=.* weights of model.visual.patch_embed.proj; only linear layers"):
        adapted(tower_of(levels_checkpoint), tmp_path)


def test_weights_of_another_shape_are_refused(levels_checkpoint: Path, tmp_path: Path) -> None:
    write_adapter(load_reference("qwen3_vl", levels_checkpoint), tmp_path, target_modules=IN_TOWER)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    name = next(each for each in weights if each.endswith("0.attn.qkv.lora_B.weight"))
    save_file({**weights, name: weights[name][:-1].clone()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(StartupError, match=r"mine=.*visual.blocks.0.attn.qkv.lora_B must have shape \[96, 8\]"):
        adapted(tower_of(levels_checkpoint), tmp_path)


def test_towers_that_take_no_adapter_refuse_it(levels_checkpoint: Path, tmp_path: Path) -> None:
    write_adapter(load_reference("qwen3_vl", levels_checkpoint), tmp_path, target_modules=IN_TOWER)
    FAMILIES["smolvlm"].write(tmp_path / "smolvlm", 1)
    with pytest.raises(StartupError, match=r"mine=.*of a tower that takes none"):
        adapted(tower_of(tmp_path / "smolvlm"), tmp_path)
