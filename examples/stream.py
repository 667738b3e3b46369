"""Prints the events of an answer as they happen: progress of the media, then the text, then its cost.

gridsieve serve &
python examples/stream.py demo/clip.mp4 "What happens?"
"""

import asyncio
import os
import sys

from gridsieve import Accepted, Delta, Finished, GridsieveClient, GridsieveError, Progress


async def main(clip: str = "demo/clip.mp4", question: str = "What moves?") -> None:
    async with GridsieveClient(os.environ.get("GRIDSIEVE_SERVER", "127.0.0.1:50053")) as client:
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
    try:
        asyncio.run(main(*sys.argv[1:]))
    except (GridsieveError, OSError) as error:
        sys.exit(f"{error}")
