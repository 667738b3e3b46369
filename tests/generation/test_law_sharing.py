"""What is computed again, and what is reused, when requests share prompts, lose blocks or receive media late.

The law holds in each case; `test_law.py` shows it for all families, this file for the one with the most parts.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.law import Question, answer, assert_law
from tests.oracle import Item, Text
from tests.tiny import BLOCK_TOKENS, Models, TinyEngine, load_models, random_item

OPENING = Text((20, 21, 22))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return load_models("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


def about(video: Item, *ids: int, new_tokens: int = 5) -> Question:
    return Question((OPENING, video, Text(ids)), new_tokens)


# The last row of the picture is in no full block: it is computed from what is kept of the embeddings.
@pytest.mark.parametrize(
    ("sides", "step", "ids"), [((3, 2, 3), Fraction(1), (50,)), ((1, 2, 3), None, tuple(range(60, 80)))]
)
def test_a_second_question_about_media_computes_only_its_own_text(
    models: Models, sides: tuple[int, int, int], step: Fraction | None, ids: tuple[int, ...]
) -> None:
    media = random_item(models.family, sides, step, rate=0.5)
    questions = [about(media, 30, 31), about(media, *ids)]
    engine = TinyEngine(models.engine)
    asked = answer(engine, questions, arrivals=[0, 20])
    cached = (questions[1].prompt_tokens - len(ids)) // BLOCK_TOKENS * BLOCK_TOKENS
    assert asked[1].spared == (0,)
    assert asked[1].request.cached_tokens == cached
    computed = [chunk for step in engine.runner.steps for chunk in step if chunk[0] == "1"]
    assert computed[0] == ("1", cached, questions[1].prompt_tokens)
    assert_law(models, engine, questions, asked)


def test_the_next_turn_of_a_conversation_computes_only_what_is_new(models: Models) -> None:
    video = random_item(models.family, (3, 2, 2), Fraction(1), rate=0.25)
    first = about(video, 30, 31, new_tokens=9)
    engine = TinyEngine(models.engine)
    said = answer(engine, [first])[0].answer
    turn = Question((*first.parts, Text(tuple(said)), Text((33, 34))), 3)
    asked = answer(engine, [turn])
    # The last token of an answer is never computed.
    known = (first.prompt_tokens + first.new_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert asked[0].request.cached_tokens == known
    assert_law(models, engine, [turn], asked)


def test_media_encoded_again_to_the_same_bits_hit_the_blocks_that_are_left(models: Models) -> None:
    video = random_item(models.family, (4, 2, 2), Fraction(1), method="none")
    once = about(video, 30, 31)
    engine = TinyEngine(models.engine, blocks=once.most_blocks)
    answer(engine, [once])
    left_blocks = 3
    filler = Text(tuple(range(100, 100 + BLOCK_TOKENS * (once.most_blocks - left_blocks))))
    answer(engine, [Question((filler,), 1)])
    asked = answer(engine, [once])
    assert asked[0].spared == ()
    assert asked[0].request.cached_tokens == left_blocks * BLOCK_TOKENS
    assert_law(models, engine, [once], asked)


def test_media_are_sent_again_if_pinning_their_blocks_could_starve_a_large_request(models: Models) -> None:
    video = random_item(models.family, (4, 2, 2), Fraction(1), method="none")
    first, second = about(video, 30, new_tokens=1), about(video, 31)
    large = Question((Text(tuple(range(100, 110))),), BLOCK_TOKENS * first.most_blocks - 8)
    engine = TinyEngine(models.engine, blocks=first.most_blocks + 1)
    answer(engine, [first])
    asked = answer(engine, [large, second])
    assert asked[1].spared == ()
    assert_law(models, engine, [large, second], asked)
