"""Three services on one host hand all frames and embeddings over in shared memory.

Services that do not know that they share a host send them in messages, in test_guarded.py.
"""

from __future__ import annotations

import asyncio
import re

from framesieve.cli.launcher import SERVICES
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Image, Video
from tests import media
from tests.integration.conftest import idle, metric
from tests.integration.fleet import Stack


def moved_bytes(stack: Stack) -> tuple[float, float, int, int]:
    """Frames and embeddings, with plans and progress, and how much of each was handed over, by the log."""
    sent = (
        metric(stack, service, "framesieve_message_bytes_total", method=method, direction="sent")
        for service, method in (("preprocessing", "Preprocess"), ("encoder", "Encode"))
    )
    logs = (stack.log(service) for service in SERVICES[:2])
    handed_over = (sum(map(int, re.findall(r'"handed_over_bytes": (\d+)', log))) for log in logs)
    return *sent, *handed_over  # type: ignore[return-value]


async def test_frames_and_embeddings_are_handed_over_and_count_as_sent(stack: Stack, client: FramesieveClient) -> None:
    before = await asyncio.to_thread(moved_bytes, stack)
    for content, rate in (
        (Video(data=media.clip(32, seed=900)), 0.5),
        (Video(data=media.clip(32, seed=901)), 0.0),
        (Image(data=media.picture(168, 168)), 0.0),
    ):
        await client.ask(content, "What moves?", pruning_rate=rate, max_new_tokens=1)
    await idle(stack)
    after = await asyncio.to_thread(moved_bytes, stack)
    sent_frames, sent_embeds, frames, embeds = (now - then for now, then in zip(after, before, strict=True))
    # Frames of 112 × 112 pixels at 2 a second of 8 s, and one of 168 × 168; 64 values of float32 for each token of
    # 28 × 28 pixels of two frames, half of which are kept of the first video.
    assert frames == 3 * (2 * 16 * 112**2 + 168**2)
    assert embeds == 4 * 64 * (8 * 16 // 2 + 8 * 16 + 36)
    assert (sent_frames > frames, sent_embeds > embeds) == (True, True)
