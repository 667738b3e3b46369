"""Time to first token on a long clip: overlapping stages against the same stages one after another.

The clip has 60 s of 640×360 video, sampled at 2 frames/s (120 frames), so that decoding and encoding cost about the
same. The sequential time is the sum of

    decoding   a Preprocess call alone: plan and frames
    encoding   an Encode call alone, from the plan to the last embedding, by another encoder with the same flags; its
               preprocessing is a server in this process that has all frames in memory
    prefill    the stages `wait_for_prefill` and `prefill` of our own completion: nothing overlaps them
    minus      the time to read those frames from that server: they cross the wire in both calls, but should count once

The comparison is fair: each stage runs the services' code, has the machine to itself and its input ready; only the
order differs. The plan counts once, with decoding; the transfer of embeddings counts with encoding.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from benchmarks.ask import ask
from benchmarks.clips import RATE, another_path, clip
from benchmarks.media.frames import read_frames, responses
from benchmarks.table import Row, Timings
from gridsieve.cli.launcher import Endpoint, LocalStack
from gridsieve.client.client import GridsieveClient
from gridsieve.client.encoding import encode
from gridsieve.client.prompt import Pruning, Video
from gridsieve.common.channels import open_channel
from gridsieve.common.contract.retention import EVS
from gridsieve.v1 import preprocessing_pb2_grpc
from gridsieve.v1.preprocessing_pb2 import PreprocessRequest, PreprocessResponse

FRAMES, SECONDS = 120, 60
MAX_PX = 400 * 400
QUESTION, PRUNING_RATE = "What happens in the video?", 0.75
AT_MOST = 0.75
# No caching: every request costs as much as the first. With one thread a stage, two stages have a core each.
FLAGS = {
    "one thread for the tower": ["--cache-bytes", "0", "--threads", "1"],
    "torch's threads": ["--cache-bytes", "0"],
}


def overlap(rounds: int) -> list[Row]:
    """Seconds to the first token, with one thread for the tower and with torch's default."""
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), clip(SECONDS * RATE, 360, 640, keyframe_every=60)
        return [asyncio.run(_overlap(rounds, folder, data, each)) for each in FLAGS]


async def _overlap(rounds: int, folder: Path, data: bytes, flags_name: str) -> Row:
    flags = {"encoder": FLAGS[flags_name]}
    taken = Timings()
    async with (
        LocalStack(media_root=folder, flags=flags) as stack,
        GridsieveClient(stack.address) as client,
        open_channel(stack.addresses["preprocessing"]) as preprocessing,
        replaying(folder, [each async for each in responses(preprocessing, video(folder, data))]) as address,
        LocalStack(services=("encoder",), endpoints=endpoints(folder, address), flags=flags) as encoder_alone,
        open_channel(address) as replay,
    ):
        for number in range(rounds + 1):
            asked = [video(folder, data) for _ in range(3)]
            ours, finished = await ask(client, asked[0], QUESTION, pruning_rate=PRUNING_RATE, max_new_tokens=2)
            decode_s = await timed(read_frames(preprocessing, asked[1]))
            encoder = encoder_alone.addresses["encoder"]
            encode_s = await timed(encode(encoder, asked[2], Pruning(PRUNING_RATE, EVS)))
            wire_s = await timed(read_frames(replay, asked[2]))
            if not number:  # the first is a warm-up
                continue
            stages_s = finished.timings.stages_s
            prefill_s = stages_s["wait_for_prefill"] + stages_s["prefill"]
            found = {"decoding": decode_s, "encoding": encode_s, "prefill": prefill_s, "the wire": wire_s}
            for name, seconds in found.items():
                taken.add(name, seconds)
            taken.add("ours", ours.first_token_s)
            taken.add("theirs", decode_s + encode_s - wire_s + prefill_s)
    note = ", ".join(f"{name} {taken.median(name):.2f} s" for name in found)
    what = f"first token on {FRAMES} frames of a {SECONDS} s clip, {flags_name}"
    other, note = "decode, encode, prefill in turn", f"alone, {note}"
    return Row(what, other, taken.median("ours"), taken.median("theirs"), "s", at_most=AT_MOST, note=note)


def video(folder: Path, data: bytes) -> Video:
    """A different file each time, unknown to all caches."""
    return Video(server_path=another_path(folder, data), fps=FRAMES / SECONDS, max_pixels=MAX_PX)


async def timed(work: Awaitable[Any]) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


def endpoints(folder: Path, preprocessing: str) -> dict[str, Endpoint]:
    return {"preprocessing": Endpoint(preprocessing, 0), "encoder": Endpoint(f"unix:{folder}/encoder.sock", 0)}


class _Replay(preprocessing_pb2_grpc.PreprocessingServiceServicer):
    """Sends the same plan for every prompt and, once selected, the same frames."""

    def __init__(self, recorded: Sequence[PreprocessResponse]) -> None:
        self._recorded = recorded

    async def Preprocess(
        self, requests: AsyncIterator[PreprocessRequest], context: Any
    ) -> AsyncIterator[PreprocessResponse]:
        await anext(requests)
        for each in self._recorded:
            if each.HasField("plan"):
                yield each
        await anext(requests)
        for each in self._recorded:
            if each.HasField("frames"):
                yield each


@asynccontextmanager
async def replaying(folder: Path, recorded: Sequence[PreprocessResponse]) -> AsyncIterator[str]:
    server = grpc.aio.server()
    preprocessing_pb2_grpc.add_PreprocessingServiceServicer_to_server(_Replay(recorded), server)
    address = f"unix:{folder}/replay.sock"
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)
