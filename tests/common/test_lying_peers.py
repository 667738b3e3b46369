"""Generation behind a preprocessing that lies: each lie ends the request with PEER_CONTRACT.

Plans that contradict prompt or model are in generation/test_media.py, those that contradict themselves in test_wire.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from gridsieve.common.channels import open_channel
from gridsieve.common.contract.wire import plan_messages
from gridsieve.v1.preprocessing_pb2 import FramesChunk, PreprocessResponse
from tests.common.loopback import eventually, speaking
from tests.generation.generation_service import answers, refused, service_of, token_ids


async def test_a_false_answer_of_preprocessing_breaks_the_contract(tmp_path: Path, tiny_checkpoint: Path) -> None:
    says: list[PreprocessResponse] = []

    async def speak(requests: Any, context: Any) -> AsyncIterator[bytes]:
        await context.read()
        for each in says:
            yield each.SerializeToString()

    address = f"unix:{tmp_path}/peer"
    async with (
        speaking(address, {"/gridsieve.v1.PreprocessingService/Preprocess": speak}),
        open_channel(address) as channel,
        service_of(tmp_path, tiny_checkpoint, preprocessing_channel=channel) as service,
    ):
        (plan,) = plan_messages(service.preprocessing.plan)
        truth = PreprocessResponse(plan=plan)
        other = PreprocessResponse(plan=plan)
        other.plan.fingerprint = bytes(32)
        frames = PreprocessResponse(frames=FramesChunk())
        lies = {
            "nothing at all": [],
            "an empty message": [PreprocessResponse()],
            "frames first": [frames, truth],
            "another checkpoint": [other],
        }
        for name, said in lies.items():
            says[:] = said
            code, reason, _ = await refused(service.ask_text())
            assert (name, code, reason) == (name, grpc.StatusCode.INTERNAL, "PEER_CONTRACT")
            says[:] = [truth]
            assert len(token_ids(await answers(service.ask_text()))) == 5
        await eventually(service.idle)
