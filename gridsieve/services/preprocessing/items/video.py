"""The item of a video: of a video file, or of pictures that follow each other in one file."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import partial

from gridsieve.common.contract.errors import InvalidRequest, MediaDamaged
from gridsieve.common.contract.plan import SHOTS, UNIFORM, FileFacts, FrameShape, Modality, SizePx
from gridsieve.services.preprocessing.items.item import Item, packed_base, packed_views, too_large
from gridsieve.services.preprocessing.items.readers import Readers
from gridsieve.services.preprocessing.layouts.family import Family
from gridsieve.services.preprocessing.prompt.layout import ImageLayout
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.packets import PacketIndex
from gridsieve.services.preprocessing.video.pictures import PictureFrames, PictureIndex
from gridsieve.services.preprocessing.video.resize import shrink_to
from gridsieve.services.preprocessing.video.sampling import FindPlaces, FrameSampling, FrameTimes, Sampled, sample
from gridsieve.services.preprocessing.video.slices import PlannedVideo
from gridsieve.services.preprocessing.video.timing import TimeBase


@dataclass(frozen=True, slots=True, eq=False)
class _Frames:
    """All frames of a video: where they are in its file, and when each is shown.

    by_time: positions of slices follow their own times. find: as of `sample`.
    """

    source: Source
    index: PacketIndex | PictureIndex
    times: FrameTimes
    by_time: bool = False
    find: FindPlaces | None = None


def video_item(family: Family, source: Source, index: PacketIndex, sampling: FrameSampling, readers: Readers) -> Item:
    """The item of a video file.

    Raises InvalidRequest for frames that the file does not have or tell, MediaDamaged, MediaRejected for sides that are
    too long, PromptTooLong for too many tokens, and what the readers raise.
    """
    find = _find(index, sampling.mode, partial(readers.shots, source, index))
    item = _item(family, _Frames(source, index, index.times, find=find), sampling)
    return replace(item, file=FileFacts(_missing(index, sampling), index.dropped_frames))


def pictures_item(
    family: Family, source: Source, index: PictureIndex, pictures: PictureFrames, sampling: FrameSampling
) -> Item:
    """The item of a video of pictures: of all, unless `sampling` chooses. Raises as `video_item`."""
    if sampling.mode == SHOTS:
        text, remedy = "shots is for video files, not for pictures", f"set `frame_sampling.mode` to {UNIFORM}"
        raise InvalidRequest(text, field="frame_sampling.mode", value=SHOTS, remedy=remedy)
    if not sampling.chooses_frames:
        sampling = replace(sampling, frame_indices=tuple(range(len(pictures.ends))), mode=None)
    times = FrameTimes.of_seconds(pictures.timestamps_s)
    # Each picture is a keyframe, so that nothing need be found.
    return _item(family, _Frames(source, index, times, pictures.by_time), sampling)


def _item(family: Family, video: _Frames, sampling: FrameSampling) -> Item:
    sampled = sample(video.times, family.frame_bounds, sampling, family.sample_indices, video.find)
    group = _group_frames(family, sampled)
    slice_frames = group or family.frame_bounds.temporal_patch
    base = _time_base(family, video, sampled, slice_frames)
    source_px = video.index.height_px, video.index.width_px
    frames = len(sampled.places)
    places = struct.pack(f"<{frames}q", *sampled.places)
    # Of a group each frame's own time becomes part of its tokens.
    in_groups = struct.pack(f"<q{frames}d", group, *sampled.timestamps_s) if group else b""
    with too_large():
        laid = family.sliced_video(*source_px, frames, sampling)
        laid = laid or _whole_frames(family, source_px, sampled, sampling, group, base)
    sent = b"".join(packed_views(laid, source_px))
    shape = replace(laid.frames, dtype=family.frame_dtype)
    return Item(
        modality=Modality.VIDEO,
        planned=PlannedVideo(
            video.source,
            video.index,
            sampled.places,
            slice_frames,
            shape.size_px,
            laid.views,
            shape.tile_px,
            shape.dtype,
        ),
        frames=shape,
        grid=laid.grid,
        expansion=laid.expansion,
        base=base,
        timestamps_s=tuple(time for time in sampled.timestamps_s for _ in laid.views),
        content=(b"video", video.source.digest, sent, places, packed_base(base), in_groups),
        sampling_mode="" if sampling.frame_indices else sampling.mode or UNIFORM,
    )


def _group_frames(family: Family, sampled: Sampled) -> int:
    """Frames of a group, where the family sends them in groups; else 0."""
    bounds = family.frame_bounds
    frame_s = sampled.seconds_per_grid / bounds.temporal_patch
    return bounds.group_frames(len(sampled.places), frame_s * sampled.frames) if bounds.group_frames else 0


def _time_base(family: Family, video: _Frames, sampled: Sampled, slice_frames: int) -> TimeBase:
    times, source_fps = video.times, sampled.source_fps
    frame_s = sampled.seconds_per_grid / family.frame_bounds.temporal_patch
    of_first = family.timed_by_first
    base = TimeBase.of_frames(slice_frames * frame_s, sampled.timestamps_s, slice_frames, of_first=of_first)
    firsts = sampled.places[::slice_frames] if video.by_time else ()
    return replace(
        base,
        frames_s=sampled.timestamps_s[: sampled.frames],
        source_fps=source_fps,
        length_s=len(times.ticks) / source_fps if source_fps else times.length_s,
        starts_s=tuple(times.ticks[place] * times.time_base for place in firsts),
    )


def _whole_frames(
    family: Family, source_px: SizePx, sampled: Sampled, sampling: FrameSampling, group: int, base: TimeBase
) -> ImageLayout:
    """The layout of a video whose frames are sent as a whole alone. group: frames of a group; 0 without."""
    size = family.video_size(*source_px, sampled.frames, sampling)
    if sampling.max_pixels is not None:
        size = shrink_to(*size, family.token_px, sampling.max_pixels)
    frames = len(sampled.places)
    grid = family.video_grid(-(-frames // (group or 1)), *size)
    shape, view = FrameShape(frames, size, group_frames=group), family.video_view(*source_px, size)
    return ImageLayout(shape, (view,), grid, family.expansion(grid, base))


def _find(index: PacketIndex, mode: str | None, shots: FindPlaces) -> FindPlaces | None:
    """What finds the frames that a mode chooses by. Raises InvalidRequest where the container does not tell."""
    if mode in (None, UNIFORM):
        return None
    if not index.keyframes:
        raise InvalidRequest(
            f"{mode} is not possible: the container does not tell which frames are keyframes",
            field="frame_sampling.mode",
            value=mode,
            remedy=f"set `frame_sampling.mode` to {UNIFORM}, or put the video into an MP4 or Matroska file",
        )
    return shots if mode == SHOTS else index.keyframe_places


def _missing(index: PacketIndex, sampling: FrameSampling) -> int:
    """Promised frames that the file lacks in the wanted part. Raises MediaDamaged if they are more than a tenth."""
    found, missing = len(index.times.ticks), index.missing_frames
    if sampling.end_s is not None and sampling.end_s <= index.times.length_s:
        return 0
    if missing * 10 > found + missing and not sampling.allow_truncated:
        raise MediaDamaged(
            f"is cut off: {missing} of its {found + missing} frames are missing, at most a tenth may be",
            remedy=f"`frame_sampling.allow_truncated` accepts the other {found}",
        )
    return missing
