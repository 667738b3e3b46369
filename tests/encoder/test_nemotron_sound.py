"""Nemotron's sound tower against transformers': sounds alone and together, in parts, and names of weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.families import family_of
from gridsieve.families.nemotron import sound
from gridsieve.families.nemotron.sound import load_sound_tower
from gridsieve.services.encoder.tower.sound import SoundTower
from gridsieve.services.encoder.tower.vision_model import RunOptions
from tests.families import load_reference, nemotron
from tests.generation.checkpoints import changed

MELS, CPU = nemotron.AUDIO["num_mel_bins"], torch.device("cpu")
# Of 9, 17 and 257 frames the last token has the masked frame alone.
LENGTHS = (120, 3, 9, 8, 17, 257, 16, 430)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemotron")
    nemotron.write(folder, 1)
    return folder


def load(folder: Path, dtype: str = "float32") -> SoundTower:
    tower = load_sound_tower(Checkpoint(folder), RunOptions(dtype, CPU))
    assert tower is not None
    return tower


def features_of(lengths: Sequence[int]) -> list[Tensor]:
    """As preprocessing makes them: the last frame is zeros."""
    random = torch.Generator().manual_seed(7)
    features = [torch.randn(MELS, length, generator=random) for length in lengths]
    for each in features:
        each[:, -1] = 0
    return features


@torch.no_grad()
def alone(model: Any, features: Tensor) -> Tensor:
    """transformers' embeddings of one sound, (tokens, D)."""
    found: Tensor = model.get_audio_features(*nemotron.heard([features])).pooler_output
    return found


def test_sounds_of_several_lengths_in_one_forward_are_what_transformers_makes_of_each_alone(folder: Path) -> None:
    model, tower, features = load_reference("nemotron_h_omni", folder), load(folder), features_of(LENGTHS)
    expected = [alone(model, each) for each in features]
    assert [tower.tokens_of(length) for length in LENGTHS] == [len(each) for each in expected]
    torch.testing.assert_close(tower(features), torch.cat(expected), atol=1e-5, rtol=0)


def test_convolutions_and_scores_are_computed_in_parts_which_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower, features, frames, queries = load(folder), features_of(LENGTHS), list[int](), list[int]()
    whole = tower(features)
    model: Any = tower.compute.model.audio_tower  # type: ignore[attr-defined]
    model.subsampling.register_forward_pre_hook(lambda _, inputs: frames.append(inputs[0].shape[1]))
    attend = torch.nn.functional.scaled_dot_product_attention

    def recorded(query: Tensor, *others: Any, **named: Any) -> Tensor:
        queries.append(query.shape[2])
        return attend(query, *others, **named)

    monkeypatch.setattr(sound.F, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr(sound, "_TOKENS_AT_ONCE", 4)
    monkeypatch.setattr(sound, "_QUERIES_AT_ONCE", 5)
    torch.testing.assert_close(tower(features), whole, atol=1e-5, rtol=0)
    assert (max(frames), max(queries)) == ((4 + 1) * 8, 5)


def test_a_tower_runs_in_bfloat16(folder: Path) -> None:
    features = features_of(LENGTHS)
    exact, found = load(folder)(features), load(folder, "bfloat16")(features)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, atol=0.05 * float(exact.abs().max()), rtol=0)


def test_weights_load_under_the_names_of_transformers_and_as_published(folder: Path, tmp_path: Path) -> None:
    """Published files also have filters of features, and may have biases that their config denies."""
    names = {
        "sound_encoder.encoder.": "audio_tower.",
        "sound_projection.norm.": "embed_audio.layer_norm.",
        "sound_projection.linear1.": "embed_audio.linear_1.",
        "sound_projection.linear2.": "embed_audio.linear_2.",
    }

    def as_transformers(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            part = next((each for each in names if name.startswith(each)), "")
            if part:
                weights[names[part] + name.removeprefix(part)] = weights.pop(name)

    def with_more(weights: dict[str, Tensor]) -> None:
        weights["sound_encoder.encoder.feature_extractor.fb"] = torch.ones(3)
        weights["sound_encoder.encoder.layers.0.conv.depthwise_conv.bias"] = torch.ones(32)

    features = features_of(LENGTHS)
    expected = load(folder)(features)
    for name, change in (("transformers", as_transformers), ("published", with_more)):
        assert torch.equal(load(changed(folder, tmp_path / name, change))(features), expected)


@pytest.mark.parametrize(
    ("audio", "dropped", "named"),
    [
        ({}, "sound_projection.linear2.weight", r"sound tower lacks embed_audio\.linear_2\.weight$"),
        ({"subsampling_conv_stride": 3}, "", "subsampling_conv_stride 2 and its .* got 3, 3 and 8$"),
    ],
)
def test_towers_that_are_incomplete_or_have_other_convolutions_are_refused(
    folder: Path, tmp_path: Path, audio: dict[str, int], dropped: str, named: str
) -> None:
    other = changed(
        folder,
        tmp_path / "other",
        lambda weights: weights.pop(dropped, None),
        audio_config={**nemotron.AUDIO, **audio},
    )
    with pytest.raises(StartupError, match=named):
        load(other)


def test_a_checkpoint_without_a_sound_tower_hears_nothing(folder: Path, tmp_path: Path) -> None:
    hearing, deaf = Checkpoint(folder), Checkpoint(changed(folder, tmp_path / "deaf", audio_config=None))
    assert load_sound_tower(deaf, RunOptions("float32", CPU)) is None
    assert [family_of(each).hears(each) for each in (hearing, deaf)] == [True, False]
