"""Asks about every mp4 file of a folder in one batch, by OpenAI's own client (`pip install openai`).

    gridsieve serve --media-root demo &
    python examples/batches.py demo "What moves?"

Questions that somebody waits for come first. OPENAI_BASE_URL is the address of the gateway, http://127.0.0.1:8000/v1 by
default; preprocessing reads the folder, which is below its --media-root.
"""

import json
import os
import sys
import time
from pathlib import Path

from openai import OpenAI, OpenAIError

ENDS = ("completed", "failed", "expired", "cancelled")


def main(folder: str = "demo", question: str = "What moves?") -> None:
    lines = []
    for clip in sorted(Path(folder).absolute().glob("*.mp4")):
        video = {"type": "video_url", "video_url": {"url": clip.as_uri()}}
        content = [video, {"type": "text", "text": question}]
        body = {"messages": [{"role": "user", "content": content}], "pruning": {"rate": 0.75}, "max_tokens": 64}
        line = {"custom_id": clip.name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(line))
    client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="unused")
    requests = client.files.create(file=("requests.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=requests.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status not in ENDS:
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    if batch.output_file_id:
        for row in map(json.loads, client.files.content(batch.output_file_id).text.splitlines()):
            print(f"{row['custom_id']}: {row['response']['body']['choices'][0]['message']['content']}")
    if batch.error_file_id:
        print(client.files.content(batch.error_file_id).text, end="", file=sys.stderr)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OpenAIError, OSError) as error:
        sys.exit(f"{error}")
