"""Nemotron Nano 12B v2 VL: images as InternVL lays them out, frames of a video after their times.

    an image    <img>, 16 × 16 tokens of each tile, row by row, and of the whole where there are several, </img>
    a video     Frame 1 sampled at 0.00 seconds: <img>, 16 × 16 tokens, </img>, newline, Frame 2 sampled at 0.50 …

Frames are stretched to a tile's size. Neither tiles nor frames are rounded after resizing. Their times are written as
Nemotron 3 Nano Omni's are.
A video has two frames a second, at most 128, as NVIDIA serves the model, from its first to its last one.
TensorRT-LLM writes "This is a video:" before the frames and a newline after each, vLLM only newlines between them. Here
it is as in vLLM: who wants these words writes them.
Source: `NanoNemotronVLProcessor` of vLLM 0.32, with which public copies of the checkpoint's image processor agree in
tiles and pixels; sampling: `sample_video_frames_to_data_urls` of Megatron-Bridge's examples for the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import Grid, Modality
from gridsieve.common.contract.tensors import DType
from gridsieve.families.internvl.prompt import InternVL
from gridsieve.families.nemotron.prompt import timed_slices
from gridsieve.families.parts.sampling import count_of, from_first_to_last
from gridsieve.services.preprocessing.prompt.layout import Expansion
from gridsieve.services.preprocessing.video.sampling import FrameBounds
from gridsieve.services.preprocessing.video.timing import TimeBase

_MAX_TILES = 12
# Of the model type in other layouts: images and frames of any size, slices of several frames.
_OF_OTHERS = ("min_num_patches", "video_target_num_patches", "video_target_img_size", "video_temporal_patch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronNanoVL(InternVL):
    """Nothing but what is written below differs from InternVL."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> NemotronNanoVL:
        config = checkpoint.config
        vision = config.part("vision_config")
        stated = {**vision.part("args"), **vision}
        for name in _OF_OTHERS:
            if (value := stated.get(name)) not in (None, 1):
                raise StartupError(f"vision_config: {name} {value!r} is not supported for {checkpoint.model_type}")
        if config.get("use_thumbnail", True) is not True:
            raise StartupError(f"use_thumbnail {config['use_thumbnail']!r} is not supported, only true")
        token = str(config.get("img_context_token", "<image>"))
        return cls(
            placeholders={Modality.IMAGE: token, Modality.VIDEO: str(config.get("video_context_token", "<video>"))},
            pad=token,
            token_px=round(config.whole("patch_size", 16) / config.number("downsample_ratio", 0.5)),
            frame_bounds=FrameBounds(fps=2.0, min_frames=1, max_frames=128, temporal_patch=1),
            frame_dtype=DType.FLOAT32,
            fixed_tokens=True,
            side_px=config.whole("force_image_size"),
            start=str(config.get("img_start_token", "<img>")),
            end=str(config.get("img_end_token", "</img>")),
            tiles=(1, checkpoint.processor("image").whole("max_num_tiles", _MAX_TILES)),
        )

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """Evenly spaced from the first to the last frame; one is the first."""
        return from_first_to_last(total_frames, count_of(total_frames, average_rate, bounds))

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """For each frame its time and its tokens; of an image its tokens."""
        return timed_slices(grid, base, 1, self.start, self.end)
