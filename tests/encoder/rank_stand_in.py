"""A rank that computes nothing, and writes the messages that it gets to a file in the folder of its facts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from gridsieve.common.ranks import Orders


def main() -> None:
    orders = Orders(int(sys.argv[1]))
    notes = Path(orders.facts["folder"]) / f"rank-{orders.facts['rank']}-of-{orders.facts['ranks']}"
    with notes.open("w", buffering=1) as file:
        file.write(f"{os.getpid()}\n")
        while (told := orders.receive()) is not None:
            file.write(f"{len(told)} {told[:20].decode()}\n")
            if told.startswith(b"answer"):
                orders.answer(told * orders.facts["rank"])
            if told == b"leave":
                sys.exit(7)
            if told == b"hang":
                signal.pause()
        file.write("the end\n")


if __name__ == "__main__":
    main()
