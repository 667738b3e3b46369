"""Qwen2.5-Omni's prompts have the ids, positions and features of transformers, whatever is seen and heard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2_5OmniProcessor, Qwen2_5OmniThinkerForConditionalGeneration, WhisperFeatureExtractor

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import Modality, PromptPlan
from gridsieve.services.preprocessing.conversation import MediaRequest
from gridsieve.services.preprocessing.sound.planned import PlannedSound
from gridsieve.services.preprocessing.video.sampling import FrameSampling
from tests import media
from tests.families.qwen_omni import LONGEST_S
from tests.preprocessing.planning import image, plan_of, planned, tokenizer_of, video

MERGE = 2


@pytest.fixture(scope="module")
def omni(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints("qwen2_5_omni")


def sound(data: bytes, **wish: Any) -> MediaRequest:
    return MediaRequest("audio", Modality.AUDIO, data, FrameSampling(**wish))


def heard(clip: bytes, lasts_s: float, begin_s: float = 0.0, **wish: Any) -> MediaRequest:
    """A clip with a sound track."""
    return replace(video(media.with_sound(clip, media.chirp(lasts_s), begin_s=begin_s), **wish), hears=True)


def num_tokens(frames: int) -> int:
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def expected_ids(folder: Path, plan: PromptPlan, texts: Sequence[str | None]) -> list[int]:
    """transformers' ids of a user's turn. texts: of its parts; None: media, in the order of the plan."""
    processor: Any = SimpleNamespace(
        audio_token="<|AUDIO|>",
        video_token="<|VIDEO|>",
        audio_bos_token="<|audio_bos|>",
        audio_eos_token="<|audio_eos|>",
        video_processor=SimpleNamespace(merge_size=MERGE),
    )
    processor.get_chunked_index = MethodType(Qwen2_5OmniProcessor.get_chunked_index, processor)
    items, said = iter(plan.media), ""
    for text in texts:
        if text is not None:
            said += text
            continue
        item = next(items)
        if item.modality is Modality.IMAGE:
            said += f"<|vision_bos|>{'<|IMAGE|>' * item.grid.tokens}<|vision_eos|>"
        elif item.modality is Modality.AUDIO:
            said += f"<|audio_bos|>{'<|AUDIO|>' * num_tokens(item.frames.size_px[1])}<|audio_eos|>"
        else:
            frames = next(items).frames.size_px[1]
            grid = [item.grid.t, item.grid.h * MERGE, item.grid.w * MERGE]
            seconds = float(item.seconds_per_grid or 0)
            replaced = Qwen2_5OmniProcessor.replace_video_with_audio_token(
                processor,
                {"video_grid_thw": [grid], "video_second_per_grid": [seconds]},
                0,
                {"num_audio_tokens": [num_tokens(frames)]},
                0,
                position_id_per_seconds=25,
                seconds_per_chunk=2.0,
            )
            said += f"<|vision_bos|>{replaced}<|vision_eos|>"
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    whole = f"{system}<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = tokenizer_of(folder)(whole, add_special_tokens=False)["input_ids"]
    return ids


def rope_index(folder: Path, plan: PromptPlan) -> tuple[list[list[int]], int]:
    """transformers' positions [3, N], and its delta, of a plan's ids and grids."""
    ids = tokenizer_of(folder).get_vocab()
    inner = Qwen2_5OmniThinkerForConditionalGeneration
    model: Any = SimpleNamespace(
        spatial_merge_size=MERGE,
        config=SimpleNamespace(
            image_token_id=ids["<|IMAGE|>"],
            video_token_id=ids["<|VIDEO|>"],
            audio_token_id=ids["<|AUDIO|>"],
            vision_start_token_id=ids["<|vision_bos|>"],
            audio_start_token_id=ids["<|audio_bos|>"],
            position_id_per_seconds=25,
            seconds_per_chunk=2,
        ),
    )
    for name in ("get_llm_pos_ids_for_vision", "get_chunked_index", "get_rope_index"):
        setattr(model, name, MethodType(getattr(inner, name), model))

    def grids(modality: Modality) -> torch.Tensor | None:
        found = [
            (item.grid.t, item.grid.h * MERGE, item.grid.w * MERGE) for item in plan.media if item.modality is modality
        ]
        return torch.tensor(found) if found else None

    input_ids = torch.from_numpy(plan.input_ids.astype(np.int64))[None]
    lengths = [item.frames.size_px[1] for item in plan.media if item.modality is Modality.AUDIO]
    steps = [float(item.seconds_per_grid) for item in plan.media if item.seconds_per_grid]
    positions, delta = model.get_rope_index(
        input_ids,
        grids(Modality.IMAGE),
        grids(Modality.VIDEO),
        torch.ones_like(input_ids),
        True,
        torch.tensor(lengths),
        torch.tensor(steps),
    )
    return positions[:, 0].tolist(), int(delta)


def assert_planned_as_by_transformers(folder: Path, *parts: str | MediaRequest) -> PromptPlan:
    plan = plan_of(folder, *parts)
    texts = [part if isinstance(part, str) else None for part in parts]
    assert plan.input_ids.tolist() == expected_ids(folder, plan, texts)
    positions, delta = rope_index(folder, plan)
    assert plan.positions.tolist() == positions
    assert int(plan.positions.max()) + 1 - plan.tokens == delta
    return plan


# Frames, frames a second of the clip and as sampled, and seconds of sound.
SHAPES = {
    "sound that ends sooner": (24, 4, 2.0, 2.3),
    "sound as long": (24, 4, 2.0, 6.0),
    "sound that goes on": (24, 4, 2.0, 11.9),
    "a frame pair": (2, 2, 2.0, 0.9),
    "one frame": (1, 1, 2.0, 5.0),
    "an odd number of frames": (15, 2, 2.0, 7.31),
    "slices of half a second": (17, 4, 4.0, 4.44),
    "slices of eight seconds": (12, 1, 0.25, 11.0),  # four chunks from one to the next
    "slices of two thirds of a second": (18, 3, 3.0, 1.0),
    "sound of one token": (24, 4, 2.0, 0.03),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_pictures_and_sound_take_turns_as_in_transformers(omni: Path, shape: str) -> None:
    frames, rate, fps, lasts_s = SHAPES[shape]
    clip = heard(media.clip(frames, fps=rate, width=84, height=56), lasts_s, fps=fps, min_frames=1)
    plan = assert_planned_as_by_transformers(omni, "so", clip, "What moves?")
    assert plan.media[1].heard_s == pytest.approx(lasts_s)


def test_every_mix_of_media_is_planned_as_by_transformers(omni: Path) -> None:
    wide, film = media.clip(12, fps=2, width=196, height=28), media.clip(8, fps=2, width=56, height=84)
    bell, picture = sound(media.sound(media.chirp(1.5, seed=1))), image(media.picture(60, 190))
    plan = assert_planned_as_by_transformers(
        omni,
        *(bell, "then", heard(wide, 1.0), picture, heard(film, 9.0), "and", heard(film, 3.2, start_s=1), bell, "So?"),
    )
    assert [item.modality.value for item in plan.media] == [
        *("audio", "video", "audio", "image", "video", "audio", "video", "audio", "audio")
    ]
    assert plan.media[0].content_hash == plan.media[8].content_hash


def extracted(folder: Path, samples: Any) -> Any:
    """transformers' features of samples, [mels, frames]."""
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    made = extractor(
        samples, sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="np"
    )
    return made["input_features"][0][:, made["attention_mask"][0].astype(bool)]


def test_what_is_sent_of_a_sound_are_whispers_features_of_the_part_that_is_heard(omni: Path) -> None:
    """A track that begins half a second after the pictures, of which a part is cut out: silence, then sound."""
    film, chirp = media.clip(16, fps=4), media.chirp(5.0)
    whole = np.concatenate([np.zeros(8000, np.float32), chirp])
    asked = (
        (heard(film, 5.0, begin_s=0.5), whole),
        (heard(film, 5.0, begin_s=0.5, start_s=0.25, end_s=3), whole[4000:48_000]),
        (sound(media.sound(chirp)), chirp),
        (sound(media.sound(chirp), start_s=1.125, end_s=2), chirp[18_000:32_000]),
    )
    for request, samples in asked:
        made = planned(omni, request)
        item = made.media[-1]
        assert isinstance(item, PlannedSound)
        (features,) = item.slices()
        made.files.close()
        np.testing.assert_allclose(features.pixels[0, :, :, 0], extracted(omni, samples), atol=1e-4)
        assert made.plan.media[-1].heard_s == samples.size / 16_000


def test_a_sound_longer_than_the_model_takes_is_refused_with_the_limit(omni: Path) -> None:
    with pytest.raises(
        InvalidRequest, match=f"audio lasts 12.500 s, this model hears at most {LONGEST_S} s"
    ) as refused:
        plan_of(omni, sound(media.sound(media.chirp(12.5))))
    assert (refused.value.value, refused.value.limit) == ("12.5", "12")
