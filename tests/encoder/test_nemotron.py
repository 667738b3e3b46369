"""Nemotron's tower against transformers': pictures and tubelets, chosen tokens, graphs, names of weights, and EVS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import compute_retention_mask

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import FrameShape, Grid, MediaPlan, Modality, Run
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.common.contract.tensors import DType, TensorBuffer
from gridsieve.services.encoder.items.batcher import Batcher
from gridsieve.services.encoder.items.decoded_slices import FrameSlice
from gridsieve.services.encoder.items.pending_entry import PendingEntry
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.encoder.pruning.ranking import SCORE_STEP
from gridsieve.services.encoder.startup.build import compile_tower
from gridsieve.services.encoder.tower.graphs import with_graphs
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.parallel.tower import packing_of
from gridsieve.services.encoder.tower.patches import KeptFrames
from tests.encoder.tower_recorder import Recorder, load_packed
from tests.families import nemotron

CPU = torch.device("cpu")
TOKEN_PX = nemotron.PATCH_PX * nemotron.MERGE
# Rows and columns in tokens. The stored positions are a square of 4 tokens: smaller, equal and larger sides.
SIDES = [(2, 3), (1, 1), (6, 2), (2, 3), (4, 4), (5, 7)]
Weights = dict[str, Tensor]


@pytest.fixture(scope="module", params=[0, 1], ids=["plain", "predicts_tokens"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint, whose tower has a last norm or not, and its model."""
    folder = tmp_path_factory.mktemp("nemotron")
    return folder, nemotron.write(folder, 1, text={"num_nextn_predict_layers": request.param})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemotron")
    nemotron.write(folder, 1)
    return folder


def frames_of(count: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Random frames, float32 (count, H, W, 3), of so many tokens, some of whose values are outside 0 to 255."""
    random = torch.Generator().manual_seed(seed)
    return torch.rand(count, rows * TOKEN_PX, columns * TOKEN_PX, 3, generator=random) * 295 - 20


def pixel_values(frames: Tensor) -> Tensor:
    """(F, 3, H, W), as both processors normalise."""
    mean, std = (torch.tensor(nemotron.SETTINGS[f"norm_{name}"]) for name in ("mean", "std"))
    return ((frames / 255 - mean) / std).permute(0, 3, 1, 2)


def tubelets_of(video: Tensor) -> Tensor:
    """(1, T, 2 · 3, H, W) of frames (2 · T, H, W, 3)."""
    return pixel_values(video).unflatten(0, (-1, nemotron.TUBELET)).flatten(1, 2)[None]


@torch.no_grad()
def of_pictures(model: Any, pictures: Sequence[Tensor]) -> list[Tensor]:
    """transformers' tokens of pictures (1, H, W, 3), which its tower computes together."""
    px = nemotron.PATCH_PX
    patches = [F.unfold(pixel_values(each), px, stride=px)[0].T for each in pictures]
    sides = torch.tensor([[each.shape[1] // px, each.shape[2] // px] for each in pictures])
    return list(model.get_image_features(torch.cat(patches), sides).pooler_output)


@torch.no_grad()
def of_video(model: Any, video: Tensor) -> Tensor:
    """transformers' tokens (n, D) of a video (2 · T, H, W, 3)."""
    (tokens,) = model.get_video_features(tubelets_of(video)).pooler_output
    return tokens


def test_pictures_and_tubelets_become_the_tokens_of_transformers(written: tuple[Path, Any]) -> None:
    folder, model = written
    tower = load_tower(Checkpoint(folder), "float32", CPU)
    shown = [frames_of(1 + seed % 2, *side, seed) for seed, side in enumerate([*SIDES, *SIDES[1:]])]
    pictures = iter(of_pictures(model, [each for each in shown if len(each) == 1]))
    for ours, frames in zip(tower.encode(shown), shown, strict=True):
        theirs = next(pictures) if len(frames) == 1 else of_video(model, frames)
        torch.testing.assert_close(ours[0], theirs, atol=1e-5, rtol=0)


def test_the_last_frame_of_an_odd_video_is_repeated_and_is_no_picture(folder: Path) -> None:
    tower = load_tower(Checkpoint(folder), "float32", CPU)
    frames = frames_of(3, 2, 3)
    grid = Grid(2, 2, 3)
    shape = FrameShape(3, (2 * TOKEN_PX, 3 * TOKEN_PX))
    plan = MediaPlan(Modality.VIDEO, grid, (Run(0, grid.tokens),), shape, Fraction(1), (), bytes(32))
    expected = torch.cat(tower.encode([frames[:2], frames[2:].expand(2, -1, -1, -1)]), dim=1)

    async def encoded() -> Tensor:
        batcher = Batcher(tower.encode, packing_of(tower, 100))
        batcher.start()
        pending = PendingEntry(b"", b"", plan, tower, batcher, ByteSemaphore(2**20))
        await pending.reserve()
        for number, own in enumerate(frames.split(2)):
            data = memoryview(own.numpy()).cast("B")
            buffer = TensorBuffer(DType.FLOAT32, own.shape, whole=data)
            await pending.add_slice(FrameSlice(number, buffer, 0, 0, 0))
        while pending.entry is None:
            await pending.wait_for_change()
        batcher.close()
        return pending.entry.embeds

    torch.testing.assert_close(asyncio.run(encoded()), expected, atol=2e-6, rtol=0)


@torch.no_grad()
def of_kept(model: Any, tubelet: Tensor, kept: Sequence[int]) -> Tensor:
    """transformers' layers over the rows before the patches and the patches of some tokens alone: (k, D)."""
    tower, columns = model.vision_model, tubelet.shape[2] // TOKEN_PX
    before = tower.config.num_summary_tokens
    embedded = tower.embeddings(tubelets_of(tubelet)[0])
    places = [
        before + (token // columns * 2 + y) * 2 * columns + token % columns * 2 + x
        for token in kept
        for y in range(2)
        for x in range(2)
    ]
    rows = embedded[:, [*range(before), *places]]
    features = tower.encoder(rows).last_hidden_state[:, before:]
    if model.vision_final_layernorm is not None:
        features = model.vision_final_layernorm(features)
    return model.multi_modal_projector(features.view(len(kept), -1))


CHOSEN = (((3, 4), (0, 5, 6, 11)), ((2, 3), (4,)), ((3, 4), (1, 2)))


def chosen_of(tubelets: Sequence[Tensor]) -> list[KeptFrames]:
    found = []
    for tubelet, (grid, kept) in zip(tubelets, CHOSEN, strict=True):
        squares = tubelet.unfold(1, TOKEN_PX, TOKEN_PX).unfold(2, TOKEN_PX, TOKEN_PX).flatten(1, 2)[:, list(kept)]
        found.append(KeptFrames(squares.permute(0, 1, 3, 4, 2).flatten(1, 2), grid, kept))
    return found


def test_chosen_tokens_are_those_of_transformers_layers_over_them_alone(written: tuple[Path, Any]) -> None:
    folder, model = written
    tubelets = [frames_of(2, *grid, seed) for seed, (grid, _) in enumerate(CHOSEN)]
    found = load_tower(Checkpoint(folder), "float32", CPU).encode(chosen_of(tubelets))
    for ours, tubelet, (_, kept) in zip(found, tubelets, CHOSEN, strict=True):
        torch.testing.assert_close(ours[0], of_kept(model, tubelet, kept), atol=1e-5, rtol=0)


def test_graphs_replay_what_the_tower_computes(folder: Path) -> None:
    tower, recorder = load_packed(folder), Recorder()
    graphed = with_graphs(tower, 160, recorder)
    recorder.replayed.clear()
    shown = [frames_of(1 + seed % 2, *side, seed) for seed, side in enumerate(SIDES[:4])]
    slices = [*shown, *chosen_of([frames_of(2, *grid) for grid, _ in CHOSEN])]
    for ours, theirs in zip(graphed.encode(slices), tower.encode(slices), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert recorder.replayed


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own code
def test_a_compiled_tower_computes_the_same(folder: Path) -> None:
    tower = load_tower(Checkpoint(folder), "float32", CPU)
    shown = [frames_of(1 + seed % 2, *side, seed) for seed, side in enumerate(SIDES)]
    plain = [embeds.clone() for embeds in tower.encode(shown)]
    assert compile_tower(tower)
    torch.compiler.set_stance("fail_on_recompile")
    for ours, theirs in zip(tower.encode(shown), plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


def stored(folder: Path) -> Weights:
    (path,) = folder.glob("*.safetensors")
    return {name: each.clone() for name, each in load_file(path).items()}


def rewrite(folder: Path, change: Callable[[Weights], Weights]) -> None:
    (path,) = folder.glob("*.safetensors")
    save_file(change(stored(folder)), path, metadata={"format": "pt"})


def published(weights: Weights) -> Weights:
    """transformers saves the names of published files, which have no scales of layers, and more than is read here."""
    assert {"mlp1.0.weight", "vision_model.radio_model.model.blocks.0.attn.qkv.weight"} <= weights.keys()
    unread = ("vision_model.radio_model.input_conditioner.norm_mean", "sound_encoder.encoder.layers.0.weight")
    kept = {name: each for name, each in weights.items() if not name.endswith("lambda1")}
    return kept | {name: torch.zeros(3, 1, 1) for name in unread}


@pytest.mark.parametrize("absent", [("weight", "bias"), ("bias",)])
def test_a_last_norm_that_a_file_lacks_is_as_transformers_begins_it(absent: tuple[str, ...], tmp_path: Path) -> None:
    nemotron.write(tmp_path, 1, text={"num_nextn_predict_layers": 1})
    norm = [name for name in stored(tmp_path) if "vision_final_layernorm" in name]
    dropped = [name for name in norm if name.endswith(absent)]
    assert len(norm) == 2
    assert dropped
    rewrite(tmp_path, lambda weights: {name: each for name, each in weights.items() if name not in dropped})
    video = frames_of(2, 2, 3)
    (found,) = load_tower(Checkpoint(tmp_path), "float32", CPU).encode([video])
    expected = of_video(nemotron.MODEL.from_pretrained(tmp_path).eval(), video)
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("names", ["published", "saved"])
def test_weights_are_found_by_their_published_and_by_their_saved_names(names: str, tmp_path: Path) -> None:
    model = nemotron.write(tmp_path, 1, text={"num_nextn_predict_layers": 1})
    if names == "saved":  # these have scales
        for name, each in model.named_parameters():
            if name.endswith("lambda1"):
                each.data.fill_(0.5)
    rewrite(tmp_path, published if names == "published" else lambda _: dict(model.state_dict()))
    video = frames_of(2, 2, 3)
    (found,) = load_tower(Checkpoint(tmp_path), "float32", CPU).encode([video])
    torch.testing.assert_close(found[0], of_video(model, video), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("dropped", "named"),
    [
        ("blocks.1.attn.qkv.bias", r"lacks vision_model\.encoder\.layer\.1\.attention\.k_proj\.bias"),
        ("video_embedder.weight", r"lacks vision_model\.embeddings\.video_patch_projection\.weight$"),
        ("mlp1.3.weight", r"lacks multi_modal_projector\.linear_2\.weight$"),
    ],
)
def test_missing_weights_are_refused(dropped: str, named: str, tmp_path: Path) -> None:
    nemotron.write(tmp_path, 1, text={"num_nextn_predict_layers": 1})
    rewrite(tmp_path, lambda weights: {name: each for name, each in weights.items() if not name.endswith(dropped)})
    with pytest.raises(StartupError, match=named):
        load_tower(Checkpoint(tmp_path), "float32", CPU)


def test_float16_is_refused(folder: Path) -> None:
    with pytest.raises(StartupError, match="--dtype float16: radio towers overflow it"):
        load_tower(Checkpoint(folder), "float16", CPU)


CLIPS = (Grid(12, 3, 4), Grid(20, 5, 5))


@pytest.mark.parametrize("grid", CLIPS, ids=str)
@pytest.mark.parametrize("rate", [0.5, 0.7, 0.9])
def test_evs_keeps_the_tokens_of_transformers(written: tuple[Path, Any], rate: float, grid: Grid) -> None:
    """Our scores are rounded to 2⁻¹⁶, so tokens within that of the last kept one are not compared.

    transformers computes 1 − 0.9 in floating point: a tenth of 500 tokens are 49 to it.
    """
    folder, model = written
    video = frames_of(2 * grid.t, grid.h, grid.w)
    still = torch.rand(len(video), 1, video.shape[2], 1, generator=torch.Generator().manual_seed(1)) < 0.9
    video = torch.where(still, video[:1], video)
    slices = load_tower(Checkpoint(folder), "float32", CPU).encode(video.split(2))
    kept = keep_tokens(torch.cat(slices, dim=1)[0], grid, ItemPruning(rate))
    embeds = of_video(model, video)
    theirs = compute_retention_mask(embeds, grid.t, rate)
    ours = torch.zeros_like(theirs).index_fill(0, kept.long(), True)
    assert ours.sum() - theirs.sum() == (grid.tokens == 500 and rate == 0.9)
    places = embeds.view(grid.t, grid.slice_tokens, -1)
    changes = 1 - F.cosine_similarity(places[1:], places[:-1], dim=-1)
    scores = torch.cat([torch.full((grid.slice_tokens,), 255.0), changes.flatten()])
    clear = (scores - scores[ours].min()).abs() > SCORE_STEP
    assert clear.sum() > 0.98 * grid.tokens
    assert torch.equal(ours[clear], theirs[clear])
