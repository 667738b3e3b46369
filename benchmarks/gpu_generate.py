"""transformers' `generate` on a device, unpruned, with the checkpoint of a run."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForImageTextToText

from benchmarks import gpu_device
from benchmarks.engine_contenders import Clock
from benchmarks.timing import Timed
from common.checkpoint import Checkpoint
from common.contract.plan import Modality
from services.preprocessing.conversation import Conversation, MediaRequest
from services.preprocessing.planner import Planner
from services.preprocessing.prompt.tokens import Turn
from services.preprocessing.video.sampling import FrameSampling


class Generate:
    """The whole model. Prompts and frames of clips come from Framesieve's preprocessing, in this process."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        checkpoint = Checkpoint(folder)
        self._planner = Planner(checkpoint, None)
        self._video = checkpoint.read_json("video_preprocessor_config.json")
        self._device, self._dtype = device, dtype
        model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
        self._model = model.to(device).eval()

    def answer(self, prompts: NDArray[np.int32], new_tokens: int) -> tuple[float, float]:
        """Seconds to the first tokens of all prompts, int32 [R, T], and the median between two tokens."""
        ids = torch.from_numpy(prompts).long().to(self._device)
        start, clock = time.perf_counter(), Clock()
        self._generate(clock, new_tokens, input_ids=ids, attention_mask=torch.ones_like(ids))
        times = clock.times[1:]  # the first is that of the prompts
        return times[0] - start, median(np.diff(times).tolist()) if new_tokens > 1 else 0.0

    def ask(self, clip: bytes, question: str, new_tokens: int) -> Timed:
        """Answers a question about a clip."""
        start, clock = time.perf_counter(), Clock()
        turn = Turn("user", (Modality.VIDEO, question))
        planned = self._planner.plan(
            Conversation((turn,), (MediaRequest("video", Modality.VIDEO, clip, FrameSampling()),))
        )
        with planned.files:
            frames = torch.from_numpy(np.concatenate([each.pixels for each in planned.media[0].slices()]))
        patches, grid = self._patches(frames.to(self._device))
        ids = torch.from_numpy(planned.plan.input_ids).long().to(self._device)[None]
        config, timed = self._model.config, {}
        if config.model_type == "qwen2_5_vl":  # Qwen3-VL's prompt has timestamps instead
            timed["second_per_grid_ts"] = torch.tensor([float(planned.plan.media[0].seconds_per_grid or 0)])
        self._generate(
            clock,
            new_tokens,
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == config.video_token_id).int() * 2,
            pixel_values_videos=patches,
            video_grid_thw=torch.tensor([grid], device=self._device),
            **timed,
        )
        return Timed(clock.times[1] - start, time.perf_counter() - start, new_tokens)

    @torch.inference_mode()
    def _generate(self, clock: Clock, new_tokens: int, **inputs: Tensor) -> None:
        self._model.generate(**inputs, max_new_tokens=new_tokens, eos_token_id=None, do_sample=False, streamer=clock)
        gpu_device.wait(self._device)

    def _patches(self, frames: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Patches as transformers takes them, and their grid. frames: uint8 [F, H, W, 3]."""
        config = self._video
        patch, merge, temporal = (config[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
        mean, std = (torch.tensor(config[name], device=frames.device) for name in ("image_mean", "image_std"))
        t, h, w = len(frames) // temporal, frames.shape[1] // patch, frames.shape[2] // patch
        pixels = ((frames / 255 - mean) / std).to(self._dtype)
        grid = pixels.view(t, temporal, h // merge, merge, patch, w // merge, merge, patch, 3)
        return grid.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(t * h * w, -1), (t, h, w)
