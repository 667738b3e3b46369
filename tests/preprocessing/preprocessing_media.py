"""Clips whose frames show their numbers, and transformers' own functions as oracles.

transformers' video processors cannot be imported without torchvision, so their source is compiled here without it;
its text processors are made without their `__init__`, which asks for those.
"""

from __future__ import annotations

import ast
import io
import math
import tempfile
import wave
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import torch
import transformers
from av.video.stream import VideoStream
from numpy.typing import NDArray
from transformers.models.cosmos3_edge.processing_cosmos3_edge import Cosmos3EdgeProcessor
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.video_llama_3.processing_video_llama_3 import VideoLlama3Processor

BLOCK_PX = 16
BITS = 12
HEIGHT_PX, WIDTH_PX = 48, 64
# Three B-frames in a row, a keyframe every 12 frames.
B_FRAMES = {"g": "12", "bf": "3", "x264-params": "b-adapt=0:scenecut=0"}


def picture_of(number: int) -> NDArray[np.uint8]:
    """uint8 [48, 64, 3] that shows the number in 12 black or white blocks."""
    bits = np.array([number >> bit & 1 for bit in range(BITS)], np.uint8).reshape(3, 4) * 255
    return np.repeat(np.kron(bits, np.ones((BLOCK_PX, BLOCK_PX), np.uint8))[..., None], 3, axis=2)


def number_of(pixels: NDArray[np.uint8]) -> int:
    """The number that a decoded frame shows."""
    middle = pixels[BLOCK_PX // 2 :: BLOCK_PX, BLOCK_PX // 2 :: BLOCK_PX, 0].reshape(-1) > 127
    return int(sum(1 << bit for bit, on in enumerate(middle) if on))


def clip(
    frames: int,
    rate: Fraction | int = 30,
    container: str = "mp4",
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    pts: Sequence[int] | None = None,
    time_base: Fraction | None = None,
    container_options: dict[str, str] | None = None,
    pixel_format: str | None = None,
    size: tuple[int, int] = (HEIGHT_PX, WIDTH_PX),
    prepare: Callable[[VideoStream], None] | None = None,
) -> bytes:
    """An encoded clip; frame n shows n. pts: presentation times in time_base, for a variable rate.

    size: at least that of `picture_of`, whose last row and column are repeated. prepare: sets anything else.
    """
    pixels = pixel_format or ("yuvj420p" if codec == "mjpeg" else "yuv420p")
    border = ((0, size[0] - HEIGHT_PX), (0, size[1] - WIDTH_PX), (0, 0))
    with tempfile.NamedTemporaryFile() as file:
        with av.open(file.name, "w", format=container, options=container_options or {}) as output:
            stream = output.add_stream(codec, rate=rate)
            assert isinstance(stream, VideoStream)
            stream.height, stream.width, stream.pix_fmt = *size, pixels
            stream.options = {**(options or {})}
            stream.codec_context.thread_count = 1
            if time_base is not None:
                stream.codec_context.time_base = time_base
            if prepare is not None:
                prepare(stream)
            for number in range(frames):
                frame = av.VideoFrame.from_ndarray(np.pad(picture_of(number), border, "edge"), format="rgb24")
                if pts is not None:
                    frame.pts, frame.time_base = pts[number], time_base
                output.mux(stream.encode(frame))
            output.mux(stream.encode())
        return Path(file.name).read_bytes()


def shifted(data: bytes, container: str, by_s: Fraction) -> bytes:
    """The same packets in another container, all times later by `by_s`; of mp4, an edit list hides what is before 0."""
    options = {"avoid_negative_ts": "disabled"}
    with tempfile.NamedTemporaryFile() as file:
        with (
            av.open(io.BytesIO(data), "r") as original,
            av.open(file.name, "w", format=container, options=options) as output,
        ):
            video = original.streams.video[0]
            stream = output.add_stream_from_template(video)
            for packet in original.demux(video):
                if packet.size:
                    assert packet.pts is not None
                    assert packet.dts is not None
                    ticks = int(by_s / packet.time_base)
                    packet.pts, packet.dts = packet.pts + ticks, packet.dts + ticks
                    packet.stream = stream
                    output.mux(packet)
        return Path(file.name).read_bytes()


def restamped(data: bytes, change: Callable[[int], tuple[float, float]]) -> bytes:
    """A transport stream whose frame n, counted in decoding order, has its pts and dts moved by change(n) seconds."""
    made, number = bytearray(data), 0
    for packet in range(0, len(data), 188):
        start = packet + 4 + (1 + data[packet + 4] if data[packet + 3] & 0x20 else 0)
        if not data[packet + 1] & 0x40 or data[start : start + 4] != b"\0\0\1\xe0":
            continue
        stamps = (start + 9, start + 14) if data[start + 7] & 0x40 else (start + 9,)
        for at, by_s in zip(stamps, change(number), strict=False):
            old = data[at : at + 5]
            ticks = (old[0] >> 1 & 7) << 30 | old[1] << 22 | old[2] >> 1 << 15 | old[3] << 7 | old[4] >> 1
            ticks = (ticks + round(90_000 * by_s)) % 2**33
            parts = (old[0] & 0xF0 | ticks >> 29 & 14 | 1, ticks >> 22 & 255, ticks >> 14 & 254 | 1, ticks >> 7 & 255)
            made[at : at + 5] = bytes((*parts, ticks << 1 & 254 | 1))
        number += 1
    assert number >= 30
    return bytes(made)


def sound() -> bytes:
    """A file with sound and no picture."""
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setparams((1, 2, 16_000, 0, "NONE", ""))
        made.writeframes(bytes(32_000))
    return file.getvalue()


def without_packets(data: bytes, numbers: Sequence[int]) -> bytes:
    """The same clip with the contents of some packets, counted in the order of the file, overwritten by zeros."""
    damaged = bytearray(data)
    with av.open(io.BytesIO(data), "r") as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
        for number in numbers:
            start = data.index(bytes(packets[number]))
            damaged[start : start + packets[number].size] = bytes(packets[number].size)
    return bytes(damaged)


def decoded_in_order(data: bytes) -> list[NDArray[np.uint8]]:
    """Every frame, decoded from the first to the last without seeking."""
    with av.open(io.BytesIO(data), "r") as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]  # type: ignore[misc]


class _Size(SimpleNamespace):
    """Replaces the SizeDict of transformers."""


class _Base:
    def resize(self, image: Any, size: _Size, resample: Any) -> tuple[int, int]:
        return size.height, size.width


# For each family: module and class of its video processor, and the class that expands placeholders.
_PROCESSORS: Mapping[str, tuple[str, str, Any]] = {
    "cosmos3_edge": ("cosmos3_edge", "Cosmos3EdgeVideoProcessor", Cosmos3EdgeProcessor),
    "qwen2_vl": ("qwen2_vl", "Qwen2VLVideoProcessor", Qwen2VLProcessor),
    "qwen2_5_vl": ("qwen2_vl", "Qwen2VLVideoProcessor", Qwen2_5_VLProcessor),
    "qwen3_5": ("qwen3_vl", "Qwen3VLVideoProcessor", Qwen3VLProcessor),
    "qwen3_5_moe": ("qwen3_vl", "Qwen3VLVideoProcessor", Qwen3VLProcessor),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLVideoProcessor", Qwen3VLProcessor),
    "qwen3_vl_moe": ("qwen3_vl", "Qwen3VLVideoProcessor", Qwen3VLProcessor),
    "glm4v": ("glm4v", "Glm4vVideoProcessor", Glm4vProcessor),
    "glm46v": ("glm46v", "Glm46VVideoProcessor", Glm46VProcessor),
    "video_llama_3": ("video_llama_3", "VideoLlama3VideoProcessor", VideoLlama3Processor),
}


# Frames of a patch, of families whose images are sized as videos of one patch.
_TEMPORAL = {"cosmos3_edge": 1, "glm4v": 2, "glm46v": 2}


@cache
def _compiled(module: str, name: str) -> dict[str, Any]:
    path = Path(transformers.__file__).parent / f"models/{module}/video_processing_{module}.py"
    wanted = {"smart_resize", name}
    nodes: list[Any] = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) in wanted]
    assert len(nodes) == len(wanted)
    for node in nodes:
        node.decorator_list = []
    names: dict[str, Any] = {
        "math": math,
        "np": np,
        "torch": torch,
        "BaseVideoProcessor": _Base,
        "SizeDict": _Size,
        "PILImageResampling": SimpleNamespace(BICUBIC=3),
    }
    unused = ("OPENAI_CLIP_MEAN", "OPENAI_CLIP_STD", "IMAGENET_STANDARD_MEAN", "IMAGENET_STANDARD_STD")
    names |= dict.fromkeys((*unused, f"{name}InitKwargs"))
    flags = annotations.compiler_flag
    exec(compile(ast.Module(nodes, []), str(path), "exec", flags=flags), names)
    return names


def transformers_video_processor(family: str) -> Any:
    """An instance of the family's own class with the class's own settings."""
    module, name, _ = _PROCESSORS[family]
    return object.__new__(_compiled(module, name)[name])


def transformers_processor(family: str, merge: int, temporal_patch: int) -> Any:
    """The family's processor, with its `replace_…_token` and `get_text_with_replacements`."""
    processor = object.__new__(_PROCESSORS[family][2])
    processor.image_processor = SimpleNamespace(merge_size=merge)
    processor.video_processor = SimpleNamespace(merge_size=merge, temporal_patch_size=temporal_patch)
    of_glm = family.startswith("glm")
    processor.image_token, processor.video_token = (
        ("<|image|>", "<|video|>") if of_glm else ("<|image_pad|>", "<|video_pad|>")
    )
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    return processor


def transformers_image_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int, family: str) -> Any:
    """The size of the family's image processor. Raises ValueError."""
    if family not in _TEMPORAL:
        return transformers_smart_resize(height, width, factor, min_pixels, max_pixels)
    module, name, _ = _PROCESSORS[family]
    frames = _TEMPORAL[family]
    return _compiled(module, name)["smart_resize"](frames, height, width, frames, factor, min_pixels, max_pixels)


def transformers_smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> Any:
    """The size of Qwen2-VL's image processor, which every family of Qwen uses."""
    smart_resize = _compiled("qwen2_vl", "Qwen2VLVideoProcessor")["smart_resize"]
    return smart_resize(height, width, factor, min_pixels, max_pixels)


def transformers_indices(
    frames: int, rate: float, fps: float, min_frames: int, max_frames: int, family: str = "qwen2_5_vl"
) -> list[int]:
    """The result of the family's `sample_frames`; of GLM without the frame that it repeats to make them even."""
    processor = transformers_video_processor(family)
    processor.num_frames, processor.min_frames, processor.max_frames = None, min_frames, max_frames
    metadata = SimpleNamespace(total_num_frames=frames, fps=rate, duration=frames / rate)
    indices: list[int] = processor.sample_frames(metadata, fps=fps).tolist()
    return list(dict.fromkeys(indices)) if family.startswith("glm") else indices


def transformers_video_size(
    frames: int, height: int, width: int, factor: int, low: int, high: int, max_tokens: int | None, family: str
) -> tuple[int, int]:
    """The size of the family's `resize`, with cap_pixels_per_frame if max_tokens is set. Raises ValueError."""
    processor = transformers_video_processor(family)
    processor.max_video_tokens = max_tokens
    temporal = _TEMPORAL.get(family, 2)
    video = torch.empty(1, frames + (-frames % temporal if family in _TEMPORAL else 0), 3, height, width, device="meta")
    size = _Size(shortest_edge=low, longest_edge=high)
    if family in _TEMPORAL or family == "video_llama_3":
        resized: tuple[int, int] = processor.resize(video, size, None, factor=factor, temporal_factor=temporal)
    else:
        resized = processor.resize(video, size, None, factor, 2, max_tokens is not None)
    return resized
