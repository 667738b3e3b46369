"""Nemotron's tower against transformers': pictures and tubelets, chosen tokens, graphs, and names of weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.encoder.startup.build import compile_tower
from gridsieve.services.encoder.tower.graphs import with_graphs
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.patches import KeptFrames
from tests.encoder.test_kept_frames import kept_frames
from tests.encoder.tower_recorder import Recorder, assert_replays, load_packed
from tests.families import load_reference, nemotron, nemotron_nano
from tests.generation.checkpoints import changed

CPU = torch.device("cpu")
TOKEN_PX = nemotron.PATCH_PX * nemotron.MERGE
# Rows and columns in tokens. The stored positions are a square of 4 tokens: smaller, equal and larger sides.
SIDES = [(2, 3), (1, 1), (6, 2), (2, 3), (4, 4), (5, 7)]
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemotron")
    nemotron.write(folder, 1)
    return folder


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint that predicts further tokens, whose tower has a last norm, and its model."""
    folder = tmp_path_factory.mktemp("nemotron")
    return folder, nemotron.write(folder, 1, text={"num_nextn_predict_layers": 1})


@pytest.fixture(scope="module", params=["plain", "predicts_tokens"])
def written(request: pytest.FixtureRequest, folder: Path, predicting: tuple[Path, Any]) -> tuple[Path, Any]:
    return predicting if request.param == "predicts_tokens" else (folder, load_reference("nemotron_h_omni", folder))


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
    return [kept_frames(tubelet, kept, TOKEN_PX) for tubelet, (_, kept) in zip(tubelets, CHOSEN, strict=True)]


def test_chosen_tokens_are_those_of_transformers_layers_over_them_alone(written: tuple[Path, Any]) -> None:
    folder, model = written
    tubelets = [frames_of(2, *grid, seed) for seed, (grid, _) in enumerate(CHOSEN)]
    found = load_tower(Checkpoint(folder), "float32", CPU).encode(chosen_of(tubelets))
    for ours, tubelet, (_, kept) in zip(found, tubelets, CHOSEN, strict=True):
        torch.testing.assert_close(ours[0], of_kept(model, tubelet, kept), atol=1e-5, rtol=0)


def test_graphs_replay_what_the_tower_computes(folder: Path) -> None:
    shown = [frames_of(1 + seed % 2, *side, seed) for seed, side in enumerate(SIDES[:4])]
    assert_replays(folder, [*shown, *chosen_of([frames_of(2, *grid) for grid, _ in CHOSEN])])


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


def published(weights: Weights) -> None:
    """transformers saves the names of published files, which have no scales of layers, and more than is read here."""
    assert {"mlp1.0.weight", "vision_model.radio_model.model.blocks.0.attn.qkv.weight"} <= weights.keys()
    assert not any(name.endswith("lambda1") for name in weights)
    weights["vision_model.radio_model.input_conditioner.norm_mean"] = torch.zeros(3, 1, 1)


def drop(*endings: str) -> Callable[[Weights], None]:
    def dropped(weights: Weights) -> None:
        found = [name for name in weights if name.endswith(endings)]
        assert len(found) == len(endings)
        for name in found:
            del weights[name]

    return dropped


def check_video(folder: Path, model: Any) -> None:
    video = frames_of(2, 2, 3)
    (found,) = load_tower(Checkpoint(folder), "float32", CPU).encode([video])
    torch.testing.assert_close(found[0], of_video(model, video), atol=1e-5, rtol=0)


@pytest.mark.parametrize("absent", ["", "bias"])
def test_a_last_norm_that_a_file_lacks_is_as_transformers_begins_it(
    predicting: tuple[Path, Any], absent: str, tmp_path: Path
) -> None:
    norm = [f"vision_final_layernorm.{each}" for each in ("weight", "bias")]
    lacking = changed(predicting[0], tmp_path / "lacking", drop(*(name for name in norm if name.endswith(absent))))
    check_video(lacking, nemotron.MODEL.from_pretrained(lacking).eval())


def test_weights_are_found_by_their_published_and_by_their_saved_names(
    predicting: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, model = predicting
    check_video(changed(folder, tmp_path / "published", published), model)
    scaled = deepcopy(model)  # the saved names have scales
    for name, each in scaled.named_parameters():
        if name.endswith("lambda1"):
            each.data.fill_(0.5)
    saved = {name: each.clone() for name, each in scaled.state_dict().items()}
    check_video(changed(folder, tmp_path / "saved", lambda held: (held.clear(), held.update(saved))), scaled)


@pytest.mark.parametrize(
    ("dropped", "named"),
    [
        ("blocks.1.attn.qkv.bias", r"lacks vision_model\.encoder\.layer\.1\.attention\.k_proj\.bias"),
        ("video_embedder.weight", r"lacks vision_model\.embeddings\.video_patch_projection\.weight$"),
        ("mlp1.3.weight", r"lacks multi_modal_projector\.linear_2\.weight$"),
    ],
)
def test_missing_weights_are_refused(folder: Path, dropped: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=named):
        load_tower(Checkpoint(changed(folder, tmp_path / "lacking", drop(dropped))), "float32", CPU)


# --- Nemotron Nano 12B v2 VL, against transformers' classes for the Omni with the same weights ----------------------


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemotron_nano")
    nemotron_nano.write(folder, 1)
    return folder


@pytest.mark.parametrize("replayed", [False, True])
def test_frames_and_chosen_tokens_of_nano_become_the_tokens_of_transformers(nano: Path, replayed: bool) -> None:
    model, recorder = nemotron_nano.read(nano), Recorder()
    if replayed:
        tower = with_graphs(load_packed(nano), 160, recorder)
        recorder.replayed.clear()
    else:
        tower = load_tower(Checkpoint(nano), "float32", CPU)
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
def test_configs_of_other_towers_are_refused(nano: Path, tmp_path: Path, change: dict[str, Any], named: str) -> None:
    config = json.loads((nano / "config.json").read_text())
    args = config["vision_config"]["args"] | change.get("args", {})
    config |= {name: value for name, value in change.items() if name != "args"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": {"args": args}}))
    (tmp_path / "model.safetensors").symlink_to(nano / "model.safetensors")
    with pytest.raises(StartupError, match=named):
        load_tower(Checkpoint(tmp_path), "float32", CPU)
