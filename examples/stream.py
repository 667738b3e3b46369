"""Prints the events of an answer as they happen: progress of the media, then the text, then its cost.

framesieve serve &
python examples/stream.py demo/clip.mp4 "What happens?"
"""

import asyncio
import os
import sys

from framesieve import Accepted, Delta, Finished, FramesieveClient, Progress


async def main(clip: str, question: str) -> None:
    async with FramesieveClient(os.environ.get("FRAMESIEVE_SERVER", "127.0.0.1:50053")) as client:
        async for event in client.stream(clip, question, pruning_rate=0.75, max_new_tokens=64):
            match event:
                case Accepted():
                    print(f"request {event.request_id}: {event.usage.prompt_tokens} prompt tokens", file=sys.stderr)
                case Progress():
                    print(f"{event.encoded_slices} slices encoded", file=sys.stderr)
                case Delta():
                    print(event.text, end="", flush=True)
                case Finished():
                    print()
                    print(f"{event.usage.completion_tokens} tokens, {event.reason.value}", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
