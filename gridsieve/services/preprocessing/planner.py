"""Plans a prompt: opens and indexes its media, selects frames and lays out the prompt. Decodes nothing.

A video whose sound is heard becomes two items, itself and its sound, of one placeholder.

It runs on a thread and knows neither grpc nor protobuf nor metrics.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TypeAlias

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest, MediaDamaged, MediaRejected, PromptTooLong, within
from gridsieve.common.contract.plan import (
    MAX_FRAME_SIDE_PX,
    MAX_PROMPT_TOKENS,
    SHOTS,
    UNIFORM,
    FileFacts,
    FrameShape,
    Grid,
    MediaPlan,
    Modality,
    PromptPlan,
    SizePx,
    salted,
    tagged_digest,
)
from gridsieve.common.contract.tensors import DType
from gridsieve.services.preprocessing.conversation import Conversation, FileUrl, MediaRequest, Upload
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.prompt.embeds import Embeds
from gridsieve.services.preprocessing.prompt.layout import Expansion, ImageLayout, lay_out
from gridsieve.services.preprocessing.prompt.tokens import ChatTokens
from gridsieve.services.preprocessing.prompt.turns import Turn
from gridsieve.services.preprocessing.sound.planned import PlannedSound
from gridsieve.services.preprocessing.sound.track import SoundIndex, read_sound
from gridsieve.services.preprocessing.sources.digests import Digests, digests
from gridsieve.services.preprocessing.sources.source import Source, bytes_source, path_source
from gridsieve.services.preprocessing.video.packets import PacketIndex, read_packets
from gridsieve.services.preprocessing.video.pictures import PictureIndex, is_picture, read_pictures
from gridsieve.services.preprocessing.video.resize import shrink_to
from gridsieve.services.preprocessing.video.sampling import (
    FindPlaces,
    FrameSampling,
    FrameTimes,
    Sampled,
    sample,
)
from gridsieve.services.preprocessing.video.shots import find_shots
from gridsieve.services.preprocessing.video.slices import PlannedEmbeds, PlannedVideo
from gridsieve.services.preprocessing.video.timing import TimeBase

PlannedMedia: TypeAlias = PlannedVideo | PlannedSound | PlannedEmbeds

_TICKS_PER_S = 1_000_000
_MEDIA_DOMAIN, _PICTURES_DOMAIN = b"gridsieve media v2", b"gridsieve pictures v1"


@dataclass(frozen=True, slots=True, eq=False)
class PlannedPrompt:
    """A plan, its media ready to be decoded, their open files, which the caller closes, and the time it took."""

    plan: PromptPlan
    media: tuple[PlannedMedia, ...]
    files: ExitStack
    plan_s: float


@dataclass(frozen=True, slots=True)
class _Opened:
    """A media item whose modality is known. source: None for embeddings. picture: of an image."""

    request: MediaRequest
    modality: Modality
    source: Source | None = None
    picture: PictureIndex | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """A media item between opening and layout. content: everything that its tokens depend on. expansion: None for the
    sound of a video, whose expansion has its parts."""

    modality: Modality
    planned: PlannedMedia
    frames: FrameShape
    grid: Grid
    expansion: Expansion | None
    content: tuple[bytes, ...]
    base: TimeBase | None = None
    timestamps_s: tuple[float, ...] = ()
    file: FileFacts = field(default=FileFacts())
    heard_s: float = 0.0
    sampling_mode: str = ""


@dataclass(frozen=True, slots=True)
class Readers:
    """Functions that read a video's packets and pictures' headers, find the shots of a part of a video, and read a
    sound track: in this process, or in workers for untrusted files.

    check_cancelled: called between steps of the plan; an exception from it ends the plan.
    """

    packets: Callable[[Source], PacketIndex] = read_packets
    pictures: Callable[[Source, tuple[int, ...]], PictureIndex] = read_pictures
    check_cancelled: Callable[[], None] = lambda: None
    shots: Callable[[Source, PacketIndex, int, int], Sequence[int]] = find_shots
    sound: Callable[[Source], SoundIndex | None] = read_sound


class Planner:
    """Plans prompts for one checkpoint. Raises StartupError for one that it cannot serve."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        media_root: Path | None,
        media_max_bytes: float = math.inf,
        known: Digests | None = None,
        upload_root: Path | None = None,
    ) -> None:
        """media_root: of paths and file URLs. upload_root: of uploaded files. media_max_bytes: limit on files below
        them; larger ones are rejected unread. known: their digests, kept from one request to the next."""
        self._family = load_family(checkpoint)
        self._tokens = ChatTokens(checkpoint, self._family)
        self._fingerprint = checkpoint.fingerprint
        self._media_root = media_root
        self._upload_root = upload_root
        self._media_max_bytes = media_max_bytes
        self._known = known or digests()

    def plan(self, conversation: Conversation, readers: Readers = Readers()) -> PlannedPrompt:
        """Opens the media and lays the prompt out. The caller closes the result's files.

        The bytes decide whether media are images or videos; animations, which are both, are what the request says.
        Takes ownership of the conversation's sources, and closes them if it raises.
        Raises InvalidRequest, MediaRejected, MediaForbidden, PromptTooLong and Overloaded, and what the readers raise.
        """
        start = time.perf_counter()
        with ExitStack() as files:
            for request in conversation.media:
                if isinstance(request.location, Source):
                    files.callback(request.location.close)
            opened = [self._open(request, files, readers) for request in conversation.media]
            is_image = [each.modality is Modality.IMAGE for each in opened]
            items = [
                item
                for place, each in enumerate(opened)
                for item in self._items(each, readers, sum(is_image[:place]), sum(is_image))
            ]
            turns = _with_modalities(conversation.turns, [each.modality for each in opened])
            plan = self._lay_out(replace(conversation, turns=turns), items, readers.check_cancelled)
            media = tuple(item.planned for item in items)
            return PlannedPrompt(plan, media, files.pop_all(), time.perf_counter() - start)

    def _open(self, request: MediaRequest, files: ExitStack, readers: Readers) -> _Opened:
        readers.check_cancelled()
        if isinstance(request.location, Embeds):
            return _Opened(request, request.modality)
        self._check_wish(request)
        source = self._source(request, files, readers.check_cancelled)
        if request.modality is Modality.AUDIO:
            return _Opened(request, Modality.AUDIO, source)
        if request.frames is not None or not is_picture(source.head):
            return _Opened(request, Modality.VIDEO, source)
        picture = readers.pictures(source, ())
        if picture.moves and request.modality is Modality.VIDEO:
            return _Opened(request, Modality.VIDEO, source)
        return _Opened(request, Modality.IMAGE, source, picture)

    def _items(self, opened: _Opened, readers: Readers, image_index: int, images: int) -> list[_Item]:
        """The item of a medium; of a video whose sound is heard, it and its sound."""
        request = opened.request
        self._check_taken(opened.modality, request.name)
        if not request.hears:
            return [self._item(opened, readers, image_index, images)]
        self._check_taken(Modality.AUDIO, f"{request.name}.audio")
        if opened.modality is not Modality.VIDEO:
            raise InvalidRequest("is for videos, the file is an image", field=f"{request.name}.audio")
        video = self._item(opened, readers, image_index, images)
        assert opened.source is not None
        assert video.base is not None
        # Positions count from the first frame that is shown.
        begin_s = Fraction(round(video.timestamps_s[0] * _TICKS_PER_S), _TICKS_PER_S)
        with within(request.name):
            sound = self._sound(opened.source, request.sampling, readers, "audio", begin_s)
        expansion = self._family.clip(video.grid, video.base, sound.grid.tokens)
        return [replace(video, expansion=expansion), replace(sound, expansion=None)]

    def _check_taken(self, modality: Modality, name: str) -> None:
        """Raises InvalidRequest for media that the model does not take."""
        if modality not in self._family.placeholders:
            known = " and ".join(each.plural for each in self._family.placeholders)
            raise InvalidRequest(f"is not supported: this model takes {known} only", field=name)

    def _item(self, opened: _Opened, readers: Readers, image_index: int, images: int) -> _Item:
        request, source = opened.request, opened.source
        if source is None:
            make = partial(self._embeds, request, image_index)
        elif opened.picture is not None:
            make = partial(self._image, source, opened.picture, request, image_index, images)
        elif request.frames is not None:
            ends = request.frames.ends
            parts = source.digest, struct.pack(f"<{len(ends)}q", *ends)
            source = replace(source, digest=tagged_digest(_PICTURES_DOMAIN, parts))
            make = partial(self._pictures, source, readers.pictures(source, ends), request)
        elif opened.modality is Modality.AUDIO:
            make = partial(self._sound, source, request.sampling, readers)
        else:
            make = partial(self._file, source, readers.packets(source), request.sampling, readers)
        with within(request.name):  # errors name the item, or a field of it
            return make()

    def _source(self, request: MediaRequest, files: ExitStack, check_cancelled: Callable[[], None]) -> Source:
        read = check_cancelled, self._media_max_bytes, self._known
        match request.location:
            case Source() as fetched:
                return fetched
            case bytes() as data:
                source = bytes_source(request.name, data)
            case str() as path:
                source = path_source(request.name, path, self._media_root, *read)
            case FileUrl(path):
                source = path_source(request.name, path, self._media_root, *read, "url")
            case Upload(path):
                source = path_source(request.name, path, self._upload_root, *read, "url", "--upload-root")
            case _:
                raise AssertionError(f"{request.name} was neither fetched nor received")
        files.callback(source.close)
        return source

    def _embeds(self, request: MediaRequest, image_index: int) -> _Item:
        embeds = request.location
        assert isinstance(embeds, Embeds)
        base = embeds.time_base(self._family.frame_bounds.temporal_patch, of_first=self._family.timed_by_first)
        content = (b"embeds", embeds.digest, str(embeds.grid).encode(), _packed(base))
        if embeds.modality is Modality.IMAGE:
            expansion = self._family.embedded_image(embeds.grid, embeds.tile_columns, image_index)
        else:
            expansion = self._family.expansion(embeds.grid, base)
        return _Item(embeds.modality, PlannedEmbeds(), FrameShape(), embeds.grid, expansion, content, base)

    def _image(self, source: Source, picture: PictureIndex, request: MediaRequest, index: int, images: int) -> _Item:
        with _too_large():
            laid = self._family.image(picture.height_px, picture.width_px, request.sampling, index, images)
        picture_px = picture.height_px, picture.width_px
        frames = replace(laid.frames, dtype=self._family.frame_dtype)
        return _Item(
            modality=Modality.IMAGE,
            planned=PlannedVideo(source, picture, (0,), 1, frames.size_px, laid.views, frames.tile_px, frames.dtype),
            frames=frames,
            grid=laid.grid,
            expansion=laid.expansion,
            content=(b"image", source.digest, *_packed_views(laid, picture_px)),
            file=FileFacts(source_px=picture_px),
        )

    def _file(self, source: Source, index: PacketIndex, sampling: FrameSampling, readers: Readers) -> _Item:
        shots = partial(readers.shots, source, index)
        item = self._video(source, index, index.times, sampling, find=_find(index, sampling.mode, shots))
        return replace(item, file=FileFacts(_missing(index, sampling), index.dropped_frames))

    def _sound(
        self,
        source: Source,
        sampling: FrameSampling,
        readers: Readers,
        field: str | None = None,
        begin_s: Fraction | None = None,
    ) -> _Item:
        """field: of a video, which asks for its sound. begin_s: where the part begins that is heard; None: where
        `sampling` says, or with the track."""
        log_mel = self._family.log_mel
        assert log_mel is not None
        index = readers.sound(source)
        if index is None:
            raise InvalidRequest("is not possible: the file has no sound track", field=field)
        if begin_s is None:
            begin_s = index.start_s if sampling.start_s is None else Fraction(str(sampling.start_s))
        end_s = index.start_s + index.duration_s
        if sampling.end_s is not None:
            end_s = min(end_s, Fraction(str(sampling.end_s)))
        samples = max(0, math.floor((end_s - begin_s) * log_mel.rate))
        if log_mel.max_samples is not None and samples > log_mel.max_samples:
            most_s = f"{log_mel.max_samples / log_mel.rate:g}"
            raise InvalidRequest(
                f"lasts {samples / log_mel.rate:.3f} s, this model hears at most {most_s} s",
                field=field,
                value=samples / log_mel.rate,
                limit=most_s,
                remedy="set `frame_sampling.start_s` and `frame_sampling.end_s`",
            )
        planned = PlannedSound(source, index, begin_s, samples, log_mel)
        tokens = self._family.sound_tokens(log_mel.frames_of(samples))
        if not tokens:
            text = f"has {samples / log_mel.rate:.3f} s of sound from {float(begin_s):g} s on, too little for a token"
            raise InvalidRequest(text, field=field, value=samples / log_mel.rate)
        return _Item(
            modality=Modality.AUDIO,
            planned=planned,
            frames=FrameShape(1, planned.shape[1:3], dtype=DType.FLOAT32),
            grid=Grid(1, 1, tokens),
            expansion=self._family.sound(tokens),
            content=(b"sound", source.digest, f"{begin_s} {samples}".encode()),
            heard_s=float(planned.length_s),
        )

    def _pictures(self, source: Source, index: PictureIndex, request: MediaRequest) -> _Item:
        assert request.frames is not None
        sampling = request.sampling
        if sampling.mode == SHOTS:
            text, remedy = "shots is for video files, not for pictures", f"set `frame_sampling.mode` to {UNIFORM}"
            raise InvalidRequest(text, field="frame_sampling.mode", value=SHOTS, remedy=remedy)
        if not sampling.chooses_frames:
            sampling = replace(sampling, frame_indices=tuple(range(len(request.frames.ends))), mode=None)
        times = FrameTimes.of_seconds(request.frames.timestamps_s)
        return self._video(source, index, times, sampling, by_time=request.frames.by_time)

    def _video(
        self,
        source: Source,
        index: PacketIndex | PictureIndex,
        times: FrameTimes,
        sampling: FrameSampling,
        by_time: bool = False,
        find: FindPlaces | None = None,
    ) -> _Item:
        """find: as of `sample`. A video of pictures has none: each is a keyframe."""
        bounds, dtype = self._family.frame_bounds, self._family.frame_dtype
        sampled = sample(times, bounds, sampling, self._family.sample_indices, find)
        source_px = index.height_px, index.width_px
        frames = len(sampled.places)
        frame_s = sampled.seconds_per_grid / bounds.temporal_patch
        group = bounds.group_frames(frames, frame_s * sampled.frames) if bounds.group_frames else 0
        slice_frames = group or bounds.temporal_patch
        base = TimeBase.of_frames(
            slice_frames * frame_s, sampled.timestamps_s, slice_frames, of_first=self._family.timed_by_first
        )
        base = replace(
            base,
            frames_s=sampled.timestamps_s[: sampled.frames],
            source_fps=sampled.source_fps,
            length_s=len(times.ticks) / sampled.source_fps if sampled.source_fps else times.length_s,
        )
        if by_time:
            firsts = sampled.places[::slice_frames]
            base = replace(base, starts_s=tuple(times.ticks[place] * times.time_base for place in firsts))
        places = struct.pack(f"<{frames}q", *sampled.places)
        # Of a group each frame's own time becomes part of its tokens.
        in_groups = struct.pack(f"<q{frames}d", group, *sampled.timestamps_s) if group else b""
        with _too_large():
            laid = self._family.sliced_video(*source_px, frames, sampling)
            laid = laid or self._whole_frames(source_px, sampled, sampling, group, base)
        pictures = len(laid.views)
        sent = b"".join(_packed_views(laid, source_px))
        return _Item(
            modality=Modality.VIDEO,
            planned=PlannedVideo(
                source,
                index,
                sampled.places,
                slice_frames,
                laid.frames.size_px,
                laid.views,
                laid.frames.tile_px,
                dtype,
            ),
            frames=replace(laid.frames, dtype=dtype),
            grid=laid.grid,
            expansion=laid.expansion,
            base=base,
            timestamps_s=tuple(time for time in sampled.timestamps_s for _ in range(pictures)),
            content=(b"video", source.digest, sent, places, _packed(base), in_groups),
            sampling_mode="" if sampling.frame_indices else sampling.mode or UNIFORM,
        )

    def _whole_frames(
        self, source_px: SizePx, sampled: Sampled, sampling: FrameSampling, group: int, base: TimeBase
    ) -> ImageLayout:
        """The layout of a video whose frames are sent as a whole alone. group: frames of a group; 0 without."""
        size = self._family.video_size(*source_px, sampled.frames, sampling)
        if sampling.max_pixels is not None:
            size = shrink_to(*size, self._family.token_px, sampling.max_pixels)
        frames = len(sampled.places)
        grid = self._family.video_grid(-(-frames // (group or 1)), *size)
        shape, view = FrameShape(frames, size, group_frames=group), self._family.video_view(*source_px, size)
        return ImageLayout(shape, (view,), grid, self._family.expansion(grid, base))

    def _check_wish(self, request: MediaRequest) -> None:
        if request.sampling.max_slices is not None and not self._family.takes_max_slices:
            raise InvalidRequest("is not a setting of this model", field=f"{request.name}.frame_sampling.max_slices")
        token, wished = self._family.token_px**2, request.sampling.max_pixels
        if wished is not None and wished < token:
            field, limit = f"{request.name}.frame_sampling.max_pixels", f"at least {token}, the pixels of one token"
            raise InvalidRequest(field=field, limit=limit, value=wished)

    def _lay_out(
        self, conversation: Conversation, items: Sequence[_Item], check_cancelled: Callable[[], None]
    ) -> PromptPlan:
        pieces = self._tokens.conversation(
            conversation.turns,
            [item.expansion for item in items if item.expansion is not None],
            check_cancelled,
            conversation.tools,
            conversation.template_options,
        )
        tokens = sum(piece.size for piece in pieces)
        if tokens > MAX_PROMPT_TOKENS:
            text = f"has {tokens} tokens, at most {MAX_PROMPT_TOKENS} are allowed"
            raise PromptTooLong(text, field="prompt", value=tokens, limit=MAX_PROMPT_TOKENS)
        layout = lay_out(pieces, self._family.canvas_markers)
        media = tuple(
            MediaPlan(
                item.modality,
                item.grid,
                runs,
                item.frames,
                item.base.seconds_per_grid if item.base else None,
                item.timestamps_s,
                salted(tagged_digest(_MEDIA_DOMAIN, (*item.content, self._fingerprint)), conversation.cache_salt),
                item.file,
                self._family.fixed_tokens or item.modality is Modality.AUDIO,
                self._family.timed_by_first,
                item.sampling_mode,
                item.heard_s,
            )
            for item, runs in zip(items, layout.runs, strict=True)
        )
        return PromptPlan(layout.input_ids, layout.positions, media, self._family.embed_levels, self._fingerprint)


def _with_modalities(turns: Sequence[Turn], modalities: Sequence[Modality]) -> tuple[Turn, ...]:
    """The turns with these modalities in place of those that the request said."""
    known = iter(modalities)
    return tuple(
        replace(turn, parts=tuple(next(known) if isinstance(part, Modality) else part for part in turn.parts))
        for turn in turns
    )


@contextmanager
def _too_large() -> Iterator[None]:
    """Raises PromptTooLong for a grid that is too large."""
    try:
        yield
    except ValueError as error:
        raise PromptTooLong(f"is too large: {error}") from error


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


def _packed_views(laid: ImageLayout, source_px: SizePx) -> list[bytes]:
    """How each picture of a frame is sent, as bytes, different for different ways.

    source_px: of frames before they are resized. Raises MediaRejected where a resized side is too long.
    """
    packed = []
    for number, view in enumerate(laid.views):
        size_px = laid.frames.frame_px(number)
        if max(size_px) > MAX_FRAME_SIDE_PX:
            raise MediaRejected(
                f"has {source_px[1]}×{source_px[0]} pixels, and would be resized to {size_px[1]}×{size_px[0]}; at most "
                f"{MAX_FRAME_SIDE_PX} are allowed on a side",
                remedy="lower `frame_sampling.max_pixels`",
            )
        packed.append(repr((size_px, view and astuple(view))).encode())
    return packed


def _packed(base: TimeBase | None) -> bytes:
    """A time base as bytes, different for different time bases."""
    if base is None:
        return b""
    starts = str(base.starts_s).encode() if base.starts_s else b""
    return str(base.seconds_per_grid).encode() + struct.pack(f"<{len(base.slices_s)}d", *base.slices_s) + starts
