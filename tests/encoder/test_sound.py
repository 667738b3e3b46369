"""Sound towers against transformers' own: embeddings of sounds alone and together, and how many tokens they become."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2_5OmniThinkerConfig, Qwen3OmniMoeThinkerConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from demo.checkpoint import randomise
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.families import family_of
from gridsieve.families.qwen import sound
from gridsieve.families.qwen.sound import load_sound_tower
from gridsieve.services.compute.rank_failure import RankFailure
from gridsieve.services.encoder.startup.largest_forward import run_largest
from gridsieve.services.encoder.tower import loading
from gridsieve.services.encoder.tower.graphs import without_graphs
from gridsieve.services.encoder.tower.parallel.tower import DataParallelTower, packing_of
from gridsieve.services.encoder.tower.sound import Sound, SoundTower
from gridsieve.services.encoder.tower.vision_model import RunOptions
from tests.encoder.encoder_service import tower_of
from tests.families import load_reference

MELS = 16
# Qwen2.5-Omni's chunks have 20 frames here, its attention ends with them; Qwen3-Omni's have 100, and it attends to 200.
SIZES = {"num_mel_bins": MELS, "encoder_layers": 2, "encoder_attention_heads": 2, "d_model": 32, "output_dim": 24}
KINDS: dict[str, tuple[Any, Any, dict[str, int], Sequence[int]]] = {
    "qwen2_5_omni_thinker": (
        Qwen2_5OmniThinkerConfig,
        Qwen2_5OmniAudioEncoder,
        {"n_window": 10},
        (3, 20, 21, 40, 57, 1, 4, 41, 19),
    ),
    "qwen3_omni_moe_thinker": (
        Qwen3OmniMoeThinkerConfig,
        Qwen3OmniMoeAudioEncoder,
        {"n_window_infer": 200, "downsample_hidden_size": 8},
        (1, 100, 7, 101, 430, 99, 200, 7, 260),
    ),
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=KINDS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of a thinker that holds its sound tower alone, and this tower in transformers."""
    folder = tmp_path_factory.mktemp("sound")
    config_class, model_class, sizes, _ = KINDS[request.param]
    config = config_class(audio_config={**SIZES, **sizes, "encoder_ffn_dim": 48})
    model = model_class._from_config(config.audio_config, attn_implementation="eager").eval()
    randomise(model, 0.1, seed=1)
    save_file({f"audio_tower.{name}": each for name, each in model.state_dict().items()}, folder / "model.safetensors")
    config.save_pretrained(folder)
    return folder, model


@pytest.fixture
def lengths(request: pytest.FixtureRequest, written: tuple[Path, Any]) -> Sequence[int]:
    return KINDS[written[1].config.model_type.replace("audio_encoder", "thinker")][3]


def load(folder: Path, dtype: str = "float32") -> SoundTower:
    return load_sound_tower(Checkpoint(folder), RunOptions(dtype, CPU))


def features_of(lengths: Sequence[int]) -> list[Tensor]:
    random = torch.Generator().manual_seed(7)
    return [torch.randn(MELS, length, generator=random) for length in lengths]


@torch.no_grad()
def alone(model: Any, features: Tensor) -> Tensor:
    """transformers' embeddings of one sound, (tokens, D)."""
    found: Tensor = model(features, feature_lens=torch.tensor([features.shape[1]])).last_hidden_state
    return found


def test_sounds_of_several_lengths_in_one_forward_are_what_transformers_makes_of_each_alone(
    written: tuple[Path, Any], lengths: Sequence[int]
) -> None:
    folder, model = written
    tower, features = load(folder), features_of(lengths)
    expected = [alone(model, each) for each in features]
    assert [tower.tokens_of(each) for each in lengths] == [len(each) for each in expected]
    torch.testing.assert_close(tower(features), torch.cat(expected), atol=1e-5, rtol=0)


def test_convolutions_are_computed_over_few_chunks_at_a_time_which_changes_nothing(
    written: tuple[Path, Any], lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tower, features, together = load(written[0]), features_of(lengths), list[int]()
    compute: Any = tower.compute
    first = next(each for each in compute.model.modules() if isinstance(each, torch.nn.Conv1d | torch.nn.Conv2d))
    first.register_forward_pre_hook(lambda _, inputs: together.append(len(inputs[0])))
    whole = tower(features)
    monkeypatch.setattr(sound, "_CHUNKS_AT_ONCE", 2)
    assert max(together) > 2
    together.clear()
    torch.testing.assert_close(tower(features), whole, atol=1e-5, rtol=0)
    assert max(together) == 2


def test_a_tower_runs_in_bfloat16(written: tuple[Path, Any], lengths: Sequence[int]) -> None:
    features = features_of(lengths)
    exact, found = load(written[0])(features), load(written[0], "bfloat16")(features)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, atol=0.05 * float(exact.abs().max()), rtol=0)


def test_the_longest_sound_of_a_limit_has_as_many_rows_as_fit(written: tuple[Path, Any]) -> None:
    tower = load(written[0])
    for rows in (7, 13, 40, 1000):
        frames = tower.longest_of(rows)
        assert tower.rows_of(frames) <= rows < tower.rows_of(frames + 1)


def test_ranks_leave_sounds_to_the_first_which_keeps_each_forward_within_its_limit(
    tiny_checkpoint: Path, written: tuple[Path, Any], lengths: Sequence[int]
) -> None:
    sound, forwards = load(written[0]), list[list[int]]()

    def recorded(features: Sequence[Tensor]) -> Tensor:
        forwards.append([each.shape[1] for each in features])
        return sound.compute(features)

    tower = replace(tower_of(tiny_checkpoint), sound=replace(sound, compute=recorded), embed_levels=2)
    ranks = DataParallelTower(tower, Mock(), 2, Mock(), 10, RankFailure())
    features = features_of(lengths)
    found = ranks.encode([Sound(each) for each in features])
    assert [count for forward in forwards for count in forward] == list(lengths)
    assert len(forwards) > 1
    # A row is a patch, of which a token has four.
    assert all(sum(-(-sound.rows_of(each) // 4) for each in forward) <= 10 for forward in forwards if len(forward) > 1)
    for ours, each in zip(found, features, strict=True):
        torch.testing.assert_close(ours[0], sound([each]), atol=1e-5, rtol=0)
        assert ours.shape[0] == 3
        assert not ours[1:].any()


def test_the_largest_forward_of_sounds_is_run_before_the_service_serves(
    tiny_checkpoint: Path, written: tuple[Path, Any]
) -> None:
    sound, forwards = load(written[0]), list[list[int]]()

    def recorded(features: Sequence[Tensor]) -> Tensor:
        forwards.append([each.shape[1] for each in features])
        return sound.compute(features)

    tower = without_graphs(replace(tower_of(tiny_checkpoint), sound=replace(sound, compute=recorded)))
    run_largest(DataParallelTower(tower, Mock(), 1, Mock(), 10, RankFailure()), packing_of(tower, 10).largest)
    ((frames,),) = forwards
    assert sound.rows_of(frames) <= 40 < sound.rows_of(frames + 1)


def test_a_tower_hears_where_its_row_names_a_sound_tower_unless_another_rank_does(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, (features,) = Checkpoint(checkpoints("qwen3_omni_moe")), features_of([130])
    row = replace(family_of(checkpoint), sound="sound:load_sound_tower")
    monkeypatch.setattr(loading, "family_of", lambda checkpoint: row)
    assert loading.load_tower(checkpoint, "float32", CPU, hears=False).sound is None
    (found,) = loading.load_tower(checkpoint, "float32", CPU).encode([Sound(features)])
    tower = load_reference("qwen3_omni_moe", checkpoint.folder).model.audio_tower
    torch.testing.assert_close(found[0], alone(tower, features), atol=1e-5, rtol=0)
    assert not found[1:].any()


def test_a_whole_model_has_its_tower_under_the_thinker(written: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = written
    thinker = json.loads((folder / "config.json").read_text())
    config = {"model_type": thinker["model_type"].removesuffix("_thinker"), "thinker_config": thinker}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {f"thinker.audio_tower.{name}": each for name, each in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    (features,) = features_of([130])
    torch.testing.assert_close(load(tmp_path)([features]), alone(model, features), atol=1e-5, rtol=0)


def test_a_checkpoint_without_a_weight_of_its_sound_tower_is_refused(written: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = written
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    weights = {f"audio_tower.{name}": each for name, each in model.state_dict().items()}
    del weights["audio_tower.ln_post.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=r"sound tower lacks ln_post\.bias"):
        load(tmp_path)
