"""Watches a clip as if it were filmed now, and prints the answer to a question every four seconds.

    gridsieve serve &
    python examples/watch.py demo/clip.mp4 "What moves?"

A third argument is the speed, such as 2 for twice as fast. GRIDSIEVE_SERVER is the address of generation,
127.0.0.1:50053 by default.
"""

import asyncio
import io
import os
import sys
import time

import av

from gridsieve import GridsieveClient, GridsieveError, LiveDropped, LiveFinished, LiveSession, Trigger


async def play(clip: str, session: LiveSession, speed: float) -> None:
    """Shows each frame when it is due, as a camera would."""
    began_s = time.monotonic()
    with av.open(clip) as container:
        for frame in container.decode(video=0):
            time_s, jpeg = frame.time or 0.0, io.BytesIO()
            frame.to_image().save(jpeg, "JPEG")
            await asyncio.sleep(began_s + time_s / speed - time.monotonic())
            await session.show(jpeg.getvalue(), time_s)
    await session.close()  # waits until all questions are answered


async def tell(session: LiveSession) -> None:
    async for event in session.events():
        match event:
            case LiveFinished():
                print(f"{event.seen_s:.1f} s: {event.answer}", flush=True)
            case LiveDropped():
                print(f"{event.frames} frames came too fast", file=sys.stderr)


async def main(clip: str = "demo/clip.mp4", question: str = "What moves?", speed: str = "1") -> None:
    trigger = Trigger(question, every_s=4, sampling={"max_new_tokens": 64})
    client = GridsieveClient(os.environ.get("GRIDSIEVE_SERVER", "127.0.0.1:50053"))
    async with client, client.live(triggers=[trigger]) as session, asyncio.TaskGroup() as tasks:
        tasks.create_task(tell(session))
        tasks.create_task(play(clip, session, float(speed)))


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except* (GridsieveError, OSError, av.FFmpegError) as errors:
        sys.exit(f"{errors.exceptions[0]}")
