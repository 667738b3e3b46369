"""Generation services with EAGLE-3 heads: a random one, which is never right, and that of the demo model, which is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest

from benchmarks.drafts import drafting_flags
from demo.example import CLIP as DEMO_CLIP
from demo.example import QUESTIONS
from gridsieve import GridsieveClient, Video
from gridsieve.client.answer import Answer
from gridsieve.client.prompt import Options
from gridsieve.common.checkpoint import DEMO_DRAFT, DEMO_MODEL, Checkpoint
from tests import media
from tests.drafts import SPECFORGE, write_head
from tests.integration.conftest import UNCOMPILED, another_generation
from tests.integration.fleet import Service, Stack

CLIP = media.clip(8, fps=4)
SCHEMA = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 30, "maxItems": 40}


@pytest.fixture
def drafting(stack: Stack, tiny_checkpoint: Path, tmp_path: Path) -> Iterator[Service]:
    text = Checkpoint(tiny_checkpoint).config["text_config"]
    head = write_head(tmp_path / "head", SPECFORGE, text["hidden_size"], text["vocab_size"])
    flags = ("--draft-model", str(head), "--kv-cache-tokens", "512", "--max-num-batched-tokens", "64")
    with another_generation(stack, tiny_checkpoint, tmp_path, *flags) as service:
        yield service


async def test_wrong_drafts_change_no_answer_and_stop(client: GridsieveClient, drafting: Service) -> None:
    sampled = Options(temperature=1.0, seed=3, max_new_tokens=30, n=2)
    document = Options(json_schema=SCHEMA, temperature=1.0, seed=1, max_new_tokens=100)
    long = Options(temperature=0, max_new_tokens=200, ignore_eos=True)

    def all_of(asked: GridsieveClient) -> list[Awaitable[Answer]]:
        film = Video(data=CLIP)
        return [asked.ask(film, "What moves?", **each) for each in (sampled, document)] + [asked.ask(None, "?", **long)]

    async with GridsieveClient(drafting.address) as other:
        expected = [tokens_of(await each) for each in all_of(client)]
        answers = await asyncio.gather(*all_of(other))
        alone = await other.ask(None, "?", **long)
    assert [tokens_of(each) for each in answers] == expected
    assert tokens_of(alone) == expected[-1]
    usages = [each.usage for each in (*answers, alone)]
    for name in ("draft_tokens", "accepted_draft_tokens"):
        assert drafting.metric(f"gridsieve_generation_{name}_total") == sum(getattr(each, name) for each in usages)
    assert 0 < alone.usage.draft_tokens < 200  # three a step, had it not stopped


async def test_most_tokens_that_the_demos_head_drafts_are_those_of_the_answer(demo: Stack, tmp_path: Path) -> None:
    usages = []
    with another_generation(demo, DEMO_MODEL, tmp_path, *drafting_flags(str(DEMO_DRAFT)), *UNCOMPILED) as drafting:
        async with GridsieveClient(drafting.address) as asked:
            for rate in (0.0, 0.75):
                answer = await asked.ask(DEMO_CLIP, QUESTIONS[-1].text, pruning_rate=rate, pruning_method="evs")
                assert answer.text == QUESTIONS[-1].answer
                usages.append(answer.usage)
    assert 2 * sum(each.accepted_draft_tokens for each in usages) > sum(each.draft_tokens for each in usages)


def tokens_of(answer: Answer) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in answer.choices]
