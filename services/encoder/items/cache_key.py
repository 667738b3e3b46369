"""What an item's unpruned embeddings are known by: everything that decides them, and nothing else.

Where its tokens stand in a prompt, how it is pruned and who asks take no part.
"""

from __future__ import annotations

import struct

import torch

from common.contract.plan import tagged_digest
from common.contract.plan import MediaPlan

_DOMAIN = b"framesieve embeddings v1"


def cache_key(item: MediaPlan, dtype: torch.dtype, embed_levels: int) -> bytes:
    """32 bytes that differ wherever modality, grid, dtype, levels or content do.

    The content hash covers bytes, frames, their size, time base and the checkpoint's fingerprint.
    """
    return tagged_digest(
        _DOMAIN,
        (
            item.content_hash,
            item.modality.value.encode(),
            struct.pack("<3q", item.grid.t, item.grid.h, item.grid.w),
            str(dtype).encode(),
            struct.pack("<q", embed_levels),
        ),
    )
