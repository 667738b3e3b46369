"""The item of embeddings that the prompt brings."""

from __future__ import annotations

from gridsieve.common.contract.plan import FrameShape, Modality
from gridsieve.services.preprocessing.items.item import Item, packed_base
from gridsieve.services.preprocessing.layouts.family import Family
from gridsieve.services.preprocessing.prompt.embeds import Embeds
from gridsieve.services.preprocessing.video.slices import PlannedEmbeds


def embeds_item(family: Family, embeds: Embeds, index: int) -> Item:
    """index: of an image, among those of the prompt. Raises InvalidRequest for a grid that no such media have."""
    base = embeds.time_base(family.frame_bounds.temporal_patch, of_first=family.timed_by_first)
    content = (b"embeds", embeds.digest, str(embeds.grid).encode(), packed_base(base))
    if embeds.modality is Modality.IMAGE:
        expansion = family.embedded_image(embeds.grid, embeds.tile_columns, index)
    else:
        expansion = family.expansion(embeds.grid, base)
    return Item(embeds.modality, PlannedEmbeds(), FrameShape(), embeds.grid, expansion, content, base)
