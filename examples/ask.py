"""Asks one question about a clip and prints the answer and its cost.

    gridsieve serve &
    python examples/ask.py demo/clip.mp4 "What moves?"

GRIDSIEVE_SERVER is the address of generation, 127.0.0.1:50053 by default.
"""

import os
import sys

from gridsieve import GridsieveError
from gridsieve.sync import GridsieveClient


def main(clip: str = "demo/clip.mp4", question: str = "What moves?") -> None:
    with GridsieveClient(os.environ.get("GRIDSIEVE_SERVER", "127.0.0.1:50053")) as client:
        answer = client.ask(clip, question, pruning_rate=0.75, max_new_tokens=64)
    print(answer.text)
    print(f"{answer.usage.prompt_tokens_full} prompt tokens, {answer.usage.prompt_tokens} after pruning")
    print(f"first token after {answer.timings.time_to_first_token_s:.2f} s")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (GridsieveError, OSError) as error:
        sys.exit(f"{error}")
