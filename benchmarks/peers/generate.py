"""The baseline: transformers' `generate`, unpruned, in this process.

transformers' video processor needs torchvision, which is not installed, so its steps (decode every frame, bicubic
resize of uint8, normalise, patchify) are reimplemented here. The model, positions and decoding loop are transformers'.
"""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from benchmarks.timing import Clock, Timed
from gridsieve.common.checkpoint import Checkpoint


class Peer:
    """transformers' Qwen2.5-VL with one checkpoint."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        checkpoint = Checkpoint(folder)
        self._video = checkpoint.read_json("video_preprocessor_config.json")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        self._model.eval()

    def ask(self, clip: bytes, question: str, max_new_tokens: int, min_new_tokens: int = 0) -> Timed:
        start = time.perf_counter()
        inputs = self._inputs(clip, question)
        streamer = Clock()
        with torch.inference_mode():
            ids = self._model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                min_new_tokens=min_new_tokens,
                do_sample=False,
                streamer=streamer,
            )
        total_s = time.perf_counter() - start
        return Timed(streamer.times[1] - start, total_s, ids.shape[1] - inputs["input_ids"].shape[1])

    def _inputs(self, clip: bytes, question: str) -> dict[str, Any]:
        frames, seconds_per_grid = self._frames(clip)
        patches, grid = self._patchify(frames)
        turn = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]}
        text = self._tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
        pad = "<|video_pad|>"
        text = text.replace(pad, pad * (grid[0] * grid[1] * grid[2] // self._video["merge_size"] ** 2))
        ids = self._tokenizer(text, return_tensors="pt")["input_ids"]
        is_video = ids == self._tokenizer.convert_tokens_to_ids(pad)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": is_video.int() * 2,
            "pixel_values_videos": patches,
            "video_grid_thw": torch.tensor([grid]),
            "second_per_grid_ts": torch.tensor([seconds_per_grid]),
        }

    def _frames(self, clip: bytes) -> tuple[Tensor, float]:
        """uint8 [F, 3, H, W]: decodes all frames and samples them at the checkpoint's frame rate."""
        with av.open(io.BytesIO(clip), "r") as container:
            rate = float(container.streams.video[0].average_rate or 1)
            decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        wanted = len(decoded) / rate * self._video["fps"]
        wanted = min(max(wanted, self._video["min_frames"]), self._video["max_frames"], len(decoded))
        count = int(wanted // 2 * 2)
        indices = torch.arange(0, len(decoded), len(decoded) / count).int()
        frames = torch.from_numpy(np.stack([decoded[index] for index in indices])).permute(0, 3, 1, 2)
        return frames, 2 / (count / len(decoded) * rate)

    def _patchify(self, frames: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        config = self._video
        patch, merge = config["patch_size"], config["merge_size"]
        size = config["size"]
        height, width = smart_resize(
            frames.shape[-2],
            frames.shape[-1],
            factor=patch * merge,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )
        resized = F.interpolate(frames, (height, width), mode="bicubic", antialias=True)
        mean, std = (torch.tensor(config[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
        pixels = (resized / 255 - mean) / std
        t, h, w = len(frames) // 2, height // patch, width // patch
        grid = pixels.view(t, 2, 3, h // merge, merge, patch, w // merge, merge, patch)
        return grid.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1), (t, h, w)
