"""No service hashes, copies or writes large media on its event loop, where every other request would wait for it.

Processor time is measured, not wall time as by asyncio's debug mode, which on a busy machine counts other processes.
What is slow once only (a first import, a measurement that the machine disturbed) is no fault: a fault is slow in every
round.
"""

from __future__ import annotations

import re

from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Video
from gridsieve.v1.generation_pb2 import LiveFrame, RawFrame
from tests import media
from tests.integration.fleet import Fleet
from tests.integration.live import watching
from tests.preprocessing.media_server import ok, serving

ROUNDS = 2
FILE_BYTES = 48 * 2**20  # which takes 30 ms to hash


async def test_large_media_do_not_hold_up_the_event_loops(fleet: Fleet, fleet_client: GridsieveClient) -> None:
    services, client, slow = fleet.first, fleet_client, []
    for number in range(3000, 3000 + ROUNDS):
        before = [len(each.log()) for each in services]
        # A box that readers skip makes the clip large.
        clip = media.clip(seed=number) + FILE_BYTES.to_bytes(4, "big") + b"free" + bytes(FILE_BYTES - 8)
        (services[0].folder / "clip.mp4").write_bytes(clip)
        async with serving(ok(clip), port=fleet.fetch_port):
            for video in (Video(url=f"http://localhost:{fleet.fetch_port}/{number}"), Video(server_path="clip.mp4")):
                await client.ask(video, "What moves?", max_new_tokens=8, timeout_s=60)
        await client.ask(Video(data=media.clip(fps=8, seed=number)), "What moves?", max_new_tokens=8, timeout_s=60)
        async with watching(services[2].address) as live:
            for place, time_s in enumerate((0, 0.5, 1, 1.5)):
                raw = RawFrame(width=1920, height=1080, rgb=bytes([number % 256, place, 0]) * 1920 * 1080)
                await live.send(frame=LiveFrame(time_s=time_s, raw=raw))
                if place % 2:
                    await live.until("slice")
        printed = {
            f"{each.name}: {name}"
            for each, length in zip(services, before, strict=True)
            for name in re.findall(r"^SLOW (.*)", each.log()[length:], re.MULTILINE)
        }
        slow.append(printed)
    assert not set.intersection(*slow), slow
