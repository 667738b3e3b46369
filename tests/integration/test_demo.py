"""What `python -m demo.run` prints of the services: answers, and what pruning saves."""

from __future__ import annotations

import asyncio
from io import StringIO

from rich.console import Console

from demo.example import QUESTIONS
from demo.run import RATES, ask_all, cost_table, time_larger
from tests.integration.fleet import Stack


def test_the_demo_prints_the_correct_answers_at_each_rate_and_what_they_cost(demo: Stack) -> None:
    printed = StringIO()
    console = Console(file=printed, highlight=False, width=200)
    costs = asyncio.run(ask_all(console, demo.address)) + asyncio.run(time_larger(demo.address))
    for question in QUESTIONS:
        assert printed.getvalue().count(question.answer) == 1 + len(RATES)  # the correct answer first
    for whole, pruned in (costs[:2], costs[2:]):
        assert pruned.usage.prompt_tokens < whole.usage.prompt_tokens == pruned.usage.prompt_tokens_full
    console.print(cost_table(costs))
    told = [line.split() for line in printed.getvalue().splitlines() if "after pruning" in line]
    assert [cell for cell in told[0] if cell.isdigit()] == [str(cost.usage.prompt_tokens) for cost in costs]
