"""`make demo`: starts the three services and asks two questions about a clip, unpruned and pruned, with their cost.

All is asked a second time of services whose model has a head that drafts tokens.

All printed figures are those that the services report. Exit status 1 if a completion is missing, 130 after Ctrl-C.
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

from demo.example import CLIP, QUESTIONS
from framesieve import Accepted, Delta, Finished, FramesieveClient, Timings, Usage, Video
from framesieve.cli.launcher import LocalStack
from framesieve.cli.signals import unwind_on_signals
from framesieve.common.checkpoint import DEMO_DRAFT, DEMO_MODEL
from framesieve.common.contract.errors import FramesieveError, StartupError
from framesieve.common.contract.retention import PIXEL_CHANGE

RATES = (0.0, 0.75)
METHOD = PIXEL_CHANGE  # nothing costs less before the first token
MAX_NEW_TOKENS = 48
DRAFTING = {"generation": ["--draft-model", str(DEMO_DRAFT), "--num-draft-tokens", "5"]}
TIMEOUT_S = 120.0

CAPTION = (
    "Each instant before the first token is attributed to the earliest unfinished stage, so the stages sum to "
    "it although decoding and encoding overlap. A question about the clip at another frame rate was asked before as a "
    "warm-up. The pruned tokens are dropped before the tower, by their pixels, so it encodes the others alone. The "
    "first question at a rate decodes and encodes the clip; the second finds its tokens in generation's prefix cache, "
    "which then prefills only the question. Drafted: the same, with the model's EAGLE-3 head; the answers "
    "are the same."
)


@dataclass(frozen=True, slots=True)
class Row:
    """The cost of one question (numbered from 1) at one rate."""

    number: int
    rate: float
    usage: Usage
    timings: Timings

    @property
    def tokens_per_second(self) -> str:
        speed = self.timings.tokens_per_second(self.usage.completion_tokens)
        return f"{speed:.0f}" if speed else "–"


def main(model: Path = DEMO_MODEL) -> int:
    """Runs the demo and returns its exit status."""
    console = Console(highlight=False)
    unwind_on_signals()
    try:
        console.print("[dim]starting preprocessing, the encoder and generation …[/]")
        with LocalStack(model) as stack:
            rows = asyncio.run(ask_all(console, stack.address))
        console.print("[dim]asking again, with a head that drafts tokens …[/]")
        with LocalStack(model, flags=DRAFTING) as stack:
            drafted = asyncio.run(ask_all(Console(quiet=True), stack.address))
        console.print(cost_table(rows, drafted))
        console.print(f"[dim]{CAPTION}[/]")
        how = f"--pruning-rate {RATES[-1]} --method {METHOD}"
        picture = f".venv/bin/framesieve inspect {os.path.relpath(CLIP)} {how} -o kept.png"
        console.print(f"\nTo draw which patches were kept:  {picture}", soft_wrap=True)
        console.print(
            "To ask in a browser:  .venv/bin/framesieve serve, then open http://127.0.0.1:8000/", soft_wrap=True
        )
    except KeyboardInterrupt:
        return 130
    except (StartupError, FramesieveError, OSError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    return 0


async def ask_all(console: Console, address: str) -> list[Row]:
    """Asks every question at every rate, one after another, and streams the completions."""
    rows = []
    async with FramesieveClient(address) as client:
        await client.ask(Video(CLIP, fps=1), QUESTIONS[-1].text, max_new_tokens=MAX_NEW_TOKENS, timeout_s=TIMEOUT_S)
        for number, question in enumerate(QUESTIONS, start=1):
            console.print(f"\n[bold]{number}. {question.text}[/]  [dim](correct: {question.answer})[/]", soft_wrap=True)
            for rate in RATES:
                finished = await ask(console, client, question.text, rate)
                rows.append(Row(number, rate, finished.usage, finished.timings))
    console.print()
    return rows


async def ask(console: Console, client: FramesieveClient, question: str, rate: float) -> Finished:
    """Streams the completion of one question at one rate. Raises FramesieveError if it is empty."""
    console.print(f"   [dim]rate {rate:<6g}[/]", end="")
    answered, finished = False, None
    stream = client.stream(
        CLIP,
        question,
        pruning_rate=rate,
        pruning_method=METHOD,
        temperature=0.0,
        max_new_tokens=MAX_NEW_TOKENS,
        timeout_s=TIMEOUT_S,
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


def cost_table(rows: list[Row], drafted: list[Row]) -> Table:
    """A table with one column per request; its stages sum to the time to first token. drafted: the same with drafts."""
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
    table.add_row("tokens/s", *(row.tokens_per_second for row in rows))
    table.add_row("tokens/s, drafted", *(row.tokens_per_second for row in drafted))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


if __name__ == "__main__":
    sys.exit(main())
