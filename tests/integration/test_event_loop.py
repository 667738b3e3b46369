"""No service hashes, copies or writes large media on its event loop, where every other request would wait for it.

Processor time is measured, not wall time as by asyncio's debug mode, which on a busy machine counts other processes.
What is slow once only (a first import, a measurement that the machine disturbed) is no fault: a fault is slow in every
round.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from websockets.asyncio.client import connect

from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Video
from framesieve.common.contract.limits import MAX_PICTURE_BYTES
from tests import media
from tests.integration.fleet import TIMED, Fleet
from tests.integration.gateway import data_url, gateway
from tests.preprocessing.media_server import ok, serving

ROUNDS = 2
FILE_BYTES = 48 * 2**20  # which takes 30 ms to hash


async def test_large_media_do_not_hold_up_the_event_loops(fleet: Fleet, fleet_client: FramesieveClient) -> None:
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
        slow.append(
            {
                f"{each.name}: {name}"
                for each, length in zip(services, before, strict=True)
                for name in printed(each.log()[length:])
            }
        )
    assert not set.intersection(*slow), slow


def printed(log: str) -> set[str]:
    return set(re.findall(r"^SLOW (.*)", log, re.MULTILINE))


async def test_the_largest_picture_of_a_realtime_session_does_not_hold_up_the_gateways_loop(
    fleet: Fleet, tmp_path: Path
) -> None:
    picture = media.picture(112, 112)  # which ends before its file does
    url, slow = data_url("image/png", picture + bytes(MAX_PICTURE_BYTES - len(picture))), list[set[str]]()
    item = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": url}]}
    shown = json.dumps({"type": "conversation.item.create", "item": item})
    with gateway(fleet.generation.address, tmp_path, program=TIMED.format(name="gateway")) as door:
        async with connect(f"ws://127.0.0.1:{door.port}/v1/realtime", proxy=None, compression=None) as socket:
            for _ in range(ROUNDS):
                before = len(door.log.read_text())
                await socket.send(shown)
                while (event := json.loads(await socket.recv()))["type"] != "conversation.item.done":
                    assert event["type"] != "error", event
                slow.append(printed(door.log.read_text()[before:]))
    assert not set.intersection(*slow), slow
