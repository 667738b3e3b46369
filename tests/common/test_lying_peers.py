"""Generation behind peers that lie in a single field: each lie ends the request with PEER_CONTRACT.

The peers send raw bytes, because our own classes refuse such values.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from common.channels import open_channel
from common.checkpoint import Checkpoint
from common.contract.plan import PromptPlan
from common.contract.wire import plan_messages
from framesieve.v1 import prompt_pb2
from framesieve.v1.encoder_pb2 import EncodeResponse
from framesieve.v1.preprocessing_pb2 import FramesChunk, PreprocessResponse
from tests.common.loopback import eventually, speaking
from tests.generation.generation_peers import embeds_messages, prompt_plan
from tests.generation.generation_service import (
    HIDDEN,
    KEPT,
    TEXT_AFTER,
    TEXT_BEFORE,
    VIDEO,
    answers,
    refused,
    service_of,
    token_ids,
    video_items,
)


def with_token(plan: prompt_pb2.PromptPlan, token: int) -> None:
    """Changes the first token."""
    plan.layout.data = np.int32(token).tobytes() + plan.layout.data[4:]


def with_unasked_medium(plan: prompt_pb2.PromptPlan) -> None:
    (sent,) = plan_messages(prompt_plan(bytes(32), 1, VIDEO))
    plan.media.extend(sent.media)


# Plans that contradict themselves are in test_wire.py, embeddings that contradict the plan in
# generation/test_media_contract.py; one of each shows here that the service uses those checks.
LIES: dict[str, Callable[[prompt_pb2.PromptPlan], Any]] = {
    "a token outside the vocabulary": lambda plan: with_token(plan, 2**31 - 1),
    "a medium that was not in the prompt": with_unasked_medium,
    "another checkpoint": lambda plan: setattr(plan, "fingerprint", bytes(32)),
    "embed levels of another family": lambda plan: setattr(plan, "embed_levels", 3),
    "a million axes": lambda plan: plan.layout.shape.extend([1] * 10**6),
}
EMBEDS = np.random.default_rng(5).standard_normal((1, len(KEPT), HIDDEN), np.float32)
LYING_ITEMS: dict[str, list[EncodeResponse]] = {
    "kept falls": embeds_messages(0, EMBEDS, [*KEPT[:-2], 23, 20]),
    "NaN": embeds_messages(0, EMBEDS * np.float32("nan"), KEPT),
    "another item": embeds_messages(1, EMBEDS, KEPT),
}


def plan_message(plan: PromptPlan, number: int = 0) -> prompt_pb2.PromptPlan:
    """number: of the video, so that nothing of it is cached yet."""
    (message,) = plan_messages(plan)
    for item in message.media:
        item.content_hash = number.to_bytes(32)
    return message


def lying(plan: PromptPlan, lie: Callable[[prompt_pb2.PromptPlan], Any]) -> prompt_pb2.PromptPlan:
    message = plan_message(plan)
    lie(message)
    return message


class Peer:
    """Answers every call with `says`."""

    says: list[Any]

    async def speak(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        await context.read()
        for each in self.says:
            yield each.SerializeToString()


@asynccontextmanager
async def behind(folder: Path, checkpoint: Path, stage: str, method: str) -> AsyncIterator[tuple[Any, Peer]]:
    """Generation whose peer `stage` says what it is told."""
    address, peer = f"unix:{folder}/peer", Peer()
    async with (
        speaking(address, f"/framesieve.v1.{method}", peer.speak),
        open_channel(address) as channel,
        service_of(folder, checkpoint, **{f"{stage}_channel": channel}) as service,
    ):
        yield service, peer
        await eventually(service.idle)


async def check_refused(lie: str, call: Any) -> None:
    code, reason, _ = await refused(call)
    assert (lie, code, reason) == (lie, grpc.StatusCode.INTERNAL, "PEER_CONTRACT")


async def test_a_false_answer_of_an_encoder_breaks_the_contract(tmp_path: Path, tiny_checkpoint: Path) -> None:
    plan = prompt_plan(Checkpoint(tiny_checkpoint).fingerprint, TEXT_BEFORE, VIDEO, TEXT_AFTER)
    first = EncodeResponse(plan=plan_message(plan))
    lies = {name: [EncodeResponse(plan=lying(plan, lie))] for name, lie in LIES.items()}
    lies |= {name: [first, *items] for name, items in LYING_ITEMS.items()}
    async with behind(tmp_path, tiny_checkpoint, "encoder", "EncoderService/Encode") as (service, peer):
        for number, (name, lie) in enumerate(lies.items(), start=1):
            peer.says = lie
            await check_refused(name, service.ask())
            peer.says = [EncodeResponse(plan=plan_message(plan, number)), *video_items()]
            assert len(token_ids(await answers(service.ask()))) == 5


async def test_a_false_answer_of_preprocessing_breaks_the_contract(tmp_path: Path, tiny_checkpoint: Path) -> None:
    method = "PreprocessingService/Preprocess"
    async with behind(tmp_path, tiny_checkpoint, "preprocessing", method) as (service, peer):
        plan = service.preprocessing.plan
        truth = PreprocessResponse(plan=plan_message(plan))
        lies = {name: [PreprocessResponse(plan=lying(plan, lie))] for name, lie in LIES.items()}
        lies |= {
            "nothing at all": [],
            "an empty message": [PreprocessResponse()],
            "frames before the plan": [PreprocessResponse(frames=FramesChunk()), truth],
        }
        for name, lie in lies.items():
            peer.says = lie
            await check_refused(name, service.ask_text())
            peer.says = [truth]
            assert len(token_ids(await answers(service.ask_text()))) == 5
