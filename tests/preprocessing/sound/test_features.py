"""Features are those of transformers' extractors, as the processors of Qwen's models call them."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from transformers.models.parakeet.feature_extraction_parakeet import ParakeetFeatureExtractor
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.preprocessing.sound.features import LogMel, ParakeetMel
from gridsieve.services.preprocessing.sound.runs import Float32Array

RATE = 16_000
SETTINGS = {"feature_size": 128, "sampling_rate": RATE, "hop_length": 160, "chunk_length": 30, "n_fft": 400}


def checkpoint(folder: Path, settings: dict[str, object], config: dict[str, object] | None = None) -> Checkpoint:
    folder.joinpath("config.json").write_text(json.dumps(config or {}))
    folder.joinpath("model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    folder.joinpath("preprocessor_config.json").write_text(json.dumps(settings))
    return Checkpoint(folder)


def log_mel(folder: Path, settings: dict[str, object], padded: bool = True) -> LogMel:
    return LogMel.from_checkpoint(checkpoint(folder, settings), padded)


def fading(samples: int) -> Float32Array:
    """Noise that fades by 90 dB, so that the least value is often not reached, and a click at its end."""
    noise = np.random.default_rng(samples).standard_normal(samples) * 10 ** -np.linspace(0.5, 5, samples)
    noise[-1] = 0.9
    return noise.astype(np.float32)


def theirs(samples: Float32Array, **how: object) -> Float32Array:
    """What transformers keeps: the frames that its mask has."""
    extractor = WhisperFeatureExtractor(**SETTINGS)
    made = extractor(samples, sampling_rate=RATE, return_attention_mask=True, return_tensors="np", **how)
    kept: Float32Array = made["input_features"][0][:, made["attention_mask"][0].astype(bool)]
    return kept


@pytest.mark.parametrize("samples", [1, 159, 160, 161, 201, 400, 15_999, 16_000, 479_801, 480_000])
def test_features_are_those_of_qwen2_5_omni(tmp_path: Path, samples: int) -> None:
    features, sound = log_mel(tmp_path, SETTINGS), fading(samples)
    assert features.max_samples == 30 * RATE
    made, expected = features.of(sound), theirs(sound, padding="max_length")
    assert made.shape == (features.mels, features.frames_of(samples)) == expected.shape
    assert np.abs(made - expected).max() < 1e-4


@pytest.mark.parametrize("samples", [201, 319, 320, 401, 16_001, 90 * RATE + 77])
def test_features_are_those_of_qwen3_omni(tmp_path: Path, samples: int) -> None:
    features, sound = log_mel(tmp_path, SETTINGS, padded=False), fading(samples)
    assert features.max_samples is None
    made, expected = features.of(sound), theirs(sound, padding=True, truncation=False)
    assert made.shape == (features.mels, features.frames_of(samples)) == expected.shape
    assert np.abs(made - expected).max() < 1e-4


def test_the_least_value_follows_from_the_loudest_of_the_whole_sound(tmp_path: Path) -> None:
    """Here it is in the last block of many, after which the first one must change."""
    sound = np.full(60 * RATE, 1e-3, np.float32)
    sound[-RATE:] = np.sin(np.arange(RATE)).astype(np.float32)
    features = log_mel(tmp_path, SETTINGS, padded=False)
    assert np.abs(features.of(sound) - theirs(sound, padding=True, truncation=False)).max() < 1e-4


@pytest.mark.parametrize("padded", [True, False])
def test_silence_and_a_sound_too_short_for_transformers_have_frames(tmp_path: Path, padded: bool) -> None:
    features = log_mel(tmp_path, SETTINGS, padded)
    assert features.of(np.zeros(100, np.float32)).tolist() == [[-1.5]] * 128  # (log10(1e-10) + 4) / 4
    assert features.of(np.zeros(0, np.float32)).shape == (128, 0)


@pytest.mark.parametrize("samples", [320, 321, 400, 479, 480, 16_000, 90 * RATE + 77])
def test_features_are_those_of_parakeet(tmp_path: Path, samples: int) -> None:
    features = ParakeetMel.from_checkpoint(checkpoint(tmp_path, {}, {"sound_config": {"num_mel_bins": 128}}))
    sound = fading(samples)
    extractor = ParakeetFeatureExtractor(feature_size=128)
    expected = extractor(sound, sampling_rate=RATE, return_tensors="np")["input_features"][0].T
    made = features.of(sound)
    assert made.shape == (features.mels, features.frames_of(samples)) == expected.shape
    assert np.abs(made - expected).max() < 1e-4


def test_a_sound_too_short_for_parakeet_is_followed_by_silence(tmp_path: Path) -> None:
    features = ParakeetMel.from_checkpoint(checkpoint(tmp_path, {}))
    sound = fading(100)
    assert np.array_equal(features.of(sound), features.of(np.pad(sound, (0, 220))))
    assert features.of(np.zeros(100, np.float32)).tolist() == [[0.0] * 3] * 80
    assert features.of(np.zeros(0, np.float32)).shape == (80, 0)


@pytest.mark.parametrize("kind", ["whisper", "parakeet"])
def test_memory_does_not_grow_with_the_sound(tmp_path: Path, kind: str) -> None:
    is_whisper = kind == "whisper"
    features = (
        log_mel(tmp_path, SETTINGS, False) if is_whisper else ParakeetMel.from_checkpoint(checkpoint(tmp_path, {}))
    )
    beside = []
    for seconds in (60, 240):
        sound = np.zeros(seconds * RATE, np.float32)
        tracemalloc.start()
        made = features.of(sound)
        beside.append(tracemalloc.get_traced_memory()[1] - made.nbytes)
        tracemalloc.stop()
    assert beside[1] < beside[0] * 1.1


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("dither", 1e-5, "preprocessor_config.json: dither must be 0, got 1e-05"),
        ("hop_length", 0, "preprocessor_config.json: hop_length must be a whole number of at least 1, got 0"),
    ],
)
def test_settings_that_are_not_supported_are_refused(tmp_path: Path, name: str, value: float, text: str) -> None:
    with pytest.raises(StartupError, match=f"^{text}$"):
        log_mel(tmp_path, {**SETTINGS, name: value})
