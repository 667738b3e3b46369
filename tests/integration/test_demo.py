"""The embedded model through three real processes gives the right answers to the questions of the demo."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from demo.example import CLIP, QUESTIONS
from demo.questions import Question
from framesieve.cli.launcher import LocalStack
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Message, Text, Video
from tests.integration.conftest import running


@pytest.fixture(scope="module")
def demo_stack() -> Iterator[LocalStack]:
    with running(None, media_root=CLIP.parent) as stack:
        yield stack


@pytest.fixture
async def client(demo_stack: LocalStack) -> AsyncIterator[FramesieveClient]:
    async with FramesieveClient(demo_stack.address) as connected:
        yield connected


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.kind)
@pytest.mark.parametrize("rate", [0.0, 0.75])
async def test_the_questions_of_the_demo_are_answered_correctly(
    client: FramesieveClient, question: Question, rate: float
) -> None:
    answer = await client.ask(CLIP, question.text, pruning_rate=rate)
    assert answer.text == question.answer
    # 16 s at 2 frames a second are 16 slices of two.
    (item,) = answer.usage.media
    assert item.grid.t == 16
    assert item.kept_tokens == int(item.grid.tokens * (1 - rate))
    assert not item.first_slice_only


async def test_a_clip_on_the_server_is_answered_like_its_bytes(client: FramesieveClient) -> None:
    question = QUESTIONS[0]
    answer = await client.ask(Video(server_path=CLIP.name), question.text, pruning_rate=0.75)
    assert answer.text == question.answer


async def test_the_next_turn_of_a_conversation_knows_the_video(client: FramesieveClient) -> None:
    first, second = QUESTIONS
    history = [
        Message("user", (Video(CLIP), Text(first.text))),
        Message("assistant", (Text(first.answer),)),
    ]
    answer = await client.ask(None, second.text, history=history, pruning_rate=0.5, max_new_tokens=24)
    assert answer.usage.media[0].grid.t == 16
    assert answer.text
