"""Asks by OpenAI's own client, streamed (`pip install openai`).

    gridsieve serve &
    python examples/openai_client.py demo/clip.mp4 "What moves?"

OPENAI_BASE_URL is the address of the gateway, http://127.0.0.1:8000/v1 by default.
"""

import base64
import os
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError


def main(clip: str = "demo/clip.mp4", question: str = "What moves?") -> None:
    client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="unused")
    data = base64.b64encode(Path(clip).read_bytes()).decode()
    video = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}
    content: Any = [video, {"type": "text", "text": question}]  # OpenAI's types have no videos
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        max_completion_tokens=64,
        extra_body={"pruning": {"rate": 0.75}},
        stream=True,
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OpenAIError, OSError) as error:
        sys.exit(f"{error}")
