"""A plan of a video and an image, the encoder's messages for them, and a media client connected to hand-made peers."""

from __future__ import annotations

from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.channels import open_channel
from gridsieve.common.contract.plan import Grid, Modality, PromptPlan
from gridsieve.common.handover import Receiver
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.stage_clock import StageClock
from gridsieve.services.generation.upstream.arriving_item import ModelInput, Progress
from gridsieve.services.generation.upstream.media import MediaCall, MediaClient
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.encoder_pb2 import EncodeResponse
from tests.generation.generation_peers import (
    Encoder,
    embeds_messages,
    part_messages,
    progress_message,
    prompt_message,
    prompt_plan,
    serving,
)

FINGERPRINT = bytes(range(32))
CPU = torch.device("cpu")
MODEL = ModelInput(FINGERPRINT, vocab_size=100, hidden_size=6, embed_levels=0, dtype=torch.float32, device=CPU)
# A video of 2 × 2 × 3 tokens, of which 6 are kept at a rate of one half, and an image of 4.
VIDEO, IMAGE = (Modality.VIDEO, Grid(2, 2, 3)), (Modality.IMAGE, Grid(1, 2, 2))
PLAN = prompt_plan(FINGERPRINT, 3, VIDEO, 2, IMAGE, 2)
PRUNING = prompt_pb2.Pruning(rate=0.5)
KEPT = [0, 1, 2, 3, 7, 11]
SIZE_BYTES = (6 + 4) * 6 * 4
VIDEO_EMBEDS = np.arange(36, dtype=np.float32).reshape(1, 6, 6)
IMAGE_EMBEDS = -np.arange(24, dtype=np.float32).reshape(1, 4, 6)


def items() -> list[EncodeResponse]:
    """Pieces of at most 64 bytes: three for the video's 144 bytes, two for the image's 96."""
    return [
        progress_message(0, 1, 0),
        progress_message(0, 2, 1),
        *embeds_messages(0, VIDEO_EMBEDS, KEPT, piece_bytes=64, repaired=1),
        progress_message(1, 1, 1),
        *embeds_messages(1, IMAGE_EMBEDS, None, piece_bytes=64),
    ]


def parted_items() -> list[EncodeResponse]:
    """As `items`, the video in two parts of a slice and two pieces each; its first slice keeps four of six tokens."""
    return [
        *part_messages(0, VIDEO_EMBEDS[:, :4], KEPT[:4], 1, piece_bytes=64),
        *part_messages(0, VIDEO_EMBEDS[:, 4:], KEPT[4:], None, piece_bytes=32),
        *embeds_messages(1, IMAGE_EMBEDS, None, piece_bytes=64),
    ]


@asynccontextmanager
async def client_of(
    folder: Path,
    *peers: Any,
    buffer_bytes: int = SIZE_BYTES,
    model: ModelInput = MODEL,
    another: Encoder | None = None,
) -> Any:
    """another: a second replica of the encoder among the peers."""
    room = ByteSemaphore(buffer_bytes)
    addresses = [f"unix:{folder}/{name}" for name in ("peers", "another")[: 1 + bool(another)]]
    async with (
        serving(addresses[0], *peers) as channel,
        serving(addresses[-1], another) if another else nullcontext(),
        open_channel(",".join(addresses), by_media=True) as by_media,
    ):
        yield MediaClient(channel, by_media, model, room, receiver=Receiver), room


async def receive_all(session: MediaCall) -> list[Progress | MediaItem]:
    return [event async for event in session.receive(range(len(session.plan.media)))]


async def ask(
    client: MediaClient, plan: PromptPlan = PLAN, pruning: prompt_pb2.Pruning = PRUNING, **call: Any
) -> list[Progress | MediaItem]:
    clock = StageClock()
    async with client.open(prompt_message(plan), pruning, clock, **call) as session:
        return await receive_all(session)
