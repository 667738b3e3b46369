"""A prompt's plan: media opened and indexed, frames chosen, the prompt laid out. Nothing is decoded.

It runs on a worker and knows neither grpc nor protobuf nor metrics.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from common.checkpoint import Checkpoint
from common.errors import InvalidRequest, MediaRejected, PromptTooLong
from common.plan import MAX_FRAME_SIDE_PX, MAX_PROMPT_TOKENS, Grid, MediaPlan, Modality, PromptPlan
from services.preprocessing.families import Family, load_family
from services.preprocessing.layout import MediaTokens, lay_out
from services.preprocessing.packets import read_packets
from services.preprocessing.pictures import read_picture
from services.preprocessing.sampling import FrameSampling, sample
from services.preprocessing.slices import PlannedMedia, PlannedPicture, PlannedVideo
from services.preprocessing.sources import Source, bytes_source, path_source
from services.preprocessing.tokens import ChatTokens, Turn


@dataclass(frozen=True, slots=True)
class MediaRequest:
    """One media item as it was asked for: its bytes or its path, and how it is to be looked at."""

    name: str
    modality: Modality
    location: bytes | str = field(repr=False)
    sampling: FrameSampling


@dataclass(frozen=True, slots=True)
class Conversation:
    """A checked prompt: turns whose media stand in `media`, in the same order."""

    turns: tuple[Turn, ...]
    media: tuple[MediaRequest, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedPrompt:
    """A plan, its media ready to be decoded, and their open files, which whoever asked for it closes."""

    plan: PromptPlan
    media: tuple[PlannedMedia, ...]
    files: ExitStack
    open_s: float
    plan_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """A media item between opening and layout."""

    modality: Modality
    planned: PlannedMedia
    frames: int
    grid: Grid
    seconds_per_grid: Fraction | None
    timestamps_s: tuple[float, ...]
    places: tuple[int, ...]


class Planner:
    """Plans prompts for one checkpoint. Raises StartupError for one that it cannot serve."""

    def __init__(self, checkpoint: Checkpoint, media_root: Path | None) -> None:
        self._family: Family = load_family(checkpoint)
        self._tokens = ChatTokens(checkpoint, self._family.placeholders)
        self._fingerprint = checkpoint.fingerprint
        self._media_root = media_root

    def plan(self, conversation: Conversation) -> PlannedPrompt:
        """Opens the media and lays the prompt out. The caller closes its files.

        Raises InvalidRequest, MediaRejected and MediaForbidden.
        """
        start = time.perf_counter()
        with ExitStack() as files:
            items = [self._open(request, files) for request in conversation.media]
            opened = time.perf_counter()
            plan = self._lay_out(conversation.turns, items)
            media = tuple(item.planned for item in items)
            return PlannedPrompt(plan, media, files.pop_all(), opened - start, time.perf_counter() - opened)

    def _open(self, request: MediaRequest, files: ExitStack) -> _Item:
        if isinstance(request.location, bytes):
            source = bytes_source(request.name, request.location)
        else:
            source = path_source(request.name, request.location, self._media_root)
        files.callback(source.close)
        try:
            return self._image(source, request) if request.modality is Modality.IMAGE else self._video(source, request)
        except InvalidRequest as error:
            if type(error) is InvalidRequest:  # about a field, whose place only the request knows
                raise InvalidRequest(f"{request.name}.{error}") from error
            raise

    def _image(self, source: Source, request: MediaRequest) -> _Item:
        picture = read_picture(source)
        height, width = self._family.image_size(picture.height_px, picture.width_px, request.sampling)
        planned = PlannedPicture(source, picture, height, width)
        return _Item(Modality.IMAGE, planned, 1, self._grid(1, height, width, Modality.IMAGE), None, (), ())

    def _video(self, source: Source, request: MediaRequest) -> _Item:
        index = read_packets(source)
        bounds = self._family.frame_bounds
        sampled = sample(index.times, bounds, request.sampling)
        height, width = self._family.video_size(index.height_px, index.width_px, sampled.frames, request.sampling)
        frames = len(sampled.places)
        return _Item(
            modality=Modality.VIDEO,
            planned=PlannedVideo(source, index, sampled.places, bounds.temporal_patch, height, width),
            frames=frames,
            grid=self._grid(frames, height, width, Modality.VIDEO),
            seconds_per_grid=sampled.seconds_per_grid,
            timestamps_s=sampled.timestamps_s,
            places=sampled.places,
        )

    def _grid(self, frames: int, height_px: int, width_px: int, modality: Modality) -> Grid:
        if max(height_px, width_px) > MAX_FRAME_SIDE_PX:
            raise MediaRejected(
                f"a frame would be sent as {width_px}×{height_px} pixels, at most {MAX_FRAME_SIDE_PX} are allowed on a "
                f"side: lower max_pixels"
            )
        try:
            return self._family.grid(frames, height_px, width_px, modality)
        except ValueError as error:
            raise PromptTooLong(f"a video or image is too large: {error}") from error

    def _lay_out(self, turns: Sequence[Turn], items: Sequence[_Item]) -> PromptPlan:
        pieces = self._tokens.conversation(turns)
        tokens = sum(item.grid.tokens for item in items)
        tokens += sum(piece.size for piece in pieces if not isinstance(piece, Modality))
        if tokens > MAX_PROMPT_TOKENS:
            raise PromptTooLong(f"prompt has {tokens} tokens, at most {MAX_PROMPT_TOKENS} are allowed")
        following = iter(items)
        layout = lay_out([self._media(next(following)) if isinstance(each, Modality) else each for each in pieces])
        media = tuple(
            MediaPlan(
                modality=item.modality,
                grid=item.grid,
                runs=runs,
                frames=item.frames,
                frame_height_px=item.planned.height_px,
                frame_width_px=item.planned.width_px,
                seconds_per_grid=item.seconds_per_grid,
                timestamps_s=item.timestamps_s,
                content_hash=self._content_hash(item),
            )
            for item, runs in zip(items, layout.runs, strict=True)
        )
        return PromptPlan(layout.input_ids, layout.positions, media, self._family.embed_levels, self._fingerprint)

    def _media(self, item: _Item) -> MediaTokens:
        pad_id = self._tokens.id_of(self._family.placeholders[item.modality])
        return self._family.tokens(pad_id, item.grid, item.seconds_per_grid)

    def _content_hash(self, item: _Item) -> bytes:
        """sha256 of what decides the pixels and their times; each part behind its length."""
        planned = item.planned
        digest = hashlib.sha256(b"framesieve media v1")
        parts = (
            planned.source.digest,
            item.modality.value.encode(),
            struct.pack(f"<{len(item.places)}q", *item.places),
            str(item.seconds_per_grid).encode(),
            struct.pack("<2q", planned.height_px, planned.width_px),
            self._fingerprint,
        )
        for part in parts:
            digest.update(struct.pack("<q", len(part)) + part)
        return digest.digest()
