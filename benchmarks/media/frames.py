"""A Preprocess call for one video, which selects all and reads all frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from gridsieve.client.messages import generate_request
from gridsieve.client.prompt import Video, user_turn
from gridsieve.v1 import preprocessing_pb2_grpc, prompt_pb2
from gridsieve.v1.preprocessing_pb2 import PreprocessRequest, PreprocessResponse


async def responses(channel: grpc.aio.Channel, video: Video) -> AsyncIterator[PreprocessResponse]:
    question = await asyncio.to_thread(generate_request, [user_turn(video, "")], {})
    requests = [PreprocessRequest(prompt=question.prompt), PreprocessRequest(select=prompt_pb2.Select(all=True))]
    stub = preprocessing_pb2_grpc.PreprocessingServiceStub(channel)
    async for response in stub.Preprocess(iter(requests)):
        yield response


async def read_frames(channel: grpc.aio.Channel, video: Video) -> int:
    """Reads all responses; returns the number of bytes of the frames."""
    return sum([len(each.frames.chunk.data) async for each in responses(channel, video)])
