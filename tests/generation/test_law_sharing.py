"""The law where requests share: what others left in the cache, the encoder's answers, one prompt of several answers."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from services.generation.sampling.sampler import SamplingParams
from tests.law import Question, answer, assert_law, item, question, text
from tests.oracle import Item, Text
from tests.tiny import BLOCK_TOKENS, Models, TinyEngine, load_models, random_item

OPENING = Text((20, 21, 22))


@pytest.fixture(scope="module")
def models(family: str, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return load_models(family, tmp_path_factory.mktemp(family))


def about(video: Item, *ids: int, new_tokens: int = 5) -> Question:
    return Question((OPENING, video, Text(ids)), new_tokens)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_log_probabilities_do_not_depend_on_what_others_left_in_the_cache(models: Models, data: st.DataObject) -> None:
    """Prompts that begin alike, end otherwise, or have one item at another rate, in a cache that may be too small."""
    base = data.draw(question(models.family))
    questions = [base]
    for _ in range(data.draw(st.integers(1, 4))):
        parts = list(base.parts[: data.draw(st.integers(1, len(base.parts)))])
        if data.draw(st.booleans()) and isinstance(parts[-1], Item):
            parts[-1] = data.draw(
                st.one_of(st.just(replace(parts[-1], rate=0.5)), item(models.family, video=bool(parts[-1].time_step)))
            )
        questions.append(Question((*parts, data.draw(text())), data.draw(st.integers(1, 12))))
    least_blocks = max(each.most_blocks for each in questions)
    engine = TinyEngine(
        models.engine,
        blocks=least_blocks + data.draw(st.sampled_from((0, 1, 2, 4, 16, 64))),
        max_num_batched_tokens=data.draw(st.sampled_from((1, 3, 8, 64, 512))),
        max_num_seqs=data.draw(st.integers(1, 4)),
    )
    arrivals = data.draw(st.lists(st.sampled_from((0, 3, 20, 60)), min_size=len(questions), max_size=len(questions)))
    deliveries = data.draw(st.lists(st.integers(0, 20), max_size=10))
    asked = answer(engine, questions, arrivals, deliveries)
    event(f"cached: {any(each.request.cached_tokens for each in asked)}")
    event(f"media not sent again: {any(each.spared for each in asked)}")
    event(f"preempted: {engine.engine.stats().totals.preemptions > 0}")
    assert_law(models, engine, questions, asked)
    assert engine.engine.stats().blocks_used == 0


@pytest.mark.parametrize("ids", [(40, 41, 42), (50,), tuple(range(60, 80))])
def test_a_second_question_about_a_video_computes_its_own_text_alone(models: Models, ids: tuple[int, ...]) -> None:
    video = random_item(models.family, (3, 2, 3), Fraction(1), rate=0.5)
    questions = [about(video, 30, 31), about(video, *ids)]
    engine = TinyEngine(models.engine)
    asked = answer(engine, questions, arrivals=[0, 20])
    shared = questions[1].prompt_tokens - len(ids)
    assert asked[1].spared == (0,)
    assert asked[1].request.cached_tokens == shared // BLOCK_TOKENS * BLOCK_TOKENS
    computed = [window for step in engine.runner.steps for window in step if window[0] == "1"]
    assert computed[0] == ("1", shared // BLOCK_TOKENS * BLOCK_TOKENS, questions[1].prompt_tokens)
    assert_law(models, engine, questions, asked)


def test_the_next_turn_of_a_conversation_computes_what_is_new(models: Models) -> None:
    video = random_item(models.family, (3, 2, 2), Fraction(1), rate=0.25)
    first = about(video, 30, 31, new_tokens=9)
    engine = TinyEngine(models.engine)
    said = answer(engine, [first])[0].answer
    turn = Question((*first.parts, Text(tuple(said)), Text((33, 34))), 3)
    asked = answer(engine, [turn])
    # The last token of an answer is never read.
    known = (first.prompt_tokens + first.new_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert asked[0].request.cached_tokens == known
    assert_law(models, engine, [turn], asked)


def test_another_rate_of_the_same_video_is_computed_anew(models: Models) -> None:
    video = random_item(models.family, (4, 2, 2), Fraction(1), rate=0.25)
    questions = [about(video, 30), about(replace(video, rate=0.5), 30)]
    engine = TinyEngine(models.engine)
    asked = answer(engine, questions, arrivals=[0, 20])
    assert asked[1].spared == ()
    assert_law(models, engine, questions, asked)


def test_an_answer_that_comes_back_otherwise_is_another(models: Models) -> None:
    """The same media, and the encoder chooses other tokens: nothing of the first choice may be read for the second."""
    video = random_item(models.family, (4, 2, 2), Fraction(1), rate=0.5, method="random")
    once = about(video, 30, 31)
    engine = TinyEngine(models.engine, blocks=once.most_blocks)
    answer(engine, [once])
    # Takes the last blocks of the first prompt away, so that its video must come again.
    answer(engine, [Question((Text(tuple(range(100, 106))),), 1)])
    other = replace(once, kept_seed=7)
    assert other.kept != once.kept
    asked = answer(engine, [other])
    assert asked[0].spared == ()
    assert_law(models, engine, [other], asked)


def test_an_answer_that_comes_back_the_same_is_read_as_far_as_it_is_there(models: Models) -> None:
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


def test_a_preempted_question_keeps_the_media_that_it_never_received(models: Models) -> None:
    """Two second questions grow until one gives way; it goes on from the shared video, which did not come again."""
    video = random_item(models.family, (4, 2, 2), Fraction(1), method="none")
    first, *others = (about(video, 30 + i, new_tokens=n) for i, n in enumerate((1, 60, 60)))
    engine = TinyEngine(models.engine, blocks=first.most_blocks + others[0].most_blocks)
    answer(engine, [first])
    asked = answer(engine, others)
    assert [each.spared for each in asked] == [(0,), (0,)]
    assert engine.engine.stats().totals.preemptions > 0
    assert_law(models, engine, others, asked)


def test_media_come_again_where_pinning_them_could_leave_no_room_for_a_large_request(models: Models) -> None:
    video = random_item(models.family, (4, 2, 2), Fraction(1), method="none")
    first, second = about(video, 30, new_tokens=1), about(video, 31)
    large = Question((Text(tuple(range(100, 110))),), BLOCK_TOKENS * first.most_blocks - 8)
    engine = TinyEngine(models.engine, blocks=first.most_blocks + 1)
    answer(engine, [first])
    asked = answer(engine, [large, second])
    assert asked[1].spared == ()
    assert_law(models, engine, [large, second], asked)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_the_law_holds_where_several_answers_guess_and_fight_for_blocks(models: Models, data: st.DataObject) -> None:
    base = data.draw(question(models.family))
    questions = [
        replace(base, new_tokens=data.draw(st.integers(1, 16)), answers=data.draw(st.integers(1, 3))) for _ in range(2)
    ]
    questions.append(replace(data.draw(question(models.family)), answers=data.draw(st.integers(1, 3))))
    engine = TinyEngine(
        models.engine,
        blocks=max(each.most_blocks for each in questions) + data.draw(st.sampled_from((0, 1, 3))),
        max_num_batched_tokens=data.draw(st.sampled_from((2, 8, 64))),
        max_num_seqs=data.draw(st.integers(2, 9)),
        max_draft_tokens=data.draw(st.sampled_from((0, 3))),
    )
    arrivals = data.draw(st.lists(st.sampled_from((0, 2, 9)), min_size=3, max_size=3))
    firsts = answer(engine, questions, arrivals, data.draw(st.lists(st.integers(0, 9), max_size=6)))
    asked = [each for first in firsts for each in (first, *first.others)]
    event(f"preempted: {engine.engine.stats().totals.preemptions > 0}")
    event(f"guessed: {engine.engine.stats().totals.draft_tokens > 0}")
    assert_law(models, engine, [asking for asking in questions for _ in range(asking.answers)], asked)
    assert engine.engine.stats().blocks_used == 0


@pytest.mark.parametrize("max_num_batched_tokens", [5, 512])
def test_several_answers_share_one_prefill(models: Models, max_num_batched_tokens: int) -> None:
    video = random_item(models.family, (3, 2, 3), Fraction(1), rate=0.25)
    asking = about(video, 30, 31, 32)
    engine = TinyEngine(models.engine, max_num_batched_tokens=max_num_batched_tokens)
    sampled = [SamplingParams(5, temperature=1.0, seed=seed) for seed in (1, 2)]
    asked = engine.ask("0", asking.parts, SamplingParams(5), [*sampled, SamplingParams(5)])
    engine.deliver(asked, 0, video, asking.kept[0])
    engine.drain()
    engine.engine.check_integrity()
    assert asked.others[2].answer == asked.answer
    assert asked.others[0].answer != asked.others[1].answer
    assert_law(models, engine, [asking] * 4, [asked, *asked.others])
    computed = [end - start for step in engine.runner.steps for name, start, end in step if name != "0"]
    rest = asking.prompt_tokens % BLOCK_TOKENS or BLOCK_TOKENS
    assert sum(computed) == 3 * (rest + 4)
    assert engine.engine.stats().blocks_used == 0
