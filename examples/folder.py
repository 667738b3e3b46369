"""Asks the same question about every mp4 file of a folder, eight at a time, and prints a line of JSON for each.

    gridsieve serve &
    python examples/folder.py demo "What moves?" > answers.jsonl

If a clip cannot be read, its line has the error, and the other clips are asked about.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from gridsieve import GridsieveClient, GridsieveError

AT_ONCE = 8


async def main(folder: str = "demo", question: str = "What moves?") -> None:
    places = asyncio.Semaphore(AT_ONCE)
    async with GridsieveClient(os.environ.get("GRIDSIEVE_SERVER", "127.0.0.1:50053")) as client:

        async def ask(clip: Path) -> None:
            async with places:
                try:
                    answer = await client.ask(clip, question, pruning_rate=0.75, max_new_tokens=64)
                    found = {"clip": clip.name, "answer": answer.text, "tokens": answer.usage.prompt_tokens}
                except GridsieveError as error:
                    found = {"clip": clip.name, "error": error.reason, "message": str(error)}
            print(json.dumps(found), flush=True)

        await asyncio.gather(*(ask(clip) for clip in sorted(Path(folder).iterdir()) if clip.suffix == ".mp4"))


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except (GridsieveError, OSError) as error:
        sys.exit(f"{error}")
