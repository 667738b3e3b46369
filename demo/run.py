"""`make demo`: asks the embedded model about a clip, unpruned and pruned, then shows what pruning saves a larger model.

All printed figures are those that the services report. Exit status 1 if a completion is missing, 130 after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from demo.example import CLIP, QUESTIONS
from gridsieve import Accepted, Delta, Finished, GridsieveClient, Timings, Usage, Video
from gridsieve.bench.clips import clips
from gridsieve.bench.model import FLAGS, write_model
from gridsieve.cli.launcher import LocalStack
from gridsieve.cli.signals import unwind_on_signals
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.common.contract.errors import GridsieveError, StartupError

RATES = (0.0, 0.75)
MAX_NEW_TOKENS = 48
TIMEOUT_S = 120.0
# The stages that the services report, in order, by what they are for.
STAGES = {
    "read and decode the video": ("fetch", "plan", "decode", "resize"),
    "vision tower": ("wait_for_encoder", "encode"),
    "choose and hand over tokens": ("prune", "transfer"),
    "prefill": ("wait_for_prefill", "prefill"),
}
CAPTION = (
    "Small: the first question above, to 2 M parameters about 16 s of 224 × 224 pixels. Larger: the same to 73 M about "
    "16 s of 448 × 448. Every question had a cache_salt of its own, so none found another's results in a cache. Stages "
    "overlap; each instant is attributed to the earliest unfinished one, so they sum to the time to the first token. "
    "Tokens are dropped by their pixels, before the tower. The small model's time is mostly that of decoding, which no "
    "rate shortens."
)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one question cost at one rate."""

    model: str
    rate: float
    usage: Usage
    timings: Timings


def main(model: Path = DEMO_MODEL) -> int:
    """Runs the demo and returns its exit status."""
    console = Console(highlight=False)
    unwind_on_signals()
    try:
        console.print("[dim]starting preprocessing, the encoder and generation with the embedded model …[/]")
        with LocalStack(model) as stack:
            costs = asyncio.run(ask_all(console, stack.address))
        console.print("\n[dim]starting them with a larger model, whose weights are random: it is only timed …[/]")
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder))
            with LocalStack(Path(folder), flags=FLAGS) as stack:
                costs += asyncio.run(time_larger(stack.address))
        console.print(cost_table(costs))
        console.print(f"[dim]{CAPTION}[/]")
        command, clip, rate = ".venv/bin/gridsieve", os.path.relpath(CLIP), f"--pruning-rate {RATES[-1]}"
        for what, how in (
            ("draw which patches were kept", f"{command} inspect {clip} {rate} -o kept.png"),
            ("measure a load", f"{command} bench --start --pruning-rate 0 {rate}"),
            ("ask in a browser", f"{command} serve, then open http://127.0.0.1:8000/"),
        ):
            console.print(f"To {what + ':':<30}{how}", soft_wrap=True)
    except KeyboardInterrupt:
        return 130
    except (StartupError, GridsieveError, OSError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    return 0


async def ask_all(console: Console, address: str) -> list[Cost]:
    """Asks every question at every rate, one after another, and streams the completions. Returns the first's costs."""
    costs = []
    async with GridsieveClient(address) as client:
        await client.ask(CLIP, QUESTIONS[-1].text, cache_salt="warm-up", timeout_s=TIMEOUT_S)
        for number, question in enumerate(QUESTIONS, start=1):
            console.print(f"\n[bold]{number}. {question.text}[/]  [dim](correct: {question.answer})[/]", soft_wrap=True)
            for rate in RATES:
                finished = await ask(console, client, question.text, rate)
                costs.append(Cost("small", rate, finished.usage, finished.timings))
    return costs[: len(RATES)]


async def ask(console: Console, client: GridsieveClient, question: str, rate: float) -> Finished:
    """Streams the completion of one question at one rate. Raises GridsieveError if it is empty."""
    console.print(f"   [dim]rate {rate:<6g}[/]", end="")
    answered, finished = False, None
    stream = client.stream(
        CLIP,
        question,
        pruning_rate=rate,
        cache_salt=f"{question} {rate}",
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
        raise GridsieveError(f"{question!r} at rate {rate:g} has no answer")
    return finished


async def time_larger(address: str) -> list[Cost]:
    """The cost of the first question at each rate, about a synthetic clip."""
    clip, question, costs = Video(data=clips()[-1]), QUESTIONS[0].text, []
    async with GridsieveClient(address) as client:
        for salt, rate in (("warm-up", RATES[-1]), *((f"{rate}", rate) for rate in RATES)):
            answer = await client.ask(
                clip, question, pruning_rate=rate, cache_salt=salt, max_new_tokens=1, timeout_s=TIMEOUT_S
            )
            costs.append(Cost("larger", rate, answer.usage, answer.timings))
    return costs[1:]


def cost_table(costs: Sequence[Cost]) -> Table:
    """A table with one column for each cost; its stages sum to the time to first token."""
    table = Table(
        title="What it cost, times in milliseconds",
        title_justify="left",
        title_style="bold",
        header_style="",
        box=box.ROUNDED,
    )
    table.add_column("model\n[dim]pruning rate[/]")
    for cost in costs:
        table.add_column(f"{cost.model}\n[dim]{cost.rate:g}[/]", justify="right")

    table.add_row("prompt tokens", *(str(cost.usage.prompt_tokens_full) for cost in costs))
    table.add_row("after pruning", *(str(cost.usage.prompt_tokens) for cost in costs), end_section=True)
    for label, stages in STAGES.items():
        table.add_row(label, *(_ms(sum(cost.timings.stages_s[stage] for stage in stages)) for cost in costs))
    table.add_row("first token", *(_ms(cost.timings.time_to_first_token_s) for cost in costs), style="bold")
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


if __name__ == "__main__":
    sys.exit(main())
