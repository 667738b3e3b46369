"""`make demo`: three services on this machine, two questions about a real clip, unpruned and pruned, and their cost.

Everything that is printed comes from the services' answers. Exit status 1 where an answer is missing, 130 on Ctrl-C.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from common.checkpoint import DEMO_MODEL
from common.contract.errors import FramesieveError, StartupError
from demo.example import CLIP, QUESTIONS
from framesieve import Accepted, Delta, Finished, FramesieveClient, Timings, Usage, Video
from framesieve.cli.launcher import LocalStack
from framesieve.cli.signals import unwind_on_signals

RATES = (0.0, 0.75)
MAX_NEW_TOKENS = 48
TIMEOUT_S = 120.0

CAPTION = (
    "Each instant before the first token belongs to the earliest stage that is not finished, so the stages add up to "
    "it even though decoding and encoding overlap. One question about the clip at another frame rate was asked before, "
    "so that nothing here pays for code that runs for the first time. The clip is decoded and encoded once: what is "
    "asked about it next, at any rate, finds its embeddings in the encoder's cache; at the same rate, its tokens in "
    "generation's, which then prefills the question alone."
)


@dataclass(frozen=True, slots=True)
class Row:
    """What a question, numbered from 1, cost at one rate."""

    number: int
    rate: float
    usage: Usage
    timings: Timings


def main(model: Path = DEMO_MODEL) -> int:
    """Runs the demo and returns its exit status."""
    console = Console(highlight=False)
    unwind_on_signals()
    try:
        console.print("[dim]starting preprocessing, the encoder and generation …[/]")
        with LocalStack(model) as stack:
            rows = asyncio.run(ask_all(console, stack.address))
        console.print(cost_table(rows))
        console.print(f"[dim]{CAPTION}[/]")
        picture = f".venv/bin/framesieve inspect {os.path.relpath(CLIP)} --pruning-rate {RATES[-1]} -o kept.png"
        console.print(f"\nA picture of what was kept:  {picture}", soft_wrap=True)
    except KeyboardInterrupt:
        return 130
    except (StartupError, FramesieveError, OSError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    return 0


async def ask_all(console: Console, address: str) -> list[Row]:
    """Every question at every rate, one after the other, the answers printed as they come."""
    rows = []
    async with FramesieveClient(address) as client:
        await client.ask(Video(CLIP, fps=1), QUESTIONS[0].text, max_new_tokens=MAX_NEW_TOKENS, timeout_s=TIMEOUT_S)
        for number, question in enumerate(QUESTIONS, start=1):
            console.print(f"\n[bold]{number}. {question.text}[/]  [dim](right: {question.answer})[/]", soft_wrap=True)
            for rate in RATES:
                finished = await ask(console, client, question.text, rate)
                rows.append(Row(number, rate, finished.usage, finished.timings))
    console.print()
    return rows


async def ask(console: Console, client: FramesieveClient, question: str, rate: float) -> Finished:
    """Prints the answer to one question at one rate as it comes. Raises FramesieveError where it is empty."""
    console.print(f"   [dim]rate {rate:<6g}[/]", end="")
    answered, finished = False, None
    stream = client.stream(
        CLIP, question, pruning_rate=rate, temperature=0.0, max_new_tokens=MAX_NEW_TOKENS, timeout_s=TIMEOUT_S
    )
    async for event in stream:
        match event:
            case Accepted(usage=usage):
                tokens = f"{usage.prompt_tokens_full} → {usage.prompt_tokens} tokens"
                console.print(f"[dim]{tokens:<20}[/]", end="")
            case Delta(text=text):
                answered = answered or bool(text.strip())
                console.print(text, end="", markup=False)
            case Finished():
                finished = event
    console.print()
    if finished is None or not answered:
        raise FramesieveError(f"{question!r} at rate {rate:g} has no answer")
    return finished


def cost_table(rows: list[Row]) -> Table:
    """One column a request; the stages add up, line by line, to the time to the first token."""
    table = Table(
        title="What it cost, times in milliseconds",
        title_justify="left",
        title_style="bold",
        header_style="",
        box=box.ROUNDED,
    )
    table.add_column("")
    for row in rows:
        table.add_column(f"question {row.number}\n[dim]rate {row.rate:g}[/]", justify="right")

    table.add_row("prompt tokens", *(str(row.usage.prompt_tokens_full) for row in rows))
    table.add_row("after pruning", *(str(row.usage.prompt_tokens) for row in rows), end_section=True)
    for index, stage in enumerate(rows[0].timings.stages_s):
        label = f"{'+' if index else ' '} {stage.replace('_', ' ')}"
        table.add_row(label, *(_ms(row.timings.stages_s[stage]) for row in rows))
    first_s = (row.timings.time_to_first_token_s for row in rows)
    table.add_row("= first token", *map(_ms, first_s), style="bold", end_section=True)
    table.add_row("answer tokens", *(str(row.usage.completion_tokens) for row in rows))
    speeds = (row.timings.tokens_per_second(row.usage.completion_tokens) for row in rows)
    table.add_row("tokens/s", *(f"{speed:.0f}" if speed else "–" for speed in speeds))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


if __name__ == "__main__":
    sys.exit(main())
