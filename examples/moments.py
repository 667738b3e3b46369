"""Finds the moments of a folder's films that a text describes, as `gridsieve search`, and asks about them.

    gridsieve serve &
    gridsieve serve --model Qwen/Qwen3-VL-Embedding-2B --listen 127.0.0.1:50063 --http-listen '' --metrics-port 9111 \\
        --preprocessing-listen 127.0.0.1:50061 --encoder-listen 127.0.0.1:50062 &
    GRIDSIEVE_EMBEDDER=127.0.0.1:50063 python examples/moments.py films "a red car stops" "When does the red car stop?"

It makes vectors of films that are new or have changed first.
"""

import asyncio
import os
import sys

from gridsieve import GridsieveClient, GridsieveError
from gridsieve.common.contract.errors import StartupError
from gridsieve.moments import FolderIndex

EMBEDDER = os.environ.get("GRIDSIEVE_EMBEDDER", "127.0.0.1:50063")
SERVER = os.environ.get("GRIDSIEVE_SERVER", "127.0.0.1:50053")


async def main(folder: str = "demo", text: str = "a circle moves left", question: str = "What moves?") -> None:
    async with GridsieveClient(EMBEDDER) as embedder, FolderIndex(folder, embedder) as index:
        done = await index.update(frames={"mode": "keyframes"})
        print(f"{done.moments} new moments")
        for moment in await index.search(text, limit=3):
            print(f"{moment.path} from {moment.start_s:.1f} to {moment.end_s:.1f} s: {moment.score:.3f}")
        async with GridsieveClient(SERVER) as client:
            shown = await index.shown_for(question)
            print(await client.ask(index.parts(shown), question, pruning_rate=0.75, max_new_tokens=64))


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except (GridsieveError, StartupError, OSError) as error:
        sys.exit(f"{error}")
