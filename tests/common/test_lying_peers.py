"""Generation behind a preprocessing that lies: each lie ends the request with PEER_CONTRACT.

Lies of an encoder are in generation/test_media_contract.py, plans that contradict themselves in test_wire.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from gridsieve.common.channels import open_channel
from gridsieve.common.contract.wire import plan_messages
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.preprocessing_pb2 import FramesChunk, PreprocessResponse
from tests.common.loopback import eventually, speaking
from tests.generation.generation_peers import prompt_plan
from tests.generation.generation_service import VIDEO, answers, refused, service_of, token_ids


def with_token_outside_the_vocabulary(plan: prompt_pb2.PromptPlan) -> None:
    plan.layout.data = np.int32(2**31 - 1).tobytes() + plan.layout.data[4:]


def with_unasked_medium(plan: prompt_pb2.PromptPlan) -> None:
    (sent,) = plan_messages(prompt_plan(bytes(32), 1, VIDEO))
    plan.media.extend(sent.media)


LIES: dict[str, Callable[[prompt_pb2.PromptPlan], Any]] = {
    "a token outside the vocabulary": with_token_outside_the_vocabulary,
    "a medium that was not in the prompt": with_unasked_medium,
    "another checkpoint": lambda plan: setattr(plan, "fingerprint", bytes(32)),
    "a million axes": lambda plan: plan.layout.shape.extend([1] * 10**6),
}


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
        frames = PreprocessResponse(frames=FramesChunk())
        lies = {"nothing at all": [], "an empty message": [PreprocessResponse()], "frames first": [frames, truth]}
        for name, lie in LIES.items():
            lies[name] = [PreprocessResponse(plan=plan)]
            lie(lies[name][0].plan)
        for name, said in lies.items():
            says[:] = said
            code, reason, _ = await refused(service.ask_text())
            assert (name, code, reason) == (name, grpc.StatusCode.INTERNAL, "PEER_CONTRACT")
            says[:] = [truth]
            assert len(token_ids(await answers(service.ask_text()))) == 5
        await eventually(service.idle)
