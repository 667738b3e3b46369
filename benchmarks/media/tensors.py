"""From decoded frames to the tower's input: our uint8 slices against transformers' float patches.

Ours is preprocessing's work: it resizes each frame into its slice and sends the slice. Theirs is what
Qwen2VLVideoProcessor of transformers 5.24 does on a CPU, with the same operations but without torchvision. Splitting
uint8 frames into patches is the encoder's work and has its own row.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.clips import clip, pictures
from benchmarks.table import Row, Timings
from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.video.decode import decode_frames
from gridsieve.services.preprocessing.video.packets import read_packets
from gridsieve.services.preprocessing.video.resize import PixelBudget, resize_into, smart_resize

FRAMES, HEIGHT_PX, WIDTH_PX = 32, 720, 1280
PATCH_PX, MERGE, TEMPORAL_PATCH = 14, 2, 2
# The limits of qwen-vl-utils for a video frame: 128 to 768 tokens.
SENT_PX = smart_resize(HEIGHT_PX, WIDTH_PX, PixelBudget(PATCH_PX * MERGE, 128 * 28 * 28, 768 * 28 * 28))
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def ours(frames: NDArray[np.uint8]) -> list[Any]:
    """One uint8 [2, h, w, 3] per slice."""
    slices = []
    for first in range(0, len(frames), TEMPORAL_PATCH):
        pixels = np.empty((TEMPORAL_PATCH, *SENT_PX, 3), np.uint8)
        for row, frame in zip(pixels, frames[first:], strict=False):
            resize_into(frame, row)
        slices.append(pixels)
    return slices


def ours_in_patches(frames: NDArray[np.uint8]) -> list[Any]:
    """One uint8 (patches, values) per slice: the input of the encoder's tower."""
    import torch

    from gridsieve.services.encoder.tower.packing import TowerShape
    from gridsieve.services.encoder.tower.patches import PatchShape, patchify

    shape = PatchShape(PATCH_PX, TowerShape(MERGE), TEMPORAL_PATCH)
    return [patchify(torch.from_numpy(pixels), shape) for pixels in ours(frames)]


def theirs(frames: NDArray[np.uint8]) -> list[Any]:
    """transformers' float32 (patches, values)."""
    import torch
    import torch.nn.functional as F

    video = torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous()
    video = F.interpolate(video, size=SENT_PX, mode="bicubic", antialias=True)
    mean, std = (torch.tensor(values).mul(255).view(3, 1, 1) for values in (MEAN, STD))
    values = video.to(torch.float32).sub_(mean).div_(std)
    rows, columns = (side // PATCH_PX // MERGE for side in SENT_PX)
    cut = values.view(
        1, len(frames) // TEMPORAL_PATCH, TEMPORAL_PATCH, 3, rows, MERGE, PATCH_PX, columns, MERGE, PATCH_PX
    )
    patches = cut.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
    return [patches.reshape(-1, 3 * TEMPORAL_PATCH * PATCH_PX**2)]


CONTENDERS: Mapping[str, Callable[[NDArray[np.uint8]], list[Any]]] = {
    "ours": ours,
    "ours in patches": ours_in_patches,
    "transformers": theirs,
}


def tensors(rounds: int) -> list[Row]:
    """Time, bytes and peak memory after decoding, and the time of decoding itself."""
    frames = np.stack(list(pictures(FRAMES, HEIGHT_PX, WIDTH_PX)))
    data = clip(FRAMES, HEIGHT_PX, WIDTH_PX, FRAMES)
    timings, size_bytes = Timings(), {}
    for number in range(rounds + 1):
        for name, contender in CONTENDERS.items():
            start = time.perf_counter()
            made = contender(frames)
            if number:  # the first fills caches
                timings.add(name, time.perf_counter() - start)
            size_bytes[name] = sum(each.nbytes for each in made)
            del made
        start = time.perf_counter()
        source = bytes_source("clip", data)
        for _ in decode_frames(source, read_packets(source), range(FRAMES)):
            pass
        timings.add("decoding", time.perf_counter() - start)
    peak_bytes = Timings()
    for _ in range(min(rounds, 5)):
        for name in ("ours", "transformers"):
            peak_bytes.add(name, _peak_bytes_of(name))
    what = f"{FRAMES} frames of {WIDTH_PX}×{HEIGHT_PX} to {SENT_PX[1]}×{SENT_PX[0]}"
    other, theirs_s = "transformers", timings.median("transformers")
    return [
        Row(f"{what}: time", other, timings.median("ours"), theirs_s, "s", at_most=0.4),
        Row("the same, cut into patches in the encoder", other, timings.median("ours in patches"), theirs_s, "s"),
        Row(f"{what}: bytes", other, size_bytes["ours"], size_bytes[other], "bytes", at_most=0.26),
        Row(f"{what}: peak memory", other, peak_bytes.median("ours"), peak_bytes.median(other), "bytes", at_most=1 / 3),
        Row("decoding them, beside resizing them", "ours", timings.median("decoding"), timings.median("ours"), "s"),
    ]


def _peak_bytes_of(name: str) -> int:
    """Peak memory in a new process, above that with the decoded frames."""
    command = [sys.executable, "-m", "benchmarks.media.tensors", name]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    peak_bytes: int = json.loads(found.stdout)
    return peak_bytes


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


def _print_peak(name: str) -> None:
    frames = np.empty((FRAMES, HEIGHT_PX, WIDTH_PX, 3), np.uint8)
    for row, picture in zip(frames, pictures(FRAMES, HEIGHT_PX, WIDTH_PX), strict=True):
        row[:] = picture
    CONTENDERS[name](frames[:TEMPORAL_PATCH])  # loads libraries that are loaded on first use
    ctypes.CDLL(None).malloc_trim(0)  # otherwise freed memory counts as held
    held_bytes = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    made = CONTENDERS[name](frames)
    print(json.dumps(_status_bytes("VmHWM") - held_bytes))
    del made


if __name__ == "__main__":
    _print_peak(sys.argv[1])
