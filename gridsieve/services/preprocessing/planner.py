"""Plans a prompt: opens and indexes its media, selects frames and lays out the prompt. Decodes nothing.

`items` makes the item of each medium. A video whose sound is heard becomes two items, itself and its sound, of one
placeholder.

It runs on a thread and knows neither grpc nor protobuf nor metrics.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest, PromptTooLong, within
from gridsieve.common.contract.plan import (
    MAX_PROMPT_TOKENS,
    MediaPlan,
    Modality,
    PromptPlan,
    salted,
    tagged_digest,
)
from gridsieve.services.preprocessing.conversation import Conversation
from gridsieve.services.preprocessing.items.embeds import embeds_item
from gridsieve.services.preprocessing.items.image import image_item
from gridsieve.services.preprocessing.items.item import Item, PlannedMedia
from gridsieve.services.preprocessing.items.opener import Opened, Opener
from gridsieve.services.preprocessing.items.readers import IN_PROCESS, Readers
from gridsieve.services.preprocessing.items.sound import sound_item
from gridsieve.services.preprocessing.items.video import pictures_item, video_item
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.prompt.embeds import Embeds
from gridsieve.services.preprocessing.prompt.layout import lay_out
from gridsieve.services.preprocessing.prompt.tokens import ChatTokens
from gridsieve.services.preprocessing.prompt.turns import Turn
from gridsieve.services.preprocessing.sources.digests import Digests, digests
from gridsieve.services.preprocessing.sources.source import Source

_TICKS_PER_S = 1_000_000
_MEDIA_DOMAIN, _PICTURES_DOMAIN = b"gridsieve media v2", b"gridsieve pictures v1"


@dataclass(frozen=True, slots=True, eq=False)
class PlannedPrompt:
    """A plan, its media ready to be decoded, their open files, which the caller closes, and the time it took."""

    plan: PromptPlan
    media: tuple[PlannedMedia, ...]
    files: ExitStack
    plan_s: float


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
        """media_root, media_max_bytes, known, upload_root: see `Opener`."""
        self._family = load_family(checkpoint)
        self._tokens = ChatTokens(checkpoint, self._family)
        self._fingerprint = checkpoint.fingerprint
        self._opener = Opener(self._family, media_root, upload_root, media_max_bytes, known or digests())

    def plan(self, conversation: Conversation, readers: Readers = IN_PROCESS) -> PlannedPrompt:
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
            opened = [self._opener.open(request, files, readers) for request in conversation.media]
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

    def _items(self, opened: Opened, readers: Readers, image_index: int, images: int) -> list[Item]:
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
            sound = sound_item(self._family, opened.source, request.sampling, readers, "audio", begin_s)
        expansion = self._family.clip(video.grid, video.base, sound.grid.tokens)
        return [replace(video, expansion=expansion), replace(sound, expansion=None)]

    def _check_taken(self, modality: Modality, name: str) -> None:
        """Raises InvalidRequest for media that the model does not take."""
        if modality not in self._family.placeholders:
            known = " and ".join(each.plural for each in self._family.placeholders)
            raise InvalidRequest(f"is not supported: this model takes {known} only", field=name)

    def _item(self, opened: Opened, readers: Readers, image_index: int, images: int) -> Item:
        request, source, family = opened.request, opened.source, self._family
        if source is None:
            assert isinstance(request.location, Embeds)
            make = partial(embeds_item, family, request.location, image_index)
        elif opened.picture is not None:
            make = partial(image_item, family, opened, image_index, images)
        elif request.frames is not None:
            ends = request.frames.ends
            parts = source.digest, struct.pack(f"<{len(ends)}q", *ends)
            source = replace(source, digest=tagged_digest(_PICTURES_DOMAIN, parts))
            make = partial(
                pictures_item, family, source, readers.pictures(source, ends), request.frames, request.sampling
            )
        elif opened.modality is Modality.AUDIO:
            make = partial(sound_item, family, source, request.sampling, readers)
        else:
            make = partial(video_item, family, source, readers.packets(source), request.sampling, readers)
        with within(request.name):  # errors name the item, or a field of it
            return make()

    def _lay_out(
        self, conversation: Conversation, items: Sequence[Item], check_cancelled: Callable[[], None]
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
